"""What was recorded, and the pool it lives in."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.errors import EmulatorError, ReplayError
from simplegraph.graph.emulator.memory import Memory, MemoryView, OutsideMemory, poison
from simplegraph.graph.emulator.operators import map_tree, tensors


class Output(NamedTuple):
    """A tensor that an operator creates.

    Attributes:
        place: which of the operator's results it is.
        target: where the capture put it, and every replay puts it.
    """

    place: int
    target: Any


class RecordedCall(NamedTuple):
    """A recorded operator. Its tensors are views until the capture ends, then tensors."""

    func: Callable[..., Any]
    args: Any
    kwargs: Any
    outputs: tuple[Output, ...]

    def bound(self, tensor_of: Callable[[MemoryView], Tensor]) -> RecordedCall:
        """With tensors in place of the views of them."""
        args, kwargs = map_tree(MemoryView, tensor_of, self.args), map_tree(MemoryView, tensor_of, self.kwargs)
        outputs = tuple(Output(place, tensor_of(target)) for place, target in self.outputs)
        return RecordedCall(self.func, args, kwargs, outputs)


def living(memories: weakref.WeakValueDictionary[int, Memory]) -> list[Memory]:
    """The values, whatever other threads add and drop meanwhile, which ``values()`` does not bear."""
    return [memory for reference in memories.valuerefs() if (memory := reference()) is not None]


class Arena:
    """What the emulator knows of a pool.

    Attributes:
        group: the run of segments under capture: those of one Program, which replay in order.
        index: how many segments the group has.
        segments: how many segments are live.
        capturing: whether a capture into it is under way, in whichever thread.
        released: whether its memory was given back.
        retired: memory of dropped segments, which stays the pool's until nothing uses the pool.
        used: (stream, tick) of the last replay.
    """

    def __init__(self, memories: weakref.WeakValueDictionary[int, Memory]) -> None:
        self.group = self.index = self.segments = 0
        self.capturing = self.released = False
        self.retired: list[Memory] = []
        self.used = (0, 0)
        self._memories = memories
        self._dirty: list[Memory] = []  # written by replays since it was last poisoned
        self._last = (0, 0)

    def open(self, *, continues: bool) -> None:
        """Start a capture.

        Raises:
            EmulatorError: the pool was released, or is recording already.
        """
        if self.released or self.capturing:
            state = "was released" if self.released else "is recording another capture already"
            raise EmulatorError(f"the pool {state}; take another one from new_pool().")
        if not continues:
            self.group, self.index = self.group + 1, 0
        if not self.segments:
            self.free()
        self.capturing = True

    def free(self) -> None:
        """Give the memory of dropped segments back."""
        self.retired.clear()
        self._dirty.clear()

    def add(self, created: Sequence[Memory]) -> tuple[int, int]:
        """Take in a new segment and the memory it created; its place is (group, index)."""
        self.index += 1
        self.segments += 1
        self._memories.update({memory.address: memory for memory in created if memory.address})
        return self.group, self.index

    def reusable(self) -> list[Memory]:
        """Memory of the group's earlier segments that the next one may be given."""
        memories = [memory for memory in living(self._memories) if memory.pool is self]
        return [memory for memory in memories if memory.group == self.group and memory.reusable()]

    def enter(self, place: tuple[int, int], created: Iterable[Memory]) -> None:
        """Poison what a replay finds undefined: everything, unless it goes on with its Program."""
        goes_on = self._last[0] == place[0] and self._last[1] < place[1]
        if not goes_on:
            poison(self._dirty)
            self._dirty.clear()
        self._dirty.extend(created)
        self._last = place


class EmulatorSegment:
    """A graph's worth of recorded operators.

    Args:
        arena: the pool it was captured into.
        permit: called before every replay; raises where a replay is not permitted.
        calls: the operators, in order.
        created: memory that they allocated.
        constants: memory of Python numbers; a replay may write to it, and begins with their values.
        outside: memory that must be alive for a replay.
        reused: memory of earlier segments of the Program that was free when this capture began.
    """

    def __init__(
        self,
        arena: Arena,
        permit: Callable[[Arena], None],
        calls: Sequence[RecordedCall],
        *,
        created: Iterable[Memory],
        constants: Iterable[Memory],
        outside: Sequence[OutsideMemory],
        reused: Sequence[Memory],
    ) -> None:
        self._arena = arena
        self._permit = permit
        self._calls: Sequence[RecordedCall] | None = calls
        self._created = list(created)
        self._constants = list(constants)
        self._values = [memory.bytes.clone() for memory in self._constants]
        self._outside = outside
        # From here on in the Program this segment may have written to it.
        self._undefined_before = reused
        self._undefined_after = [memory for memory in arena.reusable() if memory not in reused]
        self._place = arena.add(self._created)
        poison(self._created)

    @property
    def num_nodes(self) -> int | None:
        """Operators recorded, views left out; None after `reset`."""
        return None if self._calls is None else len(self._calls)

    def replay(self) -> None:
        """Run the recorded operators again.

        Raises:
            ReplayError: the segment was reset.
            EmulatorError: memory it reads was freed or moved, a capture is under way, or the pool was
                used on another stream that the current one does not wait for.
        """
        if self._calls is None:
            raise ReplayError("this graph was dropped; capture it again.")
        self._permit(self._arena)
        owned = [memory.lock() for memory in self._outside]
        self._check_moved()
        self._arena.enter(self._place, self._created)
        poison(self._undefined_before)
        with torch._C._DisableAutocast(), torch.inference_mode():
            self._set_constants()
            for func, args, kwargs, outputs in self._calls:
                result = func(*args, **kwargs)
                if outputs:
                    results = tensors(result)
                    for place, target in outputs:
                        target.copy_(results[place])
        poison(self._undefined_after)
        del owned

    def reset(self) -> None:
        """Drop the graph; harmless the second time."""
        if self._calls is None:
            return
        self._calls = None
        self._arena.segments -= 1
        self._arena.retired.extend(self._created)
        self._created, self._outside, self._constants, self._values = [], [], [], []
        self._undefined_before = self._undefined_after = []

    def __del__(self) -> None:
        if hasattr(self, "_place"):  # else it never came to life
            self.reset()

    def _check_moved(self) -> None:
        for memory in self._created:
            if memory.storage.data_ptr() != memory.address:
                raise EmulatorError(f"replay writes memory that was moved: a result of {memory.seen_as} was resized.")

    def _set_constants(self) -> None:
        for memory, value in zip(self._constants, self._values, strict=True):
            memory.bytes.copy_(value)
