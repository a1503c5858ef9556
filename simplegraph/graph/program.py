"""A captured run: graph segments and eager breaks, in the order the forward ran them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from simplegraph.errors import BreakError, ReplayError
from simplegraph.graph.breaks.results import Accept, Cell
from simplegraph.graph.device import GraphDevice, Mark, Segment
from simplegraph.nested import TreeSpec, flatten


class Modes(NamedTuple):
    """What a forward switches on around an operation, and a replay must switch on again."""

    grad: bool
    inference: bool
    autocast: torch.dtype | None

    @classmethod
    def now(cls, device_type: str) -> Modes:
        """Those in force in this thread."""
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)

    def changed_from(self, ambient: Modes) -> frozenset[str]:
        """What the forward itself changed; for the others the modes around a replay are right."""
        changed = {name for name in ("inference", "autocast") if getattr(self, name) != getattr(ambient, name)}
        return frozenset(changed | ({"grad"} if self.grad and not ambient.grad else set()))


class Inside(NamedTuple):
    """The modes around a break, of which the forward itself set some."""

    modes: Modes
    changed: frozenset[str]
    device_type: str

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Those again, inside whatever is around the replay."""
        modes, changed = self.modes, self.changed
        with contextlib.ExitStack() as stack:
            if "inference" in changed:
                stack.enter_context(torch.inference_mode(modes.inference))
            if "grad" in changed or "inference" in changed:  # leaving inference mode switches grad mode on
                stack.enter_context(torch.set_grad_enabled(modes.grad))
            if "autocast" in changed:
                enabled = modes.autocast is not None
                stack.enter_context(torch.autocast(self.device_type, dtype=modes.autocast, enabled=enabled))
            yield


class Argument(NamedTuple):
    """An argument that is put together anew for every replay: a container of graph memory, or of cells."""

    place: int | str
    spec: TreeSpec
    leaves: Sequence[Any]

    def value(self) -> Any:
        """What this replay passes."""
        return self.spec.unflatten([leaf.value if isinstance(leaf, Cell) else leaf for leaf in self.leaves])


class Break:
    """A call that runs eagerly at every replay.

    Args:
        name: what reports call it.
        function: what is called.
        args, kwargs: what with; graph memory among them is borrowed.
        rebuilt: arguments that replace those of `args` and `kwargs` in their place, made anew each time.
        inside: grad mode, inference mode and autocast around the call, where the forward sets any.

    Attributes:
        spec, accepts: how the result nests, and what takes each of its leaves; set when the capture knows.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rebuilt: Sequence[Argument],
        inside: Inside | None,
    ) -> None:
        self.name = name
        self.spec: TreeSpec | None = None
        self.accepts: list[Accept] = []
        self._function = function
        self._args = args
        self._kwargs = kwargs
        self._rebuilt = rebuilt
        self._inside = inside

    def replay(self) -> None:
        """Call the function, and put what it returns where the next segment reads it.

        Raises:
            BreakError: the result is not what the next segment was captured with.
        """
        args, kwargs = self._arguments() if self._rebuilt else (self._args, self._kwargs)
        if self._inside is None:
            self._take(self._function(*args, **kwargs))
        else:
            with self._inside.restored():
                self._take(self._function(*args, **kwargs))

    def _arguments(self) -> tuple[list[Any], dict[str, Any]]:
        args, kwargs = list(self._args), dict(self._kwargs)
        for argument in self._rebuilt:
            if isinstance(argument.place, int):
                args[argument.place] = argument.value()
            else:
                kwargs[argument.place] = argument.value()
        return args, kwargs

    def _take(self, result: Any) -> None:
        leaves, spec = flatten(result)
        if spec != self.spec:
            raise self._refused(f"{_nesting(spec)} where it returned {_nesting(self.spec)} before")
        for accept, leaf in zip(self.accepts, leaves, strict=True):
            problem = accept(leaf)
            if problem is not None:
                raise self._refused(problem)

    def _refused(self, problem: str) -> BreakError:
        return BreakError(
            f"eager break {self.name} returned {problem}.\n"
            "  The segments after it were captured for results of one structure, shape and dtype, and did not run. "
            "Return the same each time, or capture anew with reset_graphs()."
        )


def _nesting(spec: TreeSpec | None) -> str:
    if spec is None or spec.type is None:
        return "one value"
    return f"a {spec.type.__name__} of {len(spec.children)}"


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
    """What one forward became. FULL is a Program of a single segment.

    Attributes:
        device: where it was captured.
        steps: in the order of the forward; replaying them in order runs it again.
        outputs: the leaves of what the forward returned, tensors at the addresses a replay writes.
        spec: how the leaves are nested.
        seconds: wall time of the capture.
        bytes: device memory the capture took, as the device's free memory saw it.
        live: whether it can still be replayed.
        breaks: the steps that run eagerly.
        replay: runs the steps on the current stream; what it returns is in `outputs`.
    """

    device: GraphDevice
    steps: tuple[Segment | Break, ...]
    outputs: list[Any]
    spec: TreeSpec
    seconds: float = 0.0
    bytes: int = 0
    live: bool = True
    breaks: tuple[Break, ...] = dataclasses.field(init=False)
    replay: Callable[[], None] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.breaks = tuple(step for step in self.steps if isinstance(step, Break))
        # One step is the common case: calling it directly saves a Python frame on every replay.
        self.replay = self.steps[0].replay if len(self.steps) == 1 else self._replay_steps
        self._replays = [step.replay for step in self.steps]
        self._untimed = 2  # the first replay pays for loading; the second is timed
        self._marks: list[Mark] = []

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

    def costs(self) -> list[StepCost]:
        """Its steps, timed once if it was replayed twice; waits for that replay to be over."""
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
        """What the forward returned, nested as it was; tensors live until the pool's next replay."""
        return self.spec.unflatten(self.outputs)

    def drop(self) -> None:
        """Free the graphs. The program cannot be replayed afterwards."""
        self.live = False
        for segment in self.segments:
            segment.reset()
        self.steps, self.breaks, self._replays, self.outputs = (), (), [], []
        self.replay = self._refuse

    def _refuse(self) -> None:
        raise ReplayError("this graph was dropped; capture it again.")
