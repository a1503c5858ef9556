"""A captured run: graph segments and eager breaks, in the order the forward ran them."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.errors import ReplayError
from simplegraph.base.nested import TreeSpec
from simplegraph.device.generators import drew, random_states
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice, Mark, Segment, order_draws
from simplegraph.program.breaks.step import Break


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One step of a Program, and what it cost.

    Attributes:
        kind: "segment" or "break".
        name: of a break, the function's.
        nodes: operations in a segment, where the device can say.
        ms: milliseconds in one replay, launches and waiting included; None until one was timed.
    """

    kind: str
    name: str
    nodes: int | None
    ms: float | None


@dataclasses.dataclass(eq=False)
class Program:
    """A captured forward. FULL is a Program of a single segment.

    Attributes:
        device: where it was captured.
        steps: in the order of the forward; replaying them in order runs it again.
        outputs: the leaves of what the forward returned, tensors at the addresses a replay writes.
        spec: how the leaves are nested.
        seconds: wall time of the capture.
        bytes: device memory the capture took, as the device's free memory saw it.
        generators: random generators that it may draw from.
        live: True while it can be replayed.
        constants: device copies of what the forward made from Python data, which the graph reads.
        breaks: the steps that run eagerly.
        replay: runs the steps on the current stream; what it returns is in `outputs`.
        check_first: called before the first replay, which it refuses by raising; None once it has returned.
    """

    device: GraphDevice
    steps: tuple[Segment | Break, ...]
    outputs: list[Any]
    spec: TreeSpec
    seconds: float = 0.0
    bytes: int = 0
    generators: Sequence[torch.Generator] = ()
    live: bool = True
    constants: list[Tensor] = dataclasses.field(default_factory=list)
    breaks: tuple[Break, ...] = dataclasses.field(init=False)
    replay: Callable[[], None] = dataclasses.field(init=False)
    check_first: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        self.breaks = tuple(step for step in self.steps if isinstance(step, Break))
        self._replays = [
            step.replay if isinstance(step, Break) else functools.partial(_replay_first, weakref.ref(self), index)
            for index, step in enumerate(self.steps)
        ]
        self._choose_replay()
        self._untimed = 2  # the first replay pays for loading; the second is timed
        self._marks: list[Mark] = []

    def _choose_replay(self) -> None:
        # One step is the common case: calling it directly saves a Python frame on every replay.
        self.replay = self._replays[0] if len(self._replays) == 1 else self._replay_steps

    def _replay_steps(self) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._replay_steps()
        if self._untimed:
            self._untimed -= 1
            if not self._untimed:
                return self._replay_timed()
        for replay in self._replays:
            replay()
        return None

    def _replay_timed(self) -> None:
        marks = [self.device.mark()]
        for replay in self._replays:
            replay()
            marks.append(self.device.mark())
        self._marks = marks

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The steps that are graphs."""
        return tuple(step for step in self.steps if not isinstance(step, Break))

    @property
    def held(self) -> list[Any]:
        """List everything kept for replays: outputs, and what breaks are passed and return."""
        return [self.outputs, *[(step.args, step.kwargs, step.rebuilt, step.accepts) for step in self.breaks]]

    def costs(self) -> list[StepCost]:
        """List its steps, timed once if it was replayed twice; waits for that replay to be over."""
        times: Sequence[float | None] = [None] * len(self.steps)
        if self._marks:
            times = [after.ms_since(before) for before, after in zip(self._marks, self._marks[1:], strict=False)]
        return [
            StepCost("break", step.name, None, ms)
            if isinstance(step, Break)
            else StepCost("segment", "", step.num_nodes, ms)
            for step, ms in zip(self.steps, times, strict=True)
        ]

    def result(self) -> Any:
        """Return what the forward returned, nested as it was; tensors live until the pool's next replay."""
        return self.spec.unflatten(self.outputs)

    def wait(self) -> None:
        """Wait until it can be replayed; raise what the driver says if it cannot."""
        for segment in self.segments:
            segment.wait()

    def drop(self) -> None:
        """Free the graphs. The program cannot be replayed afterwards."""
        self.live = False
        for segment in self.segments:
            segment.reset()
        self.steps, self.breaks, self._replays, self.outputs, self.constants = (), (), [], [], []
        self.replay = self._refuse

    def _refuse(self) -> None:
        raise ReplayError("this graph was dropped; capture it again.")


def _replay_first(program: weakref.ref[Any], index: int) -> None:
    """Replay a segment for the first time, and learn if it draws: kernels may that no operator tells of."""
    owner: Any = program()  # weakly, so that a program is gone with its last reference
    segment = owner.steps[index]
    with CAPTURE_LOCK:
        if owner.check_first is not None:
            owner.check_first()
            owner.check_first = None
        before = random_states(owner.generators)
        _replay_drawing(owner.device, segment)
        draws = drew(owner.generators, before)
    owner._replays[index] = functools.partial(_replay_drawing, owner.device, segment) if draws else segment.replay
    owner._choose_replay()


def _replay_drawing(device: GraphDevice, segment: Segment) -> None:
    """Replay a segment that draws random numbers, beside no other one and no capture: they share generators."""
    with CAPTURE_LOCK:
        if device.current_stream() != device.drawing_stream:
            order_draws(device)
        segment.replay()
