"""What captures take from warmups: device copies of Python data, and values that were read back from the device."""

from __future__ import annotations

import collections
import ctypes
import functools
import hashlib
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from simplegraph.base.operators import without_modes
from simplegraph.base.tensors import storage_key

# A CPU tensor that the forward did not make is compared by its bytes at every call, up to this many; of a larger one
# the version is, and as many bytes spread over it.
WATCHED_BYTES = 64
# Beyond this a CPU tensor belongs to a forward that brings its weights along, which no graph should hold.
LARGEST_BYTES = 16 << 20
LARGEST_TOTAL_BYTES = 64 << 20
# Warmups in a row that find other values than the one before; then a capture is tried, which refuses them by name.
_MOST_CHANGES = 8


class _ServingThread(threading.local):
    active = False


SERVING = _ServingThread()  # active while a capture of this thread gets its constants from device copies


class FrozenConstants:
    """The device copies of a model's constants, by the graph whose last warmup moved them to the device.

    A copy is found by what it is a copy of, to the bit. So a graph without a warmup of its own may use another's
    copies: what it finds is right, and what it does not find asks for a warmup.

    Attributes:
        met_host: True once a warmup met a CPU tensor; None before the first warmup.
        notes: what extras noted of eager runs; see `simplegraph.base.extras`.
    """

    def __init__(self) -> None:
        self.met_host: bool | None = None
        self.notes: dict[str, int] = {}
        self._had_any = False
        self._copies: dict[Hashable, dict[Hashable, Tensor]] = {}
        self._answers: dict[Hashable, dict[bytes, Answer]] = {}
        self._sources: dict[Hashable, list[WatchedValue | WatchedVersion]] = {}
        self._changes: collections.Counter[Hashable] = collections.Counter()

    def learn(
        self,
        key: Hashable,
        copies: Mapping[Hashable, Tensor],
        sources: Sequence[Tensor] = (),
        *,
        met_host: bool,
        answers: Mapping[bytes, Answer],
    ) -> None:
        """Keep what a warmup of this graph moved to the device, instead of what an earlier one did.

        Args:
            key: the graph.
            copies: what was moved, by content.
            sources: the CPU tensors from before among what was moved: the next warmup may find other values in them.
            met_host: True if the warmup met a CPU tensor.
            answers: what it read back from memory that nothing writes, by computation.
        """
        self.met_host = bool(self.met_host) or met_host
        self._changes[key] = self._changes[key] + 1 if self._changed(key) else 0
        self._had_any = self._had_any or bool(copies)
        self._copies[key] = {content: self.find(content, copy) for content, copy in copies.items()}
        self._answers[key] = dict(answers)
        roots = dict.fromkeys(root for answer in answers.values() for root in answer.roots)
        self._sources[key] = [*map(WatchedValue, sources), *roots]

    def find(self, content: Hashable, otherwise: Tensor) -> Tensor:
        """Return a copy that another graph has already, so that equal constants take memory once."""
        return next((copies[content] for copies in self._copies.values() if content in copies), otherwise)

    def copies(self, key: Hashable) -> Mapping[Hashable, Tensor]:
        """Return the copies that a capture of this graph may use: its own, or all if it had no warmup."""
        own = self._copies.get(key)
        return own if own is not None else {c: copy for copies in self._copies.values() for c, copy in copies.items()}

    def answers(self, key: Hashable) -> Mapping[bytes, Answer]:
        """Return the values that a capture of this graph may take: its own, or all if it had no warmup."""
        own = self._answers.get(key)
        return own if own is not None else {d: answer for each in self._answers.values() for d, answer in each.items()}

    def needs_warmup(self, key: Hashable) -> bool:
        """True if there are or were constants, and this graph had no warmup, or one that found other values.

        Values that change from call to call need no more warmups: they are no constants.
        """
        if key in self._copies:
            return self._changes[key] < _MOST_CHANGES and self._changed(key)
        return self._had_any

    def _changed(self, key: Hashable) -> bool:
        return not all(source.is_same() for source in self._sources.get(key, ()))

    def clear(self) -> None:
        """Drop the copies and values; that there were copies is kept."""
        self._copies.clear()
        self._answers.clear()
        self._sources.clear()
        self._changes.clear()


def content(tensor: Tensor) -> Hashable:
    """Identify a CPU tensor by dtype, shape, strides and every bit of its value."""
    with without_modes():
        raw = value_bytes(tensor)
    value = raw if len(raw) <= WATCHED_BYTES else hashlib.blake2b(raw).digest()
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), value


def value_bytes(tensor: Tensor) -> bytes:
    """Return a CPU tensor's elements, in order, as bytes."""
    plain = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    # By address: `.numpy()` knows fewer dtypes, and modes of functions see it.
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""


def span(tensor: Tensor) -> int:
    """Count the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_watchable(tensor: Tensor) -> bool:
    """True if writes to a CPU tensor can be noticed: it is small, or its version tells of them.

    Inference tensors have no version. Memory that NumPy holds too cannot be resized, which tells it apart.
    """
    nbytes = span(tensor)
    if nbytes <= WATCHED_BYTES:
        return True
    return nbytes <= LARGEST_BYTES and not tensor.is_inference() and tensor.untyped_storage().resizable()


class WatchedValue:
    """The value of a CPU tensor: whatever writes to it, versions and hooks may miss it.

    Args:
        tensor: itself.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._read = _reader(tensor)
        self._before = self._read()

    def is_same(self) -> bool:
        """True if it is what it was."""
        return self._read() == self._before


def _reader(tensor: Tensor) -> Callable[[], Hashable]:
    """Return a function that reads what tells if a CPU tensor was written to: its bytes, or version and some bytes."""
    address, nbytes, read = tensor.data_ptr, span(tensor), ctypes.string_at
    if nbytes > WATCHED_BYTES:
        return functools.partial(_version_and_samples, tensor, nbytes)

    def current_bytes() -> bytes:
        start = address()
        return read(start, nbytes) if start else b""  # its storage may have been resized to nothing

    return current_bytes


_SAMPLES = 8  # of 8 bytes each


def _version_and_samples(tensor: Tensor, nbytes: int) -> Hashable:
    start = tensor.data_ptr()
    places = (start + (nbytes - 8) * index // (_SAMPLES - 1) for index in range(_SAMPLES)) if start else ()
    samples = tuple(ctypes.string_at(place, 8) for place in places)
    return tensor._version, tensor.untyped_storage().resizable(), samples


class WatchedVersion:
    """Tells if a tensor was written to by an operator, or is gone, without keeping it alive.

    Args:
        tensor: itself, since another view of its memory may have a version of its own.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._storage = storage_key(tensor)
        self._before: tuple[int, int] | None = (tensor.data_ptr(), tensor._version)
        with _LOCK:
            _WATCHED.add(self)

    @property
    def tensor(self) -> Tensor | None:
        """The tensor; None if it is gone."""
        return self._tensor()

    def is_same(self) -> bool:
        """True if it is what it was."""
        tensor = self._tensor()
        return tensor is not None and (tensor.data_ptr(), tensor._version) == self._before

    def end_if_in(self, storages: Collection[int]) -> None:
        """Count it as another one from now on, if it lies in memory that graphs write: replays raise no version."""
        if self._storage in storages:
            self._before = None


_LOCK = threading.Lock()
_WATCHED: weakref.WeakSet[WatchedVersion] = weakref.WeakSet()
_WRITTEN_BY_GRAPHS: dict[int, StorageWeakRef] = {}


def note_graph_writes(tensors: Iterable[Tensor]) -> None:
    """Note memory that a graph was recorded to write: what it holds is data from now on."""
    storages = {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}
    with _LOCK:
        for key in [key for key, storage in _WRITTEN_BY_GRAPHS.items() if storage.expired()]:  # type: ignore[no-untyped-call]
            del _WRITTEN_BY_GRAPHS[key]
        for key, storage in storages.items():
            if key not in _WRITTEN_BY_GRAPHS:
                _WRITTEN_BY_GRAPHS[key] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        for watched in _WATCHED:
            watched.end_if_in(storages.keys())


def is_written_by_graphs(tensor: Tensor) -> bool:
    """True if a graph was recorded to write to a tensor's memory."""
    storage = _WRITTEN_BY_GRAPHS.get(storage_key(tensor))
    return storage is not None and not storage.expired()  # type: ignore[no-untyped-call]


class Answer(NamedTuple):
    """A value that was read, and what it follows from."""

    value: Any
    roots: tuple[WatchedVersion, ...]
