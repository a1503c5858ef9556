"""Outputs that share memory with each other or with inputs, and how a replay returns them."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key
from simplegraph.call.inputs import HostArg, Slot, TensorArg, extent, overlap, overlaps_itself


class _View(NamedTuple):
    """An output as a view: its index, the index of the input in whose memory it is, and its offset there."""

    output: int
    source: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


class SharedOutputs:
    """Returns the outputs of a graph if some share memory.

    Args:
        whole: the outputs as the forward returned them.
        passed: the leaves that the forward was passed.
        outputs: the real rows of the outputs.
        slots: the slots of the plan, for the real rows of the inputs.
        cloned: indices of outputs in graph memory that must be cloned.
        lent: indices of outputs in graph memory that are returned as aliases of it.

    Attributes:
        sources: indices of the inputs that outputs are, or are views of.
        shares_memory: True if outputs share memory with each other, or with inputs.

    Raises:
        CannotBind: a replay cannot return such outputs.
    """

    def __init__(
        self,
        whole: Sequence[Any],
        passed: Sequence[Any],
        outputs: Sequence[Any],
        slots: Sequence[Slot],
        cloned: Collection[int],
        lent: Collection[int],
    ) -> None:
        self._outputs = list(outputs)
        tensors = {index: leaf for index, leaf in enumerate(whole) if issubclass(type(leaf), Tensor)}
        first = {id(leaf): index for index, leaf in reversed(tensors.items())}
        self._repeated = [(index, first[id(leaf)]) for index, leaf in tensors.items() if first[id(leaf)] != index]
        places = {id(leaf): index for index, leaf in enumerate(passed) if issubclass(type(leaf), Tensor)}
        self._passed_through = [(index, places[id(leaf)]) for index, leaf in tensors.items() if id(leaf) in places]
        made = tensors.keys() - dict(self._repeated).keys() - dict(self._passed_through).keys()
        memory = {
            storage_key(passed[at]): at for at, slot in enumerate(slots) if isinstance(slot.arg, TensorArg | HostArg)
        }
        inside = {index: memory[key] for index in sorted(made) if (key := storage_key(tensors[index])) in memory}
        self._lent = sorted(made.intersection(lent))
        for index in sorted(made.intersection((*cloned, *lent)) | inside.keys()):
            if type(tensors[index]) is not Tensor:
                kind = type(tensors[index]).__name__
                raise CannotBind(Reason.UNSUPPORTED_OUTPUT, f"a {kind} that the forward makes; return a tensor")
        self._views = [_view_of_input(outputs[index], index, source, slots[source]) for index, source in inside.items()]
        groups = _groups([index for index in sorted(made) if index in cloned], outputs)
        self._groups = [_group(members, outputs) for members in groups]
        self._cloned = sorted(made & set(cloned) - inside.keys() - set(itertools.chain(*groups)))
        self.sources = sorted({source for _, source in self._passed_through} | set(inside.values()))
        sources = [(source, slots[source].arg) for source in self.sources]
        self._hosts = [(source, arg) for source, arg in sources if isinstance(arg, HostArg)]
        self.shares_memory = bool(self._repeated or self._passed_through or self._views or self._groups)

    def refusal(self, leaves: Sequence[Any]) -> CannotBind | None:
        """Return why this call's outputs cannot be the same views of its inputs as at the capture; None if they can.

        Inputs that are compared by value were captured as contiguous copies.
        """
        for source, arg in self._hosts:
            if not _same_strides(arg.leaf.shape, leaves[source].stride(), arg.leaf.stride()):
                return CannotBind(Reason.ALIASED, f"an output may lie in {arg.name}, which is not contiguous")
        return None

    def hand_out(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the outputs of the replay of a call that was passed `leaves`."""
        outputs = self._outputs.copy()
        for index in self._cloned:
            outputs[index] = outputs[index].clone()
        for index in self._lent:
            outputs[index] = outputs[index].detach()
        for memory, views in self._groups:
            copy = memory.clone()
            for index, _, shape, stride, offset in views:
                outputs[index] = copy.as_strided(shape, stride, offset)
        for index, source in self._passed_through:
            outputs[index] = leaves[source]
        for index, source, shape, stride, offset in self._views:
            leaf = leaves[source]
            outputs[index] = leaf.as_strided(shape, stride, leaf.storage_offset() + offset)
        for index, before in self._repeated:
            outputs[index] = outputs[before]
        return outputs


def _view_of_input(output: Tensor, index: int, source: int, slot: Slot) -> _View:
    arg = slot.arg
    part: Tensor = arg.leaf if isinstance(arg, HostArg) else slot.view
    if isinstance(arg, TensorArg) and not _same_strides(part.shape, part.stride(), arg.layout.strides(part.shape)):
        why = "which has gaps" if arg.layout.gaps else "padded in an inner dimension"
        raise CannotBind(Reason.ALIASED, f"an output is a view of {arg.name}, {why}")
    if output.dtype is not part.dtype or _is_lazy(output):
        raise CannotBind(Reason.ALIASED, f"an output is a view of {arg.name} as another dtype")
    offset = int(output.storage_offset() - part.storage_offset())
    return _View(index, source, tuple(output.shape), tuple(output.stride()), offset)


def _same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """True if both strides lay out the elements alike; the stride of a dimension of size 1 has no meaning."""
    return one == other or all(a == b or size == 1 for size, a, b in zip(shape, one, other, strict=True))


def _groups(indices: Sequence[int], outputs: Sequence[Any]) -> list[list[int]]:
    """Group outputs whose address ranges in one storage overlap, and outputs that repeat an element.

    Columns of a matrix share no element, but one copy of the matrix is cheaper than a copy of each column.
    """
    by_storage: dict[int, list[int]] = collections.defaultdict(list)
    for index in indices:
        if outputs[index].numel():
            by_storage[outputs[index].untyped_storage().data_ptr()].append(index)
    groups = ((members, [outputs[index] for index in members]) for members in by_storage.values())
    return [
        members
        for members, (first, *others) in groups
        if (overlap((first, *others)) if others else overlaps_itself(first) and not _is_lazy(first))
    ]


def _is_lazy(tensor: Tensor) -> bool:
    """True if the tensor is a lazy conjugate or negation of the values in its memory."""
    return tensor.is_conj() or tensor.is_neg()


def _group(members: Sequence[int], outputs: Sequence[Any]) -> tuple[Tensor, list[_View]]:
    """Return a view of the memory of several outputs, and the outputs as views of a copy of this memory."""
    tensors: list[Tensor] = [outputs[index] for index in members]
    if len({tensor.dtype for tensor in tensors}) > 1 or any(map(_is_lazy, tensors)):
        raise CannotBind(Reason.ALIASED, "outputs are views of one memory as different dtypes")
    start = min(int(tensor.storage_offset()) for tensor in tensors)
    end = max(int(tensor.storage_offset()) + extent(tensor.shape, tensor.stride()) for tensor in tensors)
    with torch.inference_mode(False), torch.no_grad():
        memory = tensors[0].as_strided((end - start,), (1,), start)
    views = [
        _View(index, -1, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()) - start)
        for index, tensor in zip(members, tensors, strict=True)
    ]
    return memory, views
