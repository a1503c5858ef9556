"""Regions of the emulator: released memory is poisoned, so that reads of it show."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from simplegraph.device.emulator.arena import Arena, living
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.sleeping.regions import MemoryRegion, Segments, Span, storage_reference, storage_span

# A NaN of float32 and bfloat16 that every computation turns into another NaN: updates in place show, too.
_POISON = b"\xbf\xff"
_storage: Callable[[Any], torch.UntypedStorage | None] = torch.UntypedStorage._new_with_weak_ptr


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type == "cpu":
            yield leaf.untyped_storage()
        elif isinstance(leaf, torch.UntypedStorage) and leaf.device.type == "cpu":  # as `set_` is passed
            yield leaf


class _Inside(threading.local):
    running = False  # an operator, in the innermost of the regions that are open


_INSIDE = _Inside()


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storages that operators make, unless an inner mode of this class does."""

    def __init__(self, made: dict[int, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._made = made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {storage._cdata for storage in _storages((args, kwargs))}
        inside, _INSIDE.running = _INSIDE.running, True
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            _INSIDE.running = inside
        made = () if inside else _storages(result)
        self._made.update(
            {storage._cdata: storage_reference(storage) for storage in made if storage._cdata not in given}
        )
        return result


class EmulatedRegion(MemoryRegion):
    """The storages that were made while allocations went to this region."""

    def __init__(self, part: str, device: GraphDevice) -> None:
        super().__init__(part, device)
        self._made: dict[int, Any] = {}
        self._held: list[Any] = []  # from `save` to `forget`: nothing else may get the addresses

    def _allocator(self) -> AbstractContextManager[object]:
        return _Allocations(self._made)

    def storages(self) -> Iterable[torch.UntypedStorage]:
        """List the storages that are alive."""
        return [storage for reference in self._made.values() if (storage := _storage(reference.cdata)) is not None]

    def look(self, present: Segments) -> None:
        if not self.asleep:
            self.live = self.blocks = _spans(self.storages())

    def save(self, discards: Callable[[Span], bool]) -> None:
        # Storages that ended since the last `look` leave the spans. No storage may end while spans are written.
        self._held = [*self.storages()]
        self.live = self.blocks = _spans(self._held)
        super().save(discards)

    @property
    def unused(self) -> bool:
        return not (self.live or self.open)

    def refuse_use(self, storages: Iterable[torch.UntypedStorage], said: str) -> None:
        """Do nothing: reads return poison, and writes are found at waking."""

    def copy_out(self, host: int, span: Span) -> None:
        ctypes.memmove(host, *span)

    def copy_in(self, host: int, span: Span) -> None:
        ctypes.memmove(span.address, host, span.size)

    def fill(self, span: Span, byte: int) -> None:
        ctypes.memset(span.address, byte, span.size)

    def unmap(self, block: Span) -> None:
        ctypes.memmove(block.address, _poison(block.size), block.size)

    def map(self, block: Span) -> bool:
        self.written = self.written or ctypes.string_at(*block) != _poison(block.size)
        return block.size <= self.device.free_memory()

    def forget(self) -> None:
        super().forget()
        self._held = []


def _spans(storages: Iterable[torch.UntypedStorage]) -> list[Span]:
    return [span for span in map(storage_span, storages) if span.size]


def _poison(size: int) -> bytes:
    return (_POISON * (size // len(_POISON) + 1))[:size]


class EmulatedPool(EmulatedRegion):
    """The memory of an emulated pool of graphs, which only replays write."""

    def __init__(self, device: GraphDevice, arena: Arena) -> None:
        super().__init__("graphs", device)
        self._arena = arena

    def holds_graphs(self, pool: GraphPool) -> bool:
        return pool.handle is self._arena

    def map(self, block: Span) -> bool:
        mapped, self.written = super().map(block), False
        return mapped

    def storages(self) -> Iterable[torch.UntypedStorage]:
        return [memory.storage for memory in living(self._arena.memories) if memory.pool is self._arena]
