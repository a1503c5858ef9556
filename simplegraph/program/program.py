"""A captured run: graph segments and eager breaks, in the order in which the forward ran them; and their recorder."""

from __future__ import annotations

import dataclasses
import functools
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.errors import BreakError, ReplayError
from simplegraph.base.modes import Modes
from simplegraph.base.nested import LEAF, TreeSpec, flatten, opened_once
from simplegraph.base.tensors import wait_collectives
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice, GraphPool, Mark, Segment, order_draws
from simplegraph.device.saved_state import default_generator, drew, random_states
from simplegraph.program.breaks.break_calls import (
    Break,
    BreakArguments,
    BreakCall,
    BreakRows,
    BreakSite,
    BreakTrace,
    Cell,
)
from simplegraph.program.breaks.marks import name_of, recording_breaks
from simplegraph.program.index_ranges import IndexRanges
from simplegraph.program.lent_outputs import LentOutputs

_KEPT_BYTES = 64 << 20  # up to this size, the results of a program's breaks are kept until a replay is over


@dataclasses.dataclass(frozen=True)
class StepCost:
    """One step of a Program, and its cost.

    Attributes:
        kind: "segment" or "break".
        name: the name of a break's function; empty for a segment.
        nodes: operations in a segment; None for a break, or if the device cannot say.
        ms: milliseconds in one replay, launches and waiting included; None until a replay was timed.
    """

    kind: str
    name: str
    nodes: int | None
    ms: float | None


@dataclasses.dataclass(eq=False)
class Program:
    """A captured forward. FULL is a Program of a single segment.

    Attributes:
        device: the device of the capture.
        steps: segments and breaks in the order of the forward; a replay runs them in this order.
        outputs: the leaves of the forward's result; tensors are at the addresses that a replay writes.
        spec: the structure of the result.
        seconds: wall time of the capture.
        bytes: device memory the capture took, as the device's free memory saw it.
        generators: random generators that the forward may draw from.
        live: True while it can be replayed.
        draws: True if a segment draws random numbers, as its first replay showed.
        constants: device copies of tensors that the forward made from Python data; the graph reads them.
        breaks: the steps that run eagerly; segments: the steps that are graphs.
        replay: runs the steps on the current stream; the results are in `outputs`.
        indices: the values that the graphs take as indices; None if the recording was not observed.
        check_first: called before the first replay; refuses the replay by raising. None once it has returned.
    """

    device: GraphDevice
    steps: tuple[Segment | Break, ...]
    outputs: list[Any]
    spec: TreeSpec
    seconds: float = 0.0
    bytes: int = 0
    generators: Sequence[torch.Generator] = ()
    live: bool = True
    draws: bool = False
    constants: list[Tensor] = dataclasses.field(default_factory=list)
    breaks: tuple[Break, ...] = dataclasses.field(init=False)
    segments: tuple[Segment, ...] = dataclasses.field(init=False)
    replay: Callable[[], None] = dataclasses.field(init=False)
    indices: IndexRanges | None = None
    check_first: Callable[[], object] | None = None

    def __post_init__(self) -> None:
        self.breaks = tuple(step for step in self.steps if isinstance(step, Break))
        self.segments = tuple(step for step in self.steps if not isinstance(step, Break))
        self.replay = functools.partial(_replay_first, weakref.ref(self))
        self._marks: list[Mark] = []
        self._rows = 0  # the number of rows that breaks are passed now; 0 for all rows
        kept = sum(step.bridged_bytes for step in self.breaks) <= _KEPT_BYTES
        for step in self.breaks:
            step.keeps = kept

    def take_returned(self) -> list[Any]:
        """Release the results of breaks in a replay that is over, and return those that were kept."""
        returned = [step.returned for step in self.breaks]
        for step in self.breaks:
            step.returned = None
        return returned

    def cut_breaks_by(self, dims: Sequence[BreakRows | None], padded: int) -> str | None:
        """Pass breaks only the real rows, which lie in these dimensions; return why that is impossible, or None."""
        if len(dims) != len(self.breaks):
            return f"{len(self.breaks)} eager breaks run at {padded} rows"
        pairs = list(zip(self.breaks, dims, strict=True))
        hindrances = (step.hindrance(rows, padded) for step, rows in pairs if rows is not None)
        hindrance = next(filter(None, hindrances), None)
        for step, rows in pairs if hindrance is None else ():
            step.dims = step.dims or rows
        return hindrance

    def pass_rows(self, rows: int) -> None:
        """Pass breaks this number of rows from now on; 0 for all rows."""
        if rows != self._rows:
            self._rows = rows
            for step in self.breaks:
                step.cut(rows)

    def look_after_breaks(self, find_changes: Callable[..., Any]) -> None:
        """Call this after each break of a replay; see `Break`."""
        for step in self.breaks:
            step.find_changes = find_changes

    @functools.cached_property
    def lent(self) -> LentOutputs:
        """The outputs, as callers may hold them."""
        return LentOutputs(self.outputs)

    @property
    def held(self) -> list[Any]:
        """List everything kept for replays: outputs, and the arguments and results of breaks."""
        return [self.outputs, *[(step.whole, step.accepts) for step in self.breaks]]

    def costs(self) -> list[StepCost]:
        """List the steps with their costs; waits for the second replay, which is timed if there are several steps."""
        marks = zip(self._marks, self._marks[1:], strict=False)
        times: Sequence[float | None] = [after.ms_since(before) for before, after in marks] or [None] * len(self.steps)
        return [
            StepCost("break", step.name, None, ms)
            if isinstance(step, Break)
            else StepCost("segment", "", step.num_nodes, ms)
            for step, ms in zip(self.steps, times, strict=True)
        ]

    def result(self) -> Any:
        """Return the forward's result in its structure; tensors are valid until the pool's next replay."""
        return self.spec.unflatten(self.outputs)

    def wait(self) -> None:
        """Wait until the program can be replayed; raises the driver's error if it cannot."""
        for segment in self.segments:
            segment.wait()

    def drop(self) -> None:
        """Free the graphs. The program cannot be replayed afterwards."""
        self.live = False
        for segment in self.segments:
            segment.reset()
        self.steps, self.breaks, self.segments, self.outputs, self.constants = (), (), (), [], []
        self.replay = _refuse_dropped
        if "lent" in vars(self):
            self.lent.drop()


# `Program.replay` is `_replay_first`, then `_replay_timed`, then `_replay_steady`: each sets the next. In a program of
# one segment, the segment's own `replay` follows `_replay_first`, which saves a Python frame. These functions refer to
# the program weakly, so that its last reference ends it.


def _replay_first(program: weakref.ref[Any]) -> None:
    """Replay each step for the first time, and choose how to replay it from now on.

    The states of the generators show if a segment's kernels draw random numbers, even if no operator shows it.
    """
    owner: Any = program()
    replays: list[Callable[[], None]] = []
    with torch.no_grad():
        for step in owner.steps:
            if isinstance(step, Break):
                step.replay()
                replays.append(step.replay)
                continue
            with CAPTURE_LOCK:
                if owner.check_first is not None:
                    owner.check_first()
                    owner.check_first = None
                before = random_states(owner.generators)
                _replay_drawing(owner.device, step)
                draws = drew(owner.generators, before)
            owner.draws = owner.draws or draws
            replays.append(functools.partial(_replay_drawing, owner.device, step) if draws else step.replay)
    single = len(replays) == 1 and not owner.breaks
    owner.replay = replays[0] if single else functools.partial(_replay_timed, program, replays)


def _replay_timed(program: weakref.ref[Any], replays: Sequence[Callable[[], None]]) -> None:
    """Replay the steps with marks between them, for `costs`. The first replay is not timed: it loads kernels."""
    owner: Any = program()
    owner.replay = functools.partial(_replay_steady, replays)
    marks = [owner.device.mark()]
    with torch.no_grad():
        for replay in replays:
            replay()
            marks.append(owner.device.mark())
    owner._marks = marks


def _replay_steady(replays: Sequence[Callable[[], None]]) -> None:
    if torch.is_grad_enabled():
        with torch.no_grad():
            _replay_steady(replays)
    else:
        for replay in replays:
            replay()


def _refuse_dropped() -> None:
    raise ReplayError("this graph was dropped; capture it again.")


def _replay_drawing(device: GraphDevice, segment: Segment) -> None:
    """Replay a segment that draws random numbers, while no other segment and no capture uses the generators."""
    with CAPTURE_LOCK:
        if device.current_stream() != device.drawing_stream:
            order_draws(device)
        segment.replay()


@dataclasses.dataclass(eq=False)
class SegmentRecorder:
    """Records the segments of a forward and, if a trace of its breaks is given, the breaks.

    Attributes:
        device, pool: the device and the memory pool of the capture.
        generators: random generators, beside the default one, that the forward draws from.
        trace: the breaks as a warmup met them; None makes breaks part of a single segment.
        continues: the pool's last Program is always replayed before this one.
        all_generators: every generator that the forward may draw from.
    """

    device: GraphDevice
    pool: GraphPool
    generators: Sequence[torch.Generator]
    trace: BreakTrace | None
    continues: bool = False

    def __post_init__(self) -> None:
        self.operators: frozenset[Any] = frozenset() if self.trace is None else self.trace.operators
        self._cells: dict[int, Cell] = {}  # by the id of the object that a cell holds now
        self._steps: list[Segment | Break] = []
        self._breaks = self._stream = 0
        self._ambient = Modes.now(self.device.torch_device.type)
        self._error: Exception | None = None
        self.all_generators = (default_generator(self.device.torch_device), *self.generators)

    def begin(self) -> None:
        """Begin the first segment."""
        self._stream = self.device.current_stream()
        self.device.begin(self.pool, self.generators, continues=self.continues)

    def finish(self) -> tuple[Segment | Break, ...]:
        """End the last segment, and return the steps of the forward."""
        if self._error is not None:
            raise self._error
        self._end_segment()
        return tuple(self._steps)

    def drop(self) -> None:
        """Drop the segments recorded so far."""
        for step in self._steps:
            if not isinstance(step, Break):
                step.reset()
        self._steps.clear()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, note the break, begin the next segment, and return stand-ins for the result."""
        try:
            return self._call(name_of(function), function, args, kwargs)
        except Exception as error:
            self._error = error  # even if the forward swallows it, and goes on without the break
            raise

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        warmup_call = self._warmup_call(function, name)
        if self.device.current_stream() != self._stream:
            raise BreakError(
                f"eager break {name} is called on another stream than the forward's; join that stream and leave its "
                "`with torch.cuda.stream(...)` block first."
            )
        args, kwargs = wait_collectives((args, kwargs))
        self._end_segment()
        leaves, spec = flatten((args, kwargs))
        made_here = warmup_call.made_here if len(warmup_call.made_here) == len(leaves) else (True,) * len(leaves)
        with recording_breaks(None):
            passed = [self._hold(leaf, made) for leaf, made in zip(leaves, made_here, strict=True)]
        step = self._break(name, function, (args, kwargs), spec, leaves, passed)
        step.effects = warmup_call.effects
        self._steps.append(step)
        self.device.begin(self.pool, self.generators, continues=True)
        site = BreakSite(leaves, passed, self._keep, self._cells)
        with recording_breaks(None):
            stand_ins = [result.stand_in(site) for result in warmup_call.results]
        step.spec, step.accepts = warmup_call.spec, [accept for _, accept in stand_ins]
        return warmup_call.spec.unflatten([value for value, _ in stand_ins])

    def _warmup_call(self, function: Callable[..., Any], name: str) -> BreakCall:
        """Return the warmup's call of the break that this call repeats."""
        index, self._breaks = self._breaks, self._breaks + 1
        calls = self.trace.calls if self.trace is not None else []
        if index >= len(calls) or calls[index].function != function:
            seen = name_of(calls[index].function) if index < len(calls) else "none"
            raise BreakError(
                f"eager break {name} is call {index + 1} of a break in the capture, where the warmup before it had "
                f"{seen}; which breaks run must follow from the batch size alone."
            )
        if calls[index].problem is not None:
            raise BreakError(f"eager break {name} {calls[index].problem}.")
        return calls[index]

    def _end_segment(self) -> None:
        if (segment := self.device.end()) is not None:
            self._steps.append(segment)

    def _hold(self, leaf: Any, made_here: bool) -> Any:
        """Return an argument as every replay passes it: graph memory is borrowed, everything else is owned."""
        if isinstance(leaf, Tensor):
            return self._keep(leaf) if made_here else leaf
        return self._cells.get(id(leaf), leaf)

    def _keep(self, tensor: Tensor) -> Tensor:
        """Borrow memory of the pool, so that later captures may reuse it; other memory stays owned.

        An earlier step of the same Program wrote this memory, and writes it again in every replay before it is read.
        """
        if type(tensor) is Tensor and self.device.in_pool(self.pool, tensor):
            # Never an inference tensor, whatever mode the forward is in: these refuse writes from other modes.
            with torch.inference_mode(False):
                return self.device.borrow(self.pool, tensor)
        return tensor

    def _break(
        self,
        name: str,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        spec: TreeSpec,
        leaves: Sequence[Any],
        passed: Sequence[Any],
    ) -> Break:
        """Make the step that calls the function again, with its arguments or their replacements in a replay."""
        device_type = self.device.torch_device.type
        modes = Modes.now(device_type)
        changed = modes.changed_from(self._ambient)
        inside = functools.partial(modes.restored, changed, device_type) if changed else None
        return Break(name, function, _break_arguments(call, spec, passed, leaves), inside)


def _break_arguments(call: Any, spec: TreeSpec, passed: Sequence[Any], leaves: Sequence[Any]) -> BreakArguments:
    """Describe how a replay rebuilds the arguments of a break.

    Containers among the arguments that hold no graph memory are passed as they are, so that the break sees later
    changes of them. The tuple of positional arguments and the dict of keyword arguments are new in every call.
    """
    nested: list[TreeSpec] = []
    parts: list[Any] = []
    places: list[int | None] = []
    start = 0
    for arguments, outer in zip(call, spec.children, strict=True):
        values = arguments if type(arguments) is tuple else arguments.values()
        children: list[TreeSpec] = []
        for value, child in zip(values, outer.children, strict=True):
            rebuilt = _without_graph_memory(value, child, passed, leaves, start)
            children.append(rebuilt.nested)
            parts += rebuilt.parts
            places += rebuilt.leaves
            start += child.num_leaves
        nested.append(dataclasses.replace(outer, children=tuple(children)))
    return BreakArguments(dataclasses.replace(spec, children=tuple(nested)), parts, places)


def _without_graph_memory(
    value: Any, spec: TreeSpec, passed: Sequence[Any], leaves: Sequence[Any], start: int
) -> BreakArguments:
    """Describe how a replay rebuilds one argument; its leaves begin at `start`. See `_passed`."""
    if spec.type is None:
        return BreakArguments(LEAF, passed[start : start + 1], [start])
    opened, end = opened_once(value), start + spec.num_leaves
    if opened is None or all(map(operator.is_, passed[start:end], leaves[start:end])):
        return BreakArguments(LEAF, [value], [None])
    children: list[TreeSpec] = []
    parts: list[Any] = []
    places: list[int | None] = []
    for item, child in zip(opened[1], spec.children, strict=True):
        inside = _without_graph_memory(item, child, passed, leaves, start)
        children.append(inside.nested)
        parts += inside.parts
        places += inside.leaves
        start += child.num_leaves
    return BreakArguments(dataclasses.replace(spec, children=tuple(children)), parts, places)
