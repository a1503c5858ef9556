"""Memory that a capture touches, as a replay finds it again, the pool that it lives in, and the replay."""

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
        seen_as: the first operator that used it, and the tensor it saw.
        pool: what the emulator knows of the pool it was captured into; None for memory from outside.
        poison: the byte that means undefined. NaN for floating point, a wild value for an integer.
        saved: its bytes before the first captured write, while they must be put back.
        value: for a number made of Python data in the capture, its bytes then; a graph holds its value.
    """

    storage: torch.UntypedStorage
    seen_as: str
    pool: Arena | None = None
    poison: int = 0
    saved: torch.UntypedStorage | None = None
    value: torch.UntypedStorage | None = None

    @functools.cached_property
    def address(self) -> int:
        """Its address. Final: read it only when the capture has ended."""
        return self.storage.data_ptr()

    @functools.cached_property
    def alias(self) -> Any:
        """The same address without a share in its ownership: what a CUDA graph has of its memory."""
        return torch._C._construct_storage_from_data_pointer(self.address, _CPU, self.storage.nbytes())

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.sizes.pop(vars(self).get("address", 0), None)
        # Not by an operator, which a capture under way would record; and the address of another device is none here.
        if self.pool is not None and self.storage.device == _CPU and self.reusable():
            ctypes.memset(self.storage.data_ptr(), self.poison, self.storage.nbytes())

    @functools.cached_property
    def bytes(self) -> Tensor:
        """All of it, as a (nbytes,) uint8 tensor."""
        with torch.inference_mode():
            return torch.empty(0, dtype=torch.uint8).set_(self.alias, 0, (self.storage.nbytes(),), (1,))

    def reusable(self) -> bool:
        """True if no tensor has this memory any more, so that what is captured next may get it."""
        return _use_count(self.storage._cdata) == 1

    def save(self) -> None:
        """Remember what it holds before a captured write."""
        if self.saved is None:
            self.saved = self.storage.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Put back what `save` remembered."""
        if self.saved is not None:
            if self.storage.nbytes() != self.saved.nbytes():
                self.storage.resize_(self.saved.nbytes())
            self.storage.copy_(self.saved)
            self.saved = None

    def freeze(self) -> None:
        """Remember the value of a number, before anything writes to it."""
        if self.value is None:
            self.value = self.storage.clone()  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class MemoryView:
    """A tensor as a graph sees it: memory and geometry, whatever becomes of the Python object."""

    memory: Memory
    dtype: torch.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool

    @classmethod
    def of(cls, tensor: Tensor, memory: Memory) -> MemoryView:
        """Describe how `tensor` lies in `memory`."""
        size, stride, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(memory, tensor.dtype, offset, size, stride, tensor.is_conj(), tensor.is_neg())

    def tensor(self, storage: Any = None) -> Tensor:
        """The tensor again, in `storage`, or owning nothing."""
        storage = self.memory.alias if storage is None else storage
        tensor = torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)
        tensor = torch.conj(tensor) if self.conj else tensor
        return torch._neg_view(tensor) if self.neg else tensor


def poison(memories: Iterable[Memory]) -> None:
    """Make memory undefined."""
    with torch.inference_mode():
        for memory in memories:
            memory.bytes.fill_(memory.poison)


def living(memories: weakref.WeakValueDictionary[int, Memory]) -> list[Memory]:
    """Copy the values; iterating over ``values()`` fails if other threads add and drop some meanwhile."""
    return [memory for reference in memories.valuerefs() if (memory := reference()) is not None]


@dataclasses.dataclass(eq=False)
class Streams:
    """Tracks which work on which stream comes before which.

    Attributes:
        ticks: how much work each stream got; seen: of each stream, how much of the others' comes before its next.
        done: how much was over when the device was synchronized.
        waits: the last (stream, stream waited for) pairs, for tests.
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
        """Order the next work on a stream after the work that another stream has."""
        self.waits.append((stream, other))
        self.seen[stream] |= self.seen[other]


class EmulatedThread(threading.local):
    """The emulator's state in each thread.

    Attributes:
        stream: the current one.
        recording: the capture under way; replaced: what it replaced of torch's, as owner and name.
    """

    stream = DEFAULT_STREAM
    recording: Any = None
    replaced: Sequence[tuple[Any, str]] = ()

    def refuse_in_capture(self, broken_rule: str) -> None:
        """Break the capture under way, if there is one."""
        if self.recording is not None:
            self.recording.fail(broken_rule)


class Arena:
    """Keeps what the emulator knows of a pool.

    Attributes:
        memories, sizes: what segments of all pools created, and how many bytes each has, by address.
        group: the run of segments under capture: those of one Program, which replay in order.
        index: how many segments the group has.
        segments: how many segments are live.
        capturing: whether a capture into it is under way, in whichever thread.
        released: whether its memory was given back.
        retired: memory of dropped segments, which stays the pool's until nothing uses the pool.
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
        self._dirty: list[Memory] = []  # written by replays since it was last poisoned
        self._used = self._last = (0, 0)  # (stream, tick), and the place, of the last replay

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
        """Give the memory of dropped segments back."""
        self.retired.clear()
        self._dirty.clear()

    def add(self, created: Iterable[Memory]) -> tuple[int, int]:
        """Take in a new segment and the memory it created; its place is (group, index)."""
        self.index += 1
        self.segments += 1
        by_address = {memory.address: memory for memory in created if memory.address}
        self.memories.update(by_address)
        self.sizes.update({address: memory.storage.nbytes() for address, memory in by_address.items()})
        self._group += map(weakref.ref, by_address.values())
        return self.group, self.index

    def of_group(self, *, reusable: bool) -> list[Memory]:
        """List memory of the group's segments that the next one may be given, or that something still owns."""
        return [memory for place in self._group if (memory := place()) is not None and memory.reusable() is reusable]

    def enter(self, place: tuple[int, int], created: Iterable[Memory]) -> None:
        """Begin a replay, if the current stream may. Poison what it finds undefined: all, unless its Program goes on.

        The first segment of a Program begins anew; a backward may be replayed twice after its forward.

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
    """A recorded operator. Its tensors are views of memory until the capture ends.

    Attributes:
        outputs: of each tensor that it creates, its place among the results, and where every replay puts it.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: Sequence[tuple[int, Any]]


def as_recorded(func: Any, facts: OperatorFacts) -> Callable[..., Any]:
    """Return an operator as a replay calls it: in the autocast and grad mode in force now, and over when it returns.

    It has the modes for what it calls in turn; and an LSTM keeps more for its backward under grad mode.
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
    """A graph's worth of recorded operators.

    Args:
        arena: the pool it was captured into.
        calls: the operators, in order.
        created: memory that they allocated.
        constants: memory of Python numbers; a replay may write to it, and begins with their values.
        outside: memory that must be alive for a replay.
        reused: memory of earlier segments of the Program that was free when its capture began.

    Attributes:
        num_nodes: operators recorded, views left out; None after `reset`.
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
        """Return at once: nothing is left to do after a capture."""

    def reset(self) -> None:
        """Drop the graph; harmless the second time."""
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
