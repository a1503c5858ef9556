"""Constants that captures take from warmups: device copies of Python data, and values read back from the device."""

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

# CPU tensors that the forward did not make are compared at every call: up to this size by all their bytes, larger ones
# by their version and by this number of bytes, spread over the tensor.
WATCHED_BYTES = 64
# Larger CPU tensors are assumed to be weights that the forward moves each time, which no graph should contain.
LARGEST_BYTES = 16 << 20
LARGEST_TOTAL_BYTES = 64 << 20
# Warmups in a row that find new values; after them a capture is tried, which refuses the values by name.
_MAX_CHANGES = 8


class _ServingThread(threading.local):
    active = False


SERVING = _ServingThread()  # active while a capture of this thread gets its constants from device copies


class FrozenConstants:
    """The device copies of a model's constants, for each graph from its last warmup.

    A copy is found by the exact bits of the value, so a graph without a warmup may use copies of other graphs. If a
    copy is missing, the graph needs a warmup.

    Attributes:
        met_host: True once a warmup used a CPU tensor; None before the first warmup.
        probe_counts: counts that probes of extras made in eager runs; see `simplegraph.base.extras`.
    """

    def __init__(self) -> None:
        self.met_host: bool | None = None
        self.probe_counts: dict[str, int] = {}
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
        """Keep the constants of a graph's warmup, and drop those of an earlier warmup.

        Args:
            key: the key of the graph.
            copies: device copies of moved tensors, by content.
            sources: moved CPU tensors from before the warmup, whose values may change until the next warmup.
            met_host: True if the warmup used a CPU tensor.
            answers: values that it read back from memory that no run writes, by computation.
        """
        self.met_host = bool(self.met_host) or met_host
        self._changes[key] = self._changes[key] + 1 if self._changed(key) else 0
        self._had_any = self._had_any or bool(copies)
        self._copies[key] = {content: self.find(content, copy) for content, copy in copies.items()}
        self._answers[key] = dict(answers)
        roots = dict.fromkeys(root for answer in answers.values() for root in answer.roots)
        self._sources[key] = [*map(WatchedValue, sources), *roots]

    def find(self, content: Hashable, otherwise: Tensor) -> Tensor:
        """Return an equal copy of another graph if there is one, so that equal constants take memory once."""
        return next((copies[content] for copies in self._copies.values() if content in copies), otherwise)

    def copies(self, key: Hashable) -> Mapping[Hashable, Tensor]:
        """Return the copies for a capture of this graph: its own, or all copies if it had no warmup."""
        own_copies = self._copies.get(key)
        return (
            own_copies
            if own_copies is not None
            else {c: copy for copies in self._copies.values() for c, copy in copies.items()}
        )

    def answers(self, key: Hashable) -> Mapping[bytes, Answer]:
        """Return the answers for a capture of this graph: its own, or all answers if it had no warmup."""
        own_answers = self._answers.get(key)
        return (
            own_answers
            if own_answers is not None
            else {d: answer for answers in self._answers.values() for d, answer in answers.items()}
        )

    def needs_warmup(self, key: Hashable) -> bool:
        """True if there are or were constants, and this graph had no warmup since they last changed.

        Values that change from call to call need no more warmups: they are not constants.
        """
        if key in self._copies:
            return self._changes[key] < _MAX_CHANGES and self._changed(key)
        return self._had_any

    def _changed(self, key: Hashable) -> bool:
        return not all(source.is_same() for source in self._sources.get(key, ()))

    def clear(self) -> None:
        """Drop the copies and answers, but remember if there were any."""
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
    # By address, since `.numpy()` supports fewer dtypes, and torch function modes see it.
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""


def span(tensor: Tensor) -> int:
    """Count the bytes from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def is_watchable(tensor: Tensor) -> bool:
    """True if writes to a CPU tensor can be noticed: it is small, or has a version that shows them.

    Inference tensors have no version. Memory shared with NumPy is recognised because it cannot be resized.
    """
    nbytes = span(tensor)
    if nbytes <= WATCHED_BYTES:
        return True
    return nbytes <= LARGEST_BYTES and not tensor.is_inference() and tensor.untyped_storage().resizable()


class WatchedValue:
    """Compares the value of a CPU tensor, since versions and hooks may miss a write to it.

    Args:
        tensor: the tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._read = _reader(tensor)
        self._before = self._read()

    def is_same(self) -> bool:
        """True if the value did not change."""
        return self._read() == self._before


def _reader(tensor: Tensor) -> Callable[[], Hashable]:
    """Return a function that reads a CPU tensor's bytes if it is small, else its version and some bytes."""
    address, nbytes, read = tensor.data_ptr, span(tensor), ctypes.string_at
    if nbytes > WATCHED_BYTES:
        return functools.partial(_version_and_samples, tensor, nbytes)

    def current_bytes() -> bytes:
        start = address() if tensor.is_cpu else 0  # `module.to` moves a tensor itself
        return read(start, nbytes) if start else b""  # its storage may have been resized to nothing

    return current_bytes


_SAMPLES = 8  # of 8 bytes each


def _version_and_samples(tensor: Tensor, nbytes: int) -> Hashable:
    start = tensor.data_ptr() if tensor.is_cpu else 0
    places = (start + (nbytes - 8) * index // (_SAMPLES - 1) for index in range(_SAMPLES)) if start else ()
    samples = tuple(ctypes.string_at(place, 8) for place in places)
    return tensor._version, tensor.untyped_storage().resizable(), samples


class WatchedVersion:
    """Detects if an operator wrote to a tensor, or if the tensor is gone, without keeping it alive.

    Args:
        tensor: the tensor itself: other views of its memory may have different versions.
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
        """True if the tensor was neither moved nor written to."""
        tensor = self._tensor()
        return tensor is not None and (tensor.data_ptr(), tensor._version) == self._before

    def end_if_in(self, storages: Collection[int]) -> None:
        """Count the tensor as changed if graphs write to its memory: replays raise no version."""
        if self._storage in storages:
            self._before = None


_LOCK = threading.Lock()
_WATCHED: weakref.WeakSet[WatchedVersion] = weakref.WeakSet()
_WRITTEN_BY_GRAPHS: dict[int, StorageWeakRef] = {}


def note_graph_writes(tensors: Iterable[Tensor]) -> None:
    """Note the memory that a recorded graph writes: its values are data from now on."""
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
    """True if a recorded graph writes to a tensor's memory."""
    storage = _WRITTEN_BY_GRAPHS.get(storage_key(tensor))
    return storage is not None and not storage.expired()  # type: ignore[no-untyped-call]


class Answer(NamedTuple):
    """A value that a warmup read back, and the tensors that it was computed from."""

    value: Any
    roots: tuple[WatchedVersion, ...]
