"""Regions: memory that is released to the driver and mapped again together, at the same addresses."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from simplegraph.base.errors import ReplayError
from simplegraph.base.modes import outside_modes
from simplegraph.base.tensors import storage_key
from simplegraph.device.protocol import GraphDevice, GraphPool

PARTS = ("weights", "caches", "graphs")
Segments = Mapping[Any, Sequence[Mapping[str, Any]]]  # of torch's allocator, by pool
_CHUNK = 1 << 28  # bytes of one host buffer; a power of two, to which torch rounds pinned memory
storage_reference: Callable[[torch.UntypedStorage], Any] = reductions.StorageWeakRef
# Storages that refuse to be used while they sleep, by key: while its reference lives, no other storage gets that key.
_REFUSING: dict[int, tuple[Any, MemoryRegion]] = {}
# Torch has both, from some release on, where it is built for a GPU.
_refuse: Callable[[int, str], None] | None = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_allow: Callable[[int], None] | None = getattr(torch._C, "_clear_storage_data_ptr_access_error_msg", None)


class AsleepError(ReplayError):
    """The model that was called is asleep, or cannot wake yet."""


class Span(NamedTuple):
    """A range of addresses."""

    address: int
    size: int


class MemoryRegion(abc.ABC):
    """Memory that sleeps together.

    Args:
        part: "weights", "caches" or "graphs".
        device: the device of the memory.

    Attributes:
        asleep: True while its pages are released.
        open: True while a thread allocates from it.
        blocks: all its memory, as of the last `look`; live: the memory in use.
        written: True if code wrote to it while it slept; the write is lost.
    """

    written = False

    def __init__(self, part: str, device: GraphDevice) -> None:
        self.part, self.device = part, device
        self.asleep = self.open = False
        self.blocks: list[Span] = []
        self.live: list[Span] = []
        self._copies: list[tuple[Span, int]] = []  # and where on the host they are
        self._chunks: list[Tensor] = []
        self._discarded: list[Span] = []

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Direct this thread's allocations to the region in the block."""
        self.open = True
        try:
            with self._allocator():
                yield
        finally:
            self.open = False

    @abc.abstractmethod
    def _allocator(self) -> AbstractContextManager[object]:
        """Return the context that directs allocations to the region."""

    @abc.abstractmethod
    def look(self, present: Segments) -> None:
        """Update `blocks` and `live` from the segments of torch's allocator."""

    def holds_graphs(self, pool: GraphPool) -> bool:
        """True if it contains the memory of a pool's graphs."""
        return False

    @property
    @abc.abstractmethod
    def unused(self) -> bool:
        """True if nothing of it is in use, as of the last `look`."""

    def close(self) -> None:  # noqa: B027
        """Release unused memory for good. Call it when the device is idle: queued work would lose its pages."""

    @outside_modes()  # else an open region of the emulator would take it for its own
    def host_buffer(self, size: int) -> Tensor:
        """Make a host buffer of this many bytes for copies."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=not self.device.emulated)

    @abc.abstractmethod
    def copy_out(self, host: int, span: Span) -> None:
        """Queue a copy to the host."""

    @abc.abstractmethod
    def copy_in(self, host: int, span: Span) -> None:
        """Queue a copy from the host."""

    @abc.abstractmethod
    def fill(self, span: Span, byte: int) -> None:
        """Queue a fill."""

    @abc.abstractmethod
    def unmap(self, block: Span) -> None:
        """Release the pages of a block; its addresses stay reserved."""

    @abc.abstractmethod
    def map(self, block: Span) -> bool:
        """Map pages to a block again; False if there is no memory."""

    def refuse_use(self, storages: Iterable[torch.UntypedStorage], said: str) -> None:
        """Let torch raise an error with this text if one of these storages is used, if torch supports that."""
        if _refuse is None or _allow is None:
            return
        for storage in storages:
            _REFUSING[storage._cdata] = storage_reference(storage), self
            _refuse(storage._cdata, said)

    def allow_use(self) -> None:
        """Let its storages be used again."""
        for key in [key for key, (_, region) in _REFUSING.items() if region is self]:
            reference, _ = _REFUSING.pop(key)
            if _allow is not None and not reference.expired():
                _allow(key)

    @property
    def size(self) -> int:
        """Its bytes."""
        return sum(block.size for block in self.blocks)

    @property
    def copied(self) -> int:
        """The bytes that are on the host."""
        return sum(span.size for span, _ in self._copies)

    def save(self, discards: Callable[[Span], bool]) -> None:
        """Queue copies of its contents to the host, except discarded contents."""
        spans = self.blocks if self.part == "graphs" else self.live  # blocks without an owner hold static outputs
        self._discarded = [span for span in spans if discards(span)]
        pieces = list(_pieces(span for span in spans if not discards(span)))
        total = sum(span.size for span, _, _ in pieces)
        self._chunks = [self.host_buffer(min(_CHUNK, total - start)) for start in range(0, total, _CHUNK)]
        self._copies = [(span, self._chunks[chunk].data_ptr() + offset) for span, chunk, offset in pieces]
        for span, host in self._copies:
            self.copy_out(host, span)

    def give_back(self) -> None:
        """Release the pages. Call it when no work uses them, and the copies are complete."""
        self.asleep = True
        for block in self.blocks:
            self.unmap(block)

    def restore(self) -> None:
        """Queue copies from the host, after the region is mapped; discarded weights become NaN, caches 0."""
        for span, host in self._copies:
            self.copy_in(host, span)
        for span in self._discarded:
            self.fill(span, 0xFF if self.part == "weights" else 0)
        self.asleep = False

    def forget(self) -> None:
        """Drop the copies on the host. Call it when they have been read."""
        self._copies, self._chunks, self._discarded = [], [], []


def map_all(regions: Sequence[MemoryRegion], undo: contextlib.ExitStack) -> None:
    """Map the pages of all regions, or of none; `undo` releases them again.

    Raises:
        AsleepError: there is not enough memory.
    """
    for region in regions:
        for block in region.blocks:
            if not region.map(block):
                undo.close()
                needed, free = sum(other.size for other in regions), region.device.free_memory()
                raise AsleepError(
                    f"waking needs {gib(needed)} GiB, and {gib(free)} GiB is free on {region.device.torch_device}. "
                    "Nothing was woken: free memory, and wake again."
                )
            undo.callback(region.unmap, block)


def gib(size: int) -> str:
    """Format a number of bytes in GiB."""
    return f"{size / 2**30:.2f}"


def _pieces(spans: Iterable[Span]) -> Iterator[tuple[Span, int, int]]:
    """Cut spans so that each piece fits into a chunk: the piece, its chunk and its place there."""
    at = 0
    for span in spans:
        done = 0
        while done < span.size:
            size = min(span.size - done, _CHUNK - at % _CHUNK)
            yield Span(span.address + done, size), at // _CHUNK, at % _CHUNK
            at, done = at + size, done + size


def storage_span(storage: torch.UntypedStorage) -> Span:
    """Return the addresses of a storage."""
    return Span(storage.data_ptr(), storage.nbytes())


def refusing_region(tensor: Tensor) -> MemoryRegion | None:
    """Return the region of a sleeping tensor that refuses all uses, also of its address; None for other tensors."""
    entry = _REFUSING.get(storage_key(tensor))
    return None if entry is None else entry[1]
