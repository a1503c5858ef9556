"""Memory that a run may change, copied so that it can be put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.tensors import storage_key
from simplegraph.device.generators import HostRandom, put_random_states, random_states

_LIMIT_BYTES = 1 << 30  # of one copy, if a tenth of what is free is not less


def copy_limit(free: int) -> int:
    """Return the most bytes of memory that one copy may take where so many are free."""
    return min(_LIMIT_BYTES, free // 10)


class SavedMemory:
    """Memory that a run may change, by name, and copies of what it held at one moment and another.

    Tensors that share memory are copied once, with all that shares it.

    Args:
        written: what the graph itself was seen to write, with names; others: what it may write unseen.
        inputs: the caller's tensors that stand for static inputs of the graph, or are such.

    Attributes:
        nbytes: bytes that one copy takes.
    """

    def __init__(
        self,
        written: Sequence[tuple[str, Tensor]],
        others: Iterable[tuple[str, Tensor]] = (),
        inputs: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        self._written = list(written)
        self._written_by_breaks: set[int] = set()
        self.tensors, self.inputs = [*written, *others], list(inputs)
        storages = {storage_key(tensor): tensor.untyped_storage() for _, tensor in (*self.tensors, *self.inputs)}
        self._bytes = {key: _view(it, torch.uint8, 0, (it.nbytes(),), (1,)) for key, it in storages.items()}
        self.nbytes = sum(view.numel() for view in self._bytes.values())

    def __contains__(self, key: int) -> bool:
        return key in self._bytes

    def __iter__(self) -> Iterator[int]:
        return iter(self._bytes)

    def copy(self) -> list[Tensor]:
        """Copy everything as it is now."""
        with torch.inference_mode(False):
            return [view.clone() for view in self._bytes.values()]

    def put(self, copies: Sequence[Tensor]) -> None:
        """Let everything be as it was when it was copied."""
        for view, copy in zip(self._bytes.values(), copies, strict=True):
            view.copy_(copy)

    def copied(self, keys: Collection[int]) -> Callable[[], object]:
        """Copy some of it, given by storage keys, for breaks; what is returned puts it back."""
        self._written_by_breaks.update(keys)
        copies = [(self._bytes[key], self._bytes[key].clone()) for key in keys if key in self._bytes]
        return lambda: [view.copy_(copy) for view, copy in copies]

    @property
    def written_by_segments(self) -> list[tuple[str, Tensor]]:
        """Return what was seen to be written, but for what breaks write."""
        return [entry for entry in self._written if storage_key(entry[1]) not in self._written_by_breaks]

    def seen_in(self, copies: Sequence[Tensor], tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """View `tensors`, or `inputs`, as they were when they were copied."""
        storages = dict(zip(self._bytes, (copy.untyped_storage() for copy in copies), strict=True))
        return [
            _view(storages[storage_key(it)], it.dtype, it.storage_offset(), it.shape, it.stride()) for _, it in tensors
        ]


def remember(saved: SavedMemory | None, generators: Sequence[torch.Generator]) -> contextlib.ExitStack:
    """Remember memory and random numbers as they are now; closing what is returned puts them back."""
    undo = contextlib.ExitStack()
    if saved is not None:
        undo.callback(saved.put, saved.copy())
    undo.callback(put_random_states, generators, random_states(generators))
    undo.callback(HostRandom().put_back)
    return undo


def _view(storage: torch.UntypedStorage, dtype: torch.dtype, *place: Any) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, *place)
