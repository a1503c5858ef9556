"""The two that are recording_breaks of breaks: a warmup's trace, and the recorder of a capture's segments."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.errors import BreakError
from simplegraph.graph.breaks.marks import name_of
from simplegraph.graph.breaks.operators import recording_breaks
from simplegraph.graph.breaks.results import Accept, Cell, Result, classify_result
from simplegraph.graph.breaks.step import Break, Modes, RebuiltArgument, SavedModes
from simplegraph.graph.device import GraphDevice, GraphPool, Segment
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.tensors import is_wrapper, parts, storage_key, wait_collectives
from simplegraph.nested import LEAF, TreeSpec, flatten, opened_once


class BreakCall(NamedTuple):
    """What a warmup saw of one call of a break.

    Attributes:
        function: what was called.
        made_here: for each leaf of the arguments, whether it is a tensor that the forward made.
        spec, results: how the result nests, and what its leaves are.
        problem: why no graph can have this break; None if it can.
    """

    function: Callable[..., Any]
    made_here: tuple[bool, ...]
    spec: TreeSpec
    results: tuple[Result, ...]
    problem: str | None = None

    @property
    def any_size(self) -> bool:
        """Whether it is known what the break returns at other batch sizes."""
        return self.problem is None and all(result.any_size for result in self.results)


class BreakTrace:
    """The breaks of a forward, in order, and what they return: classify_result from an eager run.

    Args:
        operators: operators that break by themselves.
        observer: sees the run, and hence what memory the forward made.
        device: where the forward runs.
        inlined: functions and operators that are plain calls here, whatever marks they have.

    Attributes:
        calls: in the order of the forward.
    """

    def __init__(
        self,
        operators: frozenset[Any],
        observer: MemoryObserver,
        device: torch.device,
        inlined: frozenset[Any] = frozenset(),
    ) -> None:
        self.operators = operators
        self.inlined = inlined
        self.calls: list[BreakCall] = []
        self._observer: MemoryObserver | None = observer
        self._device = device

    @property
    def any_size(self) -> bool:
        """Whether captures of other batch sizes can go by it."""
        return all(call.any_size for call in self.calls)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the break, and note what it is passed and returns."""
        observer = self._observer
        if observer is None or function in self.inlined:
            return function(*args, **kwargs)
        args, kwargs = wait_collectives((args, kwargs))
        arguments, nesting = flatten((args, kwargs))
        made_here = tuple(isinstance(leaf, Tensor) and observer.made(leaf) for leaf in arguments)
        observer.pass_on(arguments)
        before = [_geometry(leaf) for leaf in arguments]
        with recording_breaks(None), observer.inside_break() as made:
            result = function(*args, **kwargs)
        leaves, spec = flatten(result)
        tensors = (part for leaf in leaves if isinstance(leaf, Tensor) for part in parts(leaf))
        returned = {storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided}
        observer.left |= dict.fromkeys(made - returned, len(self.calls))
        problem = None
        if before != [_geometry(leaf) for leaf in arguments]:
            problem = "resizes, reshapes or re-points a tensor it is passed; return a new one"
        elif _changed((args, kwargs), arguments, nesting):
            # A replay would hand over the same container again, and the segments after it hold the tensors of now.
            problem = "changes a list, dict or dataclass it is passed; return what it makes"
        results = tuple(
            classify_result(leaf, leaves[:place], arguments, observer.made, self._device)
            for place, leaf in enumerate(leaves)
        )
        self.calls.append(BreakCall(function, made_here, spec, results, problem))
        return result

    def finish(self, outputs: Any = None) -> None:
        """The run is over, and returned these outputs."""
        if self._observer is not None:
            self._observer.find(flatten(outputs)[0], "returns it")
            for number, use in self._observer.found.items():
                # A replay would go on with the tensor that the warmup's call of the break made.
                problem = f"makes a tensor without returning it, and the forward {use}; return it"
                self.calls[number] = self.calls[number]._replace(problem=self.calls[number].problem or problem)
        self._observer = None


def _changed(passed: Any, leaves: Sequence[Any], nesting: TreeSpec) -> bool:
    """Whether containers among the arguments hold something else than they did."""
    after, now = flatten(passed)
    return now != nesting or any(leaf is not before for leaf, before in zip(after, leaves, strict=True))


def _geometry(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or is_wrapper(leaf):
        return None
    storage = leaf.untyped_storage()
    return leaf.shape, leaf.stride(), leaf.storage_offset(), storage.data_ptr(), storage.nbytes()


class SegmentRecorder:
    """Records a forward's segments and, where a trace of it is given, its breaks.

    Args:
        device, pool: where.
        generators: random generators, beside the default one, that the forward draws from.
        trace: what a warmup classify_result of the breaks; None makes breaks part of a single segment.
    """

    def __init__(
        self,
        device: GraphDevice,
        pool: GraphPool,
        generators: Sequence[torch.Generator],
        trace: BreakTrace | None,
    ) -> None:
        self.operators = frozenset() if trace is None else trace.operators
        self._device = device
        self._pool = pool
        self._generators = generators
        self._trace = trace
        self._cells: dict[int, Cell] = {}  # by the id of what they hold now
        self._steps: list[Segment | Break] = []
        self._breaks = 0
        self._stream = 0
        self._ambient = Modes.now(device.torch_device.type)
        self._error: Exception | None = None

    def record(self, run: Callable[[], Any]) -> tuple[Any, tuple[Segment | Break, ...]]:
        """Run the forward without executing it; what it returns, and the steps it is made of."""
        self._stream = self._device.current_stream()
        self._device.begin(self._pool, self._generators)
        with recording_breaks(None if self._trace is None else self):
            result = wait_collectives(run())
        if self._error is not None:
            raise self._error
        self._end_segment()
        return result, tuple(self._steps)

    def drop(self) -> None:
        """Drop the segments recorded so far."""
        for step in self._steps:
            if not isinstance(step, Break):
                step.reset()
        self._steps.clear()

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """End the segment, note the break, begin the next segment, and return stand-ins for the result."""
        if self._trace is None or function in self._trace.inlined:
            return function(*args, **kwargs)
        try:
            return self._call(name_of(function), function, args, kwargs)
        except Exception as error:
            self._error = error  # even if the forward swallows it, and goes on without the break
            raise

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._known(function, name)
        if self._device.current_stream() != self._stream:
            raise BreakError(
                f"eager break {name} is called on another stream than the forward's; join that stream and leave its "
                "`with torch.cuda.stream(...)` block first."
            )
        args, kwargs = wait_collectives((args, kwargs))
        self._end_segment()
        leaves, spec = flatten((args, kwargs))
        made_here = known.made_here if len(known.made_here) == len(leaves) else (True,) * len(leaves)
        # Not inference tensors, whatever mode the forward is in: those refuse writes from other modes.
        with recording_breaks(None), torch.inference_mode(False):
            held = [self._hold(leaf, made) for leaf, made in zip(leaves, made_here, strict=True)]
        step = self._break(name, function, (args, kwargs), spec, leaves, held)
        self._steps.append(step)
        self._device.begin(self._pool, self._generators, continues=True)
        entered: list[tuple[Any, Accept]] = []
        place = _Capturing(self, leaves, held, entered)
        with recording_breaks(None):
            for result in known.results:
                entered.append(result.enter(place))
        step.spec, step.accepts = known.spec, [accept for _, accept in entered]
        return known.spec.unflatten([value for value, _ in entered])

    def _known(self, function: Callable[..., Any], name: str) -> BreakCall:
        """What the warmup classify_result of this call."""
        index, self._breaks = self._breaks, self._breaks + 1
        calls = self._trace.calls if self._trace is not None else []
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
        segment = self._device.end()
        if segment is not None:
            self._steps.append(segment)

    def _hold(self, leaf: Any, made_here: bool) -> Any:
        """An argument as every replay passes it: graph memory is borrowed, all else is owned."""
        if isinstance(leaf, Tensor):
            return self.keep(leaf) if made_here else leaf
        return self._cells.get(id(leaf), leaf)

    def keep(self, tensor: Tensor) -> Tensor:
        """The same memory without owning it, so that what is captured next may use it, where that is right.

        Memory of the pool was written by an earlier step of this very Program, which writes it again in
        every replay before it is read here.
        """
        if type(tensor) is Tensor and self._device.in_pool(self._pool, tensor):
            return self._device.borrow(tensor)
        return tensor

    def watch(self, cell: Cell) -> None:
        """Let later breaks that are passed the cell's present value read the cell."""
        self._cells[id(cell.value)] = cell

    def _break(
        self,
        name: str,
        function: Callable[..., Any],
        call: tuple[tuple[Any, ...], dict[str, Any]],
        spec: TreeSpec,
        leaves: Sequence[Any],
        held: Sequence[Any],
    ) -> Break:
        """The step that calls the function again, with what it was given or what stands for that."""
        args, kwargs = call
        values: list[Any] = []
        rebuilt = []
        start = 0
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        specs = [child for arguments in spec.children for child in arguments.children]
        for (place, value), child in zip(given, specs, strict=True):
            end = start + child.num_leaves
            own = held[start:end]
            if child.type is None and not isinstance(own[0], Cell):
                values.append(own[0])
            elif all(map(operator.is_, own, leaves[start:end])):
                values.append(value)  # the very container, so that what is put into it later is seen
            else:
                values.append(None)  # the captured one would keep graph memory
                rebuilt.append(RebuiltArgument(place, *_anew(value, child, own, leaves[start:end])))
            start = end
        device_type = self._device.torch_device.type
        modes = Modes.now(device_type)
        named = dict(zip(kwargs, values[len(args) :], strict=True))
        changed = modes.changed_from(self._ambient)
        inside = SavedModes(modes, changed, device_type) if changed else None
        return Break(name, function, tuple(values[: len(args)]), named, rebuilt, inside)


def _anew(value: Any, spec: TreeSpec, own: Sequence[Any], leaves: Sequence[Any]) -> tuple[TreeSpec, list[Any]]:
    """How to put a container together anew: those in it without graph memory are leaves, and stay the very ones."""
    opened = opened_once(value)
    if opened is None:
        return spec, list(own)
    if all(map(operator.is_, own, leaves)):
        return LEAF, [value]
    children, parts, start = [], [], 0
    for item, child in zip(opened[1], spec.children, strict=True):
        end = start + child.num_leaves
        nested, inside = _anew(item, child, own[start:end], leaves[start:end])
        children.append(nested)
        parts += inside
        start = end
    return dataclasses.replace(spec, children=tuple(children)), parts


class _Capturing(NamedTuple):
    """Where a break's stand-ins enter the capture."""

    recorder: SegmentRecorder
    leaves: Sequence[Any]
    held: Sequence[Any]
    entered: Sequence[tuple[Any, Accept]]

    def keep(self, tensor: Tensor) -> Tensor:
        with torch.inference_mode(False):
            return self.recorder.keep(tensor)

    def watch(self, cell: Cell) -> None:
        self.recorder.watch(cell)
