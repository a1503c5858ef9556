"""The memory that a capture touches, its pool, and segments, which replay."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from simplegraph.base.errors import EmulatorError, ReplayError
from simplegraph.base.modes import autocast_dtype
from simplegraph.base.operators import OperatorFacts
from simplegraph.device.emulator import rules

_CPU = torch.device("cpu")
DEFAULT_STREAM = 0
_weak_reference: Callable[[torch.UntypedStorage], Any] = reductions.StorageWeakRef
_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: -1)  # -1: unknown


@dataclasses.dataclass(eq=False)
class Memory:
    """A storage that a capture touches.

    Attributes:
        storage: the memory itself.
        seen_as: the first operator that used it, with its tensor, for messages.
        pool: the pool that it was captured into; None for memory from before the capture.
        poison: the byte of undefined values: NaN for floating-point numbers, an unlikely value for integers.
        saved: its bytes before the first captured write, until they are restored.
        value: for a number that the capture made from Python data, its bytes, which are a constant of the graph.
    """

    storage: torch.UntypedStorage
    seen_as: str
    pool: Arena | None = None
    poison: int = 0
    saved: torch.UntypedStorage | None = None
    value: torch.UntypedStorage | None = None

    @functools.cached_property
    def address(self) -> int:
        """Its address. Cached: read it only after the end of the capture."""
        return self.storage.data_ptr()

    @functools.cached_property
    def alias(self) -> Any:
        """The same memory without ownership, like the memory of a CUDA graph."""
        return torch._C._construct_storage_from_data_pointer(self.address, _CPU, self.storage.nbytes())

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.sizes.pop(vars(self).get("address", 0), None)
        # Not by an operator, which a current capture would record. Only on the CPU: other addresses are invalid here.
        if self.pool is not None and self.storage.device == _CPU and self.reusable():
            ctypes.memset(self.storage.data_ptr(), self.poison, self.storage.nbytes())

    @functools.cached_property
    def bytes(self) -> Tensor:
        """The whole memory, as a (nbytes,) uint8 tensor."""
        with torch.inference_mode():
            return torch.empty(0, dtype=torch.uint8).set_(self.alias, 0, (self.storage.nbytes(),), (1,))

    def reusable(self) -> bool:
        """True if no tensor uses this memory any more, so that later captures may reuse it."""
        return _use_count(self.storage._cdata) == 1

    def save(self) -> None:
        """Save the bytes before a captured write."""
        if self.saved is None:
            self.saved = self.storage.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Restore the bytes that `save` saved."""
        if self.saved is not None:
            if self.storage.nbytes() != self.saved.nbytes():
                self.storage.resize_(self.saved.nbytes())
            self.storage.copy_(self.saved)
            self.saved = None

    def freeze(self) -> None:
        """Save the value of a number, before an operator writes to it."""
        if self.value is None:
            self.value = self.storage.clone()  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class MemoryView:
    """A tensor as a graph sees it: memory and geometry, without the Python object."""

    memory: Memory
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, memory: Memory) -> MemoryView:
        """Describe the geometry of `tensor` in `memory`."""
        size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(memory, tensor.dtype, offset, size, stride, tensor.is_conj(), tensor.is_neg())

    def tensor(self, storage: Any = None) -> Tensor:
        """Make the tensor again, in `storage`, or without owning its memory."""
        storage = self.memory.alias if storage is None else storage
        tensor = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)
        tensor = torch.conj(tensor) if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor


def poison(memories: Iterable[Memory]) -> None:
    """Fill memory with undefined values."""
    with torch.inference_mode():
        for memory in memories:
            memory.bytes.fill_(memory.poison)


def living(memories: weakref.WeakValueDictionary[int, Memory]) -> list[Memory]:
    """List the values; iterating over ``values()`` fails if other threads change the dict meanwhile."""
    return [memory for reference in memories.valuerefs() if (memory := reference()) is not None]


@dataclasses.dataclass(eq=False)
class Streams:
    """Tracks the order of work on streams.

    Attributes:
        ticks: the amount of work of each stream; seen: stream -> other stream -> the amount of the other stream's work
            that comes before the stream's next work.
        done: the amount of work of each stream at the last synchronization of the device.
        waits: the last (stream, awaited stream) pairs, for tests.
    """

    ticks: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    seen: dict[int, collections.Counter[int]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(collections.Counter)
    )
    done: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    waits: collections.deque[tuple[int, int]] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=1000)
    )

    def wait(self, stream: int, other: int) -> None:
        """Order the next work on a stream after the present work of another stream."""
        self.waits.append((stream, other))
        self.seen[stream] |= self.seen[other]


class EmulatedThread(threading.local):
    """The emulator's state in each thread.

    Attributes:
        stream: the current stream.
        recording: the current capture; is_recording: True during one.
        replaced: the attributes of torch that the capture replaced, as (owner, name).
    """

    stream = DEFAULT_STREAM
    recording: Any = None
    is_recording = False
    replaced: Sequence[tuple[Any, str]] = ()

    def refuse_in_capture(self, broken_rule: str) -> None:
        """Break the current capture, if there is one."""
        if self.recording is not None:
            self.recording.fail(broken_rule)


class Arena:
    """The emulator's state of a pool.

    Attributes:
        memories, sizes: by address, the memory that segments of all pools created, and its size in bytes.
        group: the number of the current group: the segments of one Program, which replay in order.
        index: the number of segments in the group.
        segments: the number of live segments.
        capturing: True while any thread captures into the pool.
        released: True once its memory was released.
        retired: memory of dropped segments, which stays in the pool until no segment is left.
    """

    def __init__(
        self,
        memories: weakref.WeakValueDictionary[int, Memory],
        sizes: dict[int, int],
        streams: Streams,
        thread: EmulatedThread,
    ) -> None:
        self.group = self.index = self.segments = 0
        self.capturing = self.released = False
        self.retired: list[Memory] = []
        self.memories, self.sizes, self._streams, self._thread = memories, sizes, streams, thread
        self._group: list[weakref.ref[Memory]] = []
        self._dirty: list[Memory] = []  # memory that replays wrote since it was last poisoned
        self._used = self._last = (0, 0)  # of the last replay: (stream, tick), and (group, index)

    def open(self, *, continues: bool) -> None:
        """Start a capture.

        Raises:
            EmulatorError: the pool was released, or is recording already.
        """
        if self.released or self.capturing:
            state = "was released" if self.released else "is recording another capture already"
            raise EmulatorError(f"the pool {state}; take another one from new_pool().")
        if not continues:
            self.group, self.index, self._group = self.group + 1, 0, []
        if not self.segments:
            self.free()
        self.capturing = True

    def free(self) -> None:
        """Release the memory of dropped segments."""
        self.retired.clear()
        self._dirty.clear()

    def add(self, created: Iterable[Memory]) -> tuple[int, int]:
        """Add a new segment and the memory that it created; return its place, (group, index)."""
        self.index += 1
        self.segments += 1
        by_address = {memory.address: memory for memory in created if memory.address}
        self.memories.update(by_address)
        self.sizes.update({address: memory.storage.nbytes() for address, memory in by_address.items()})
        self._group += map(weakref.ref, by_address.values())
        return self.group, self.index

    def of_group(self, *, reusable: bool) -> list[Memory]:
        """List the memory of the group's segments that the next segment may reuse, or that is still owned."""
        return [memory for place in self._group if (memory := place()) is not None and memory.reusable() is reusable]

    def enter(self, place: tuple[int, int], created: Iterable[Memory]) -> None:
        """Begin a replay, and poison undefined memory: that of all earlier replays, unless the Program goes on.

        The first segment of a Program starts the Program. A backward may be replayed twice after its forward.

        Raises:
            EmulatorError: the stream does not wait for the pool's last replay, or a capture is under way.
        """
        if self._thread.recording is not None:
            self._thread.recording.fail("a graph was replayed in a capture, which is not permitted")
        streams, stream, (other, tick) = self._streams, self._thread.stream, self._used
        if max(streams.seen[stream][other], streams.done[other]) < tick:
            raise EmulatorError(
                f"stream {stream} replays into a pool that stream {other} may still be using; "
                "call wait_for(pool.stream) before."
            )
        streams.ticks[stream] += 1
        self._used = stream, streams.ticks[stream]
        streams.seen[stream][stream] = streams.ticks[stream]
        if self._last[0] != place[0] or place[1] == 1:
            poison(self._dirty)
            self._dirty.clear()
        self._dirty.extend(created)
        self._last = place


class RecordedCall(NamedTuple):
    """A recorded operator. Its tensors are `MemoryView` objects until the capture ends.

    Attributes:
        outputs: for each tensor that it creates, its index among the results, and the memory for the replays' values.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: Sequence[tuple[int, Any]]


def as_recorded(func: Any, facts: OperatorFacts) -> Callable[..., Any]:
    """Return an operator as a replay calls it: in the present autocast and grad mode, without pending work at its end.

    The modes matter for operators that it calls; and under grad mode an LSTM keeps more for its backward.
    """
    grad, dtype, waits = torch.is_grad_enabled(), autocast_dtype("cpu"), facts.is_collective
    if not (grad or dtype or waits):
        return func  # type: ignore[no-any-return]

    def call(*args: Any, **kwargs: Any) -> Any:
        autocast = torch.autocast("cpu", dtype, enabled=dtype is not None, cache_enabled=False)
        with torch.set_grad_enabled(grad), autocast:
            result = func(*args, **kwargs)
        for leaf in rules.leaves(result) if waits else ():
            if isinstance(leaf, Tensor):
                torch.ops._c10d_functional.wait_tensor(leaf)
            elif hasattr(leaf, "wait"):
                leaf.wait()
        return result

    return functools.update_wrapper(call, func, (), ())


class EmulatorSegment:
    """The recorded operators of one graph.

    Args:
        arena: the pool of the capture.
        calls: the operators, in order.
        created: memory that they allocated.
        constants: memory of Python numbers; each replay starts with their values, and may write to it.
        outside: memory that must be alive for a replay.
        reused: memory of earlier segments of the Program that was free when the capture began.

    Attributes:
        num_nodes: the number of recorded operators, without views; None after `reset`.
    """

    def __init__(
        self,
        arena: Arena,
        calls: list[RecordedCall],
        created: Iterable[Memory],
        constants: Iterable[Memory],
        outside: Iterable[Memory],
        reused: Sequence[Memory],
    ) -> None:
        self._arena = arena
        self._calls: list[RecordedCall] | None = calls
        self.num_nodes: int | None = len(calls)
        self._created = list(created)
        self._constants = [(memory, memory.bytes.clone()) for memory in constants]
        # What no pool owns is kept, lest other tensors get the address of freed ones; it counts as freed all the same.
        self._outside = [
            (_weak_reference(it.storage), it if it.pool is None else None, it.address, it.seen_as)
            for it in outside
            if it.address
        ]
        # From here on in the Program this segment may have written to it.
        self._undefined_before = reused
        self._undefined_after = [memory for memory in arena.of_group(reusable=True) if memory not in reused]
        self._place = arena.add(self._created)
        poison(self._created)

    def replay(self) -> None:
        """Run the recorded operators again.

        Raises:
            ReplayError: the segment was reset.
            EmulatorError: memory it reads was freed or moved, a capture is under way, or the pool was
                used on another stream that the current one does not wait for.
        """
        if self._calls is None:
            raise ReplayError("this graph was dropped; capture it again.")
        owned = []  # until the end of the replay
        for weak, kept, address, seen_as in self._outside:
            freed = kept is not None and kept.reusable()
            storage = None if freed else torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            if storage is None or storage.data_ptr() != address:
                raise EmulatorError(
                    f"replay reads memory that was freed: {seen_as}. "
                    "A graph keeps nothing alive; whoever captured it must own what it reads."
                )
            owned.append(storage)
        for memory in self._created:
            if memory.storage.data_ptr() != memory.address:
                raise EmulatorError(f"replay writes memory that was moved: a result of {memory.seen_as} was resized.")
        self._arena.enter(self._place, self._created)
        poison(self._undefined_before)
        with torch._C._DisableAutocast(), torch.inference_mode():
            for memory, value in self._constants:
                memory.bytes.copy_(value)
            for func, args, kwargs, outputs in self._calls:
                result = func(*args, **kwargs)
                if outputs:
                    results = [result] if isinstance(result, Tensor) else rules.leaves(result)
                    for place, target in outputs:
                        target.copy_(results[place])
        poison(self._undefined_after)

    def wait(self) -> None:
        """Do nothing: a capture leaves no pending work."""

    def reset(self) -> None:
        """Drop the graph; does nothing the second time."""
        if self._calls is None:
            return
        self._calls = self.num_nodes = None
        self._arena.segments -= 1
        self._arena.retired.extend(self._created)
        self._created, self._outside, self._constants = [], [], []
        self._undefined_before = self._undefined_after = []

    def __del__(self) -> None:
        if hasattr(self, "_place"):  # else it never came to life
            self.reset()
