"""A recorded segment and its replay."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from simplegraph.base.errors import EmulatorError, ReplayError
from simplegraph.device.emulator.memory import Arena, Memory, MemoryView, OutsideMemory, RecordedCall, poison
from simplegraph.device.emulator.rules import map_tree, tensors


class EmulatorSegment:
    """A graph's worth of recorded operators.

    Args:
        arena: the pool it was captured into.
        calls: the operators, in order, on views of the memory that they use.
        created: memory that they allocated.
        constants: memory of Python numbers; a replay may write to it, and begins with their values.
        outside: memory that must be alive for a replay.
        reused: memory of earlier segments of the Program that was free when its capture began.
    """

    def __init__(
        self,
        arena: Arena,
        calls: Sequence[RecordedCall],
        created: Iterable[Memory],
        constants: Iterable[Memory],
        outside: Sequence[OutsideMemory],
        reused: Sequence[Memory],
    ) -> None:
        self._arena = arena
        self._calls: Sequence[RecordedCall] | None = _bind_tensors(calls)
        self._created = list(created)
        self._constants = [(memory, memory.bytes.clone()) for memory in constants]
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
        self._arena.permit_replay()
        owned = [memory.lock() for memory in self._outside]
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
                    results = tensors(result)
                    for place, target in outputs:
                        target.copy_(results[place])
        poison(self._undefined_after)
        del owned

    def wait(self) -> None:
        """Return at once: nothing is left to do after a capture."""

    def reset(self) -> None:
        """Drop the graph; harmless the second time."""
        if self._calls is None:
            return
        self._calls = None
        self._arena.segments -= 1
        self._arena.retired.extend(self._created)
        self._created, self._outside, self._constants = [], [], []
        self._undefined_before = self._undefined_after = []

    def __del__(self) -> None:
        if hasattr(self, "_place"):  # else it never came to life
            self.reset()


def _bind_tensors(calls: Sequence[RecordedCall]) -> list[RecordedCall]:
    """Put tensors in place of the views, which are final once the capture has ended."""
    tensor_of = functools.cache(MemoryView.tensor)
    with torch.inference_mode():
        return [
            RecordedCall(
                call.func,
                map_tree(MemoryView, tensor_of, call.args),
                map_tree(MemoryView, tensor_of, call.kwargs),
                tuple((place, tensor_of(target)) for place, target in call.outputs),
            )
            for call in calls
        ]
