"""Run the breaks of an eager forward: trace them for a capture, or record their effects to repeat them in a proof."""

from __future__ import annotations

import dataclasses
import itertools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from simplegraph.base.errors import BreakError
from simplegraph.base.nested import ATOMS, TreeSpec, flatten
from simplegraph.base.tensors import (
    has_address,
    is_wrapper,
    lies_at,
    parts,
    storage_key,
    storage_uses,
    wait_collectives,
    wants_grad,
)
from simplegraph.program.breaks.break_calls import (
    IN_THE_CALL,
    Argument,
    Break,
    BreakCall,
    BreakTrace,
    Bridge,
    Cell,
    Result,
    Tail,
    classify_result,
    hand_on,
    memory_of,
)
from simplegraph.program.breaks.marks import name_of, recording_breaks
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.program import Program

_LEFT = (
    "makes a tensor without returning it where a replay could put it, and the forward {}. Return tensors by themselves "
    "or in tuples, lists, dicts or dataclasses; where the code is not yours, break at the part around it, or wrap the "
    "parts after it"
)
_GRADIENTS = (
    "returns or changes what gradients flow through, and a backward in the graph would not reach what it is computed "
    "from. Pass it tensors without gradients (tensor.detach()), or let it hold the backward, too"
)
_PASSED = "it writes to what it is passed"
_EARLIER = "memory from before the call was written by then"
_KEEPS = "keeps a tensor that it is passed, whose memory later replays write; keep a clone"


class BreakTracer:
    """Runs the breaks of an eager forward, and traces their arguments and results.

    Args:
        operators: operators that break by themselves.
        observer: observes the run, and knows the memory that the forward made.
        device: the device of the forward.
        inputs: storage keys of the call's tensors; a graph has static inputs in their place.

    Attributes:
        trace: the trace so far.
    """

    def __init__(
        self,
        operators: frozenset[Any],
        observer: MemoryObserver,
        device: torch.device,
        inputs: Collection[int] = (),
    ) -> None:
        self.operators, self._inputs = operators, inputs
        self.trace = BreakTrace(operators)
        self._handed_on: list[Any] = []
        self._observer: MemoryObserver | None = observer
        self._device = device

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the break, and trace its arguments and results."""
        observer = self._observer
        if observer is None:
            return function(*args, **kwargs)
        args, kwargs = wait_collectives((args, kwargs))
        arguments, nesting = flatten((args, kwargs))
        made_here = tuple(issubclass(type(leaf), Tensor) and observer.made(leaf) for leaf in arguments)
        observer.note_passed(arguments)
        before = [_geometry(leaf) for leaf in arguments]
        nodes = list(map(_node, arguments))
        rewritten = [
            leaf for leaf, made in zip(arguments, made_here, strict=True) if made or memory_of(leaf) in self._inputs
        ]
        owners = list(map(_owners, rewritten))
        keys = {memory_of(leaf) for leaf in itertools.compress(arguments, made_here)}
        # Count the memory as blank until the break writes there: this shows the break's writes.
        blank, observer.blank = keys & observer.blank, observer.blank | keys
        with recording_breaks(None), observer.inside_break() as made:
            result = function(*args, **kwargs)
        unwritten = keys & observer.blank
        observer.blank -= unwritten - blank
        filled = (keys - unwritten) | blank | (observer.written & set(self._inputs))
        described = tuple(self._describe(leaf, made, filled) for leaf, made in zip(arguments, made_here, strict=True))
        leaves, spec = flatten(result)
        tensors = (part for leaf in leaves if issubclass(type(leaf), Tensor) for part in parts(leaf))
        returned = {storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided}
        observer.left_by_break |= dict.fromkeys(made - returned, len(self.trace.calls))
        classified = [
            classify_result(leaf, leaves[:place], arguments, observer.made, self._device)
            for place, leaf in enumerate(leaves)
        ]
        more = map(operator.gt, map(_owners, rewritten), owners)
        kept = any(memory_of(leaf) not in returned for leaf in itertools.compress(rewritten, list(more)))
        # Autograd keeps tensors for a backward, and a handle of asynchronous work keeps the tensors of the work.
        hands_on = any(map(_is_handed_on, classified))
        differentiable = torch.is_grad_enabled() or any(getattr(leaf, "grad_fn", None) is not None for leaf in leaves)
        problem = _KEEPS if kept and not differentiable and not hands_on else None
        if before != [_geometry(leaf) for leaf in arguments]:
            problem = "resizes, reshapes or re-points a tensor it is passed; return a new one"
        elif _changed((args, kwargs), arguments, nesting):
            # Replays pass the same container, but the segments after the break read the tensors of the capture.
            problem = "changes a list, dict or dataclass it is passed; return what it makes"
        elif torch.is_grad_enabled():
            others = [leaf for leaf in leaves if all(leaf is not argument for argument in arguments)]
            if any(wants_grad(leaf) and observer.made(leaf) for leaf in others) or nodes != list(map(_node, arguments)):
                problem = _GRADIENTS
        results = tuple(result for result in classified if isinstance(result, Result))
        problem = problem or next((said for said in classified if isinstance(said, str)), None)
        self._handed_on += [value for value, it in zip(leaves, classified, strict=True) if _is_handed_on(it)]
        effects = _PASSED if keys - unwritten else ""
        effects = _EARLIER if observer.written or observer.launched else effects
        self.trace.calls.append(BreakCall(function, made_here, spec, results, problem, described, effects))
        return result

    def _describe(self, leaf: Any, made: bool, filled: Collection[int]) -> Argument:
        """Describe an argument, to compare it with the same argument at another batch size."""
        if not issubclass(type(leaf), Tensor) or leaf.layout is not torch.strided or is_wrapper(leaf):
            if any(leaf is value for value in self._handed_on):
                return Argument(Cell)
            return Argument(_key_of(leaf))
        key = memory_of(leaf)
        of_the_call = made or key in self._inputs or leaf.device != self._device
        kind = type(leaf), leaf.dtype, IN_THE_CALL if of_the_call else leaf.data_ptr()
        return Argument(kind, (tuple(leaf.shape), leaf.stride()), key in filled)

    def finish(self, outputs: Any = None) -> BreakTrace:
        """Return the trace of the run, which is over and returned these outputs."""
        if self._observer is not None:
            self._observer.note_uses_of_left(flatten(outputs)[0], "returns it")
            for number, use in self._observer.uses_of_left.items():
                # A replay would read the tensor that the break made in the warmup.
                call = self.trace.calls[number]
                self.trace.calls[number] = call._replace(problem=call.problem or _LEFT.format(use))
        self._observer = None
        self._handed_on.clear()
        return self.trace


def _is_handed_on(result: Result | str) -> bool:
    return isinstance(result, Result) and result.make is hand_on


def _key_of(leaf: Any) -> Any:
    """Return a key that distinguishes an object from another call's, without keeping the object alive."""
    if issubclass(type(leaf), ATOMS):
        return leaf
    if issubclass(type(leaf), types.MethodType):
        return _key_of(leaf.__self__), _key_of(leaf.__func__)
    try:
        return weakref.ref(leaf)
    except TypeError:
        return type(leaf)


def _changed(passed: Any, leaves: Sequence[Any], nesting: TreeSpec) -> bool:
    """True if containers among the arguments hold other objects than before the call."""
    after, now = flatten(passed)
    return now != nesting or any(leaf is not before for leaf, before in zip(after, leaves, strict=True))


def _owners(tensor: Tensor) -> int:
    """Count the references to a tensor, and the tensors that share its memory if torch tells."""
    return sys.getrefcount(tensor) + (0 if is_wrapper(tensor) else storage_uses(storage_key(tensor)))


def _geometry(leaf: Any) -> Any:
    has_memory = issubclass(type(leaf), Tensor) and has_address(leaf) and not is_wrapper(leaf)
    return (*lies_at(leaf), leaf.storage_offset(), leaf.untyped_storage().nbytes()) if has_memory else None


def _node(leaf: Any) -> Any:
    return leaf.grad_fn if issubclass(type(leaf), Tensor) else None


Differs = Callable[[Tensor, Tensor], str | None]
Copied = Callable[[Collection[int]], Callable[[], object]]  # copies memory of these storage keys; returns its restore


class RecordedBreak(NamedTuple):
    """One call of a break in an eager run, with its effects.

    Attributes:
        function: the function of the break.
        results, spec: the leaves of the result, with tensors cloned, and its structure.
        arguments: for each leaf of the arguments, a copy made after the call if the run made the tensor; else None.
        passed: the same, copied before the call; None also for blank memory that the call filled.
        shapes: the shape of each leaf of the arguments; None for a leaf that is no tensor.
        outside: repeats the writes of the call to memory from before the run.
        effects: see `Break`.
    """

    function: Callable[..., Any]
    results: Sequence[Any]
    spec: TreeSpec
    arguments: Sequence[Tensor | None]
    passed: Sequence[Tensor | None]
    shapes: Sequence[Any]
    outside: Callable[[], object]
    effects: str


class BreakTape:
    """Runs the breaks of an eager forward, and records their effects for a proof.

    Args:
        operators: operators that break by themselves.
        observer: observes the run.
        copied: copies memory from before the run that breaks wrote to.

    Attributes:
        calls: the recorded calls, in the order of the forward.
    """

    def __init__(self, operators: frozenset[Any], observer: MemoryObserver, copied: Copied) -> None:
        self.operators = operators
        self.calls: list[RecordedBreak] = []
        self._observer = observer
        self._copied = copied

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the break, and record its result and its writes."""
        observer = self._observer
        args, kwargs = wait_collectives((args, kwargs))
        passed, _ = flatten((args, kwargs))
        before = [leaf.clone() if issubclass(type(leaf), Tensor) and observer.made(leaf) else None for leaf in passed]
        blank = [issubclass(type(leaf), Tensor) and storage_key(leaf) in observer.blank for leaf in passed]
        written, launched = observer.written, observer.launched
        observer.written, observer.launched = set(), set()
        try:
            with recording_breaks(None), observer.inside_break():
                result = function(*args, **kwargs)
            outside = self._copied(observer.written | observer.launched)
        finally:
            observer.written |= written
            observer.launched |= launched
        leaves, spec = flatten(result)
        arguments = [None if copy is None else leaf.clone() for leaf, copy in zip(passed, before, strict=True)]
        # Blank memory was filled if an operator wrote there, or if its values changed: not all kernels are observed.
        filled = [
            empty and copy is not None and (storage_key(leaf) not in observer.blank or not torch.equal(copy, leaf))
            for leaf, copy, empty in zip(passed, before, blank, strict=True)
        ]
        read = [None if full else copy for full, copy in zip(filled, before, strict=True)]
        pairs = zip(passed, before, strict=True)
        effects = _PASSED if any(_differ(leaf, copy) for leaf, copy in pairs) else ""
        if observer.written or observer.launched:
            effects = _EARLIER
        self.calls.append(
            RecordedBreak(
                function,
                [leaf.clone() if issubclass(type(leaf), Tensor) else leaf for leaf in leaves],
                spec,
                arguments,
                read,
                [getattr(leaf, "shape", None) for leaf in passed],
                outside,
                effects,
            )
        )
        return result


def _differ(leaf: Any, copy: Tensor | None) -> bool:
    return copy is not None and not torch.equal(leaf, copy)


class PlayedBreak(Break):
    """Repeats the effects of a recorded call in place of a break, and compares the arguments with the recorded ones."""

    def __init__(self, step: Break, recorded: RecordedBreak, differs: Differs, repeats: Callable[[], bool]) -> None:
        super().__init__(**{field.name: getattr(step, field.name) for field in dataclasses.fields(step)})
        self._recorded = recorded
        self._differs, self._repeats = differs, repeats

    def replay(self) -> None:
        """Copy the recorded results and writes to the memory that the next segment reads, and pad them.

        Raises:
            BreakError: the results do not fit, or the segments before pass other values than in the recorded call.
        """
        recorded = self._recorded
        if recorded.spec != self.spec:
            raise self._refused("another structure in the eager run")
        passed, _ = flatten(self.rebuilt() if self.rebuilt else (self.args, self.kwargs))
        for target, given, copy in zip(passed, recorded.passed, recorded.arguments, strict=True):
            difference = None if given is None else self._differs(self._front(target, given), given)
            if difference is not None:
                raise BreakError(f"what eager break {self.name} is passed {difference}")
            if copy is not None and given is None:
                self._fill(target, copy)
            elif copy is not None:  # the segments before made the padding rows
                self._front(target, copy).copy_(copy)
        recorded.outside()
        for accept, leaf in zip(self.accepts, recorded.results, strict=True):
            bridge = getattr(accept, "__self__", None)
            if isinstance(bridge, Bridge):
                # The result's shape does not follow the rows, so padding rows may have entered its values.
                if (
                    self.dims is None
                    and leaf.shape == bridge.target.shape
                    and recorded.shapes != [getattr(it, "shape", None) for it in passed]
                ):
                    raise BreakError(f"what eager break {self.name} returns is as large without padding rows")
                self._fill(bridge.target, leaf)
                if bridge.tail is not None:
                    self._pad(bridge.tail)
            # Other tensors are arguments, or from before the run, and are written already.
            elif not issubclass(type(leaf), Tensor) and (problem := accept(leaf)) is not None:
                raise self._refused(problem)
        for tail in self.tails:
            self._pad(tail)

    def _pad(self, tail: Tail) -> None:
        if self._repeats():
            tail.repeat_all()
        else:
            tail.repeat_last()

    def _fill(self, target: Tensor, copy: Tensor) -> None:
        """Copy the values of a smaller batch, and pad them by zeros, or by repeating them if `repeats` says so."""
        self._front(target.zero_(), copy).copy_(copy)
        if self._repeats() and copy.numel():
            times = [-(-padded // size) for padded, size in zip(target.shape, copy.shape, strict=True)]
            target.copy_(copy.repeat(times)[tuple(map(slice, target.shape))])

    def _front(self, target: Tensor, copy: Tensor) -> Tensor:
        if target.dim() != copy.dim() or not all(map(int.__le__, copy.shape, target.shape)):
            raise self._refused(f"a tensor of shape {tuple(copy.shape)} in the eager run")
        return target[tuple(map(slice, copy.shape))]


class FinishedBreaks:
    """Serves the first breaks of an eager forward by their results in a stopped replay, and runs the others.

    Args:
        operators: operators that break by themselves.
        calls: the functions of the breaks that ran in the replay, and their results.
        redo: called before the last of these returns; sets again what it set.
    """

    def __init__(
        self,
        operators: frozenset[Any],
        calls: Iterable[tuple[Any, Any]],
        redo: Callable[[], object] | None = None,
    ) -> None:
        self.operators, self._redo = operators, redo
        self._remaining = list(calls)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the break's result from the replay, or run the break. Raises BreakError if another break is called."""
        if not self._remaining:
            with recording_breaks(None):
                return function(*args, **kwargs)
        earlier, result = self._remaining.pop(0)
        if earlier != function:
            raise BreakError(f"the forward called eager break {name_of(earlier)} before, and now {name_of(function)}.")
        if self._redo is not None and not self._remaining:
            self._redo()
        return result

    def check_done(self) -> None:
        """Refuse a forward that did not call all breaks that ran in the replay. Raises BreakError."""
        if self._remaining:
            raise BreakError(
                f"the forward called eager break {name_of(self._remaining[0][0])} before, and now does not."
            )


def with_played_breaks(
    program: Program, calls: Sequence[RecordedBreak], differs: Differs, repeats: Callable[[], bool] = bool
) -> Program:
    """Return the program with recorded calls in place of its breaks; the segments are shared.

    Args:
        program: the program of the replays.
        calls: the calls of its breaks in an eager run.
        differs: describes the difference of an argument from the same argument in the eager run; None if equal.
        repeats: returns True if results of a smaller batch are padded by repeating them, instead of by zeros.

    Raises:
        BreakError: the eager run called other breaks than the program has.
    """
    if [call.function for call in calls] != [step.function for step in program.breaks]:
        count = len(program.breaks)
        raise BreakError(f"the eager run called {len(calls)} eager breaks, the graph has {count} or others.")
    program.pass_rows(0)
    for step, call in zip(program.breaks, calls, strict=True):
        step.effects = step.effects or call.effects
    remaining = iter(calls)
    steps = tuple(
        PlayedBreak(step, next(remaining), differs, repeats) if isinstance(step, Break) else step
        for step in program.steps
    )
    return Program(program.device, steps, program.outputs, program.spec, generators=program.generators)
