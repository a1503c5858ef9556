"""Outputs and gradients that are handed out in the memory of their graphs, and what is done before the next replay."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from simplegraph.base.modes import outside_modes

# Private to torch; where it is absent, all gradients are copied.
_use_count: Any = getattr(torch._C, "_storage_Use_Count", lambda _: -1)
_reference_count = sys.getrefcount
_weak: Any = StorageWeakRef  # typed loosely because torch leaves it untyped


@functools.lru_cache(maxsize=1)
def _counts_of_one() -> tuple[int, int]:
    """Count the uses of a storage that one tensor has, and the Python references to a `.grad` that nobody else has."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(1, requires_grad=True)
        torch.autograd.backward(leaf.sum())
        tensor = torch.zeros(1)
        return _use_count(tensor.untyped_storage()._cdata), _references(leaf)


def _references(leaf: Tensor) -> int:
    return sys.getrefcount(leaf.grad)


def alone_in_memory(tensor: Tensor) -> bool:
    """True if no other tensor has its storage; False where torch does not count."""
    alone, _ = _counts_of_one()
    return bool(0 < alone == _use_count(tensor.untyped_storage()._cdata))


class HandedOut:
    """Tensors that a graph makes, and that are handed out in its memory.

    Args:
        outputs: these, as the graph has them, each in a storage of its own.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        self._outputs = list(outputs)  # a use of each is theirs, also once the graph is dropped
        self._storages = [output.untyped_storage() for output in outputs]
        self.keys = [storage._cdata for storage in self._storages]
        self._uses = [_counts_of_one()[0]] * len(outputs)
        self._references = self._count_references()

    def unused(self) -> bool:
        """True if nobody has one of them."""
        return (
            list(map(_use_count, self.keys)) == self._uses
            and list(map(_reference_count, self._storages)) == self._references
        )

    def _count_references(self) -> list[int]:
        return list(map(_reference_count, self._storages))


class GraphGradients(HandedOut):
    """Gradients that a graph makes, and that are handed out in its memory.

    Args:
        outputs: these, as the graph has them, each in a storage of its own.
        leaves: tensors whose `.grad` may be one of them.
    """

    def __init__(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        super().__init__(outputs)
        self.leaves = leaves

    def only_in_grad(self) -> bool:
        """True if nobody has one but `.grad` of the leaves."""
        uses, (_, unseen) = dict(zip(self.keys, self._uses, strict=True)), _counts_of_one()
        for leaf in self.leaves:
            if leaf.grad is not None and (key := leaf.grad.untyped_storage()._cdata) in uses:
                if _references(leaf) != unseen:
                    return False
                uses[key] += 1
        return list(map(_use_count, self.keys)) == [*uses.values()] and self._count_references() == self._references

    def move(self) -> None:
        """Give each `.grad` among them memory of its own."""
        held = set(self.keys)
        with outside_modes():
            present = [(leaf, leaf.grad) for leaf in self.leaves if leaf.grad is not None]
            moved = [(leaf, grad) for leaf, grad in present if grad.untyped_storage()._cdata in held]
            made = torch._foreach_mul([grad for _, grad in moved], 1)
            for (leaf, _), grad in zip(moved, made, strict=True):
                leaf.grad = grad


class HandingOut:
    """The permissions to hand out gradients and outputs in the memory of graphs, for all that a module's graphs have.

    Most loops have dropped gradients when the next forward comes, so that no copy of them is ever made. One that is
    left in `.grad`, to be added to, is moved then. Where anyone else has kept one, or several threads call the module,
    later gradients are copies. Outputs are copies once one of an earlier call is in use when the next forward comes.

    Attributes:
        permitted: gradients may be handed out; outputs: outputs may.
        excuses: True if the next call may run eagerly for an output in use, rather than capture a second set of graphs.
    """

    def __init__(self) -> None:
        self.permitted = self.outputs = True
        self.excuses = False
        self._thread = threading.get_ident()
        self._watched: list[Any] = []

    def watch(self, outputs: Sequence[Tensor]) -> None:
        """Remember the outputs of an eager call, to look at the next one if they are in use."""
        self._watched = [_weak(output.untyped_storage()) for output in outputs if output.layout is torch.strided]

    def look(self) -> None:
        """Hand out no outputs if one of the last eager call is in use."""
        if not all(storage.expired() for storage in self._watched):
            self.outputs = False
        self._watched = []

    def output_kept(self) -> None:
        """Hand out no more outputs, since one is in use when the next forward comes."""
        if self.outputs:
            self.outputs, self.excuses = False, True

    def may_move(self, gradients: GraphGradients) -> bool:
        """True if nobody but `.grad` has them; if not, none will be handed out again."""
        self.permitted = self.permitted and threading.get_ident() == self._thread and gradients.only_in_grad()
        return self.permitted
