"""A captured run: graph segments and eager steps, in the order the forward ran them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from simplegraph.graph.device import Segment
from simplegraph.tree import TreeSpec


class Step(Protocol):
    """Part of a captured run: a graph segment, or a call that runs eagerly between two."""

    def replay(self) -> None: ...


@dataclasses.dataclass(eq=False)
class Program:
    """What one forward became. FULL is a Program of a single segment.

    Attributes:
        steps: in the order of the forward; replaying them in order runs it again.
        outputs: the leaves of what the forward returned, tensors at the addresses a replay writes.
        spec: how the leaves are nested.
        seconds: wall time of the capture.
        bytes: device memory the capture took, as the device's free memory saw it.
        live: whether it can still be replayed.
        replay: runs the steps on the current stream; what it returns is in `outputs`.
    """

    steps: tuple[Step, ...]
    outputs: list[Any]
    spec: TreeSpec
    seconds: float = 0.0
    bytes: int = 0
    live: bool = True
    replay: Callable[[], None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        # One step is the common case: calling it directly saves a Python frame on every replay.
        self.replay = self.steps[0].replay if len(self.steps) == 1 else self._replay_steps

    def _replay_steps(self) -> None:
        for step in self.steps:
            step.replay()

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The steps that are graphs."""
        return tuple(step for step in self.steps if hasattr(step, "num_nodes"))  # type: ignore[misc]

    def result(self) -> Any:
        """What the forward returned, nested as it was; tensors live until the pool's next replay."""
        return self.spec.unflatten(self.outputs)

    def drop(self) -> None:
        """Free the graphs. The program cannot be replayed afterwards."""
        self.live = False
        for segment in self.segments:
            segment.reset()
        self.outputs = []
