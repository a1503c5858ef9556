"""Run breaks in an eager forward: trace them for a capture, or record their effects and play them back in a replay."""

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
    wait_collectives,
    wants_grad,
)
from simplegraph.program.breaks.marks import name_of, recording_breaks
from simplegraph.program.breaks.step import (
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
_KEEPS = "keeps a tensor that it is passed, whose memory later replays write; keep a clone"


class BreakTracer:
    """Runs the breaks of an eager forward and notes what they are passed and return.

    Args:
        operators: operators that break by themselves.
        observer: sees the run, and hence what memory the forward made.
        device: where the forward runs.
        inputs: storage keys of the call's tensors: a graph has them in buffers of its own.

    Attributes:
        trace: what was seen so far.
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
        """Run the break, and note what it is passed and returns."""
        observer = self._observer
        if observer is None:
            return function(*args, **kwargs)
        args, kwargs = wait_collectives((args, kwargs))
        arguments, nesting = flatten((args, kwargs))
        made_here = tuple(issubclass(type(leaf), Tensor) and observer.made(leaf) for leaf in arguments)
        observer.pass_on(arguments)
        before = [_geometry(leaf) for leaf in arguments]
        nodes = list(map(_node, arguments))
        rewritten = [
            leaf for leaf, made in zip(arguments, made_here, strict=True) if made or memory_of(leaf) in self._inputs
        ]
        owners = list(map(_owners, rewritten))
        keys = {memory_of(leaf) for leaf in itertools.compress(arguments, made_here)}
        # Blank until the break writes there, so that its writes show.
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
        # Autograd keeps tensors that a backward needs, and a handle of started work keeps the tensors that it works on.
        hands_on = any(map(_is_handed_on, classified))
        differentiable = torch.is_grad_enabled() or any(getattr(leaf, "grad_fn", None) is not None for leaf in leaves)
        problem = _KEEPS if kept and not differentiable and not hands_on else None
        if before != [_geometry(leaf) for leaf in arguments]:
            problem = "resizes, reshapes or re-points a tensor it is passed; return a new one"
        elif _changed((args, kwargs), arguments, nesting):
            # A replay would pass the same container again, and the segments after it hold this run's tensors.
            problem = "changes a list, dict or dataclass it is passed; return what it makes"
        elif torch.is_grad_enabled():
            others = [leaf for leaf in leaves if all(leaf is not argument for argument in arguments)]
            if any(wants_grad(leaf) and observer.made(leaf) for leaf in others) or nodes != list(map(_node, arguments)):
                problem = _GRADIENTS
        results = tuple(result for result in classified if isinstance(result, Result))
        problem = problem or next((said for said in classified if isinstance(said, str)), None)
        self._handed_on += [value for value, it in zip(leaves, classified, strict=True) if _is_handed_on(it)]
        self.trace.calls.append(BreakCall(function, made_here, spec, results, problem, described))
        return result

    def _describe(self, leaf: Any, made: bool, filled: Collection[int]) -> Argument:
        """Describe an argument, so that a call with another batch size can be compared."""
        if not issubclass(type(leaf), Tensor) or leaf.layout is not torch.strided or is_wrapper(leaf):
            if any(leaf is value for value in self._handed_on):
                return Argument(Cell)
            return Argument(_key_of(leaf))
        key = memory_of(leaf)
        of_the_call = made or key in self._inputs or leaf.device != self._device
        kind = type(leaf), leaf.dtype, IN_THE_CALL if of_the_call else leaf.data_ptr()
        return Argument(kind, (tuple(leaf.shape), leaf.stride()), key in filled)

    def finish(self, outputs: Any = None) -> BreakTrace:
        """Return the trace of the run, which returned these outputs and is over."""
        if self._observer is not None:
            self._observer.find(flatten(outputs)[0], "returns it")
            for number, use in self._observer.uses_of_left.items():
                # A replay would go on with the tensor that the warmup's call of the break made.
                call = self.trace.calls[number]
                self.trace.calls[number] = call._replace(problem=call.problem or _LEFT.format(use))
        self._observer = None
        self._handed_on.clear()
        return self.trace


def _is_handed_on(result: Result | str) -> bool:
    return isinstance(result, Result) and result.make is hand_on


def _key_of(leaf: Any) -> Any:
    """Return a key that tells an object apart from that of another call, without keeping the object alive."""
    if issubclass(type(leaf), ATOMS):
        return leaf
    if issubclass(type(leaf), types.MethodType):
        return _key_of(leaf.__self__), _key_of(leaf.__func__)
    try:
        return weakref.ref(leaf)
    except TypeError:
        return type(leaf)


def _changed(passed: Any, leaves: Sequence[Any], nesting: TreeSpec) -> bool:
    """True if containers among the arguments hold other objects than before."""
    after, now = flatten(passed)
    return now != nesting or any(leaf is not before for leaf, before in zip(after, leaves, strict=True))


def _owners(tensor: Tensor) -> int:
    """Count the references to a tensor, and the tensors that share its memory if torch tells."""
    return sys.getrefcount(tensor) + (0 if is_wrapper(tensor) else _use_count(storage_key(tensor)))


_use_count: Callable[[int], int] = getattr(torch._C, "_storage_Use_Count", lambda _: 0)


def _geometry(leaf: Any) -> Any:
    has_memory = issubclass(type(leaf), Tensor) and has_address(leaf) and not is_wrapper(leaf)
    return (*lies_at(leaf), leaf.storage_offset(), leaf.untyped_storage().nbytes()) if has_memory else None


def _node(leaf: Any) -> Any:
    return leaf.grad_fn if issubclass(type(leaf), Tensor) else None


Differs = Callable[[Tensor, Tensor], str | None]
Copied = Callable[[Collection[int]], Callable[[], object]]  # copies memory, given by its storage keys


class RecordedBreak(NamedTuple):
    """One call of a break in an eager run.

    Attributes:
        function: what was called.
        results, spec: the leaves of what it returned, tensors cloned, and how they nest.
        arguments: for each leaf of its arguments that the run made, what the call left in it; None for others.
        passed: the same before the call; None also for memory that nothing had written and the call filled.
        shapes: those of all its arguments that are tensors, None for others.
        outside: puts back what it wrote to memory from before the run.
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
    """Runs the breaks of an eager forward, and records their effects.

    Args:
        operators: operators that break by themselves.
        observer: sees the run.
        copied: copies what breaks write to memory from before the run.

    Attributes:
        calls: what was recorded, in the order of the forward.
    """

    def __init__(self, operators: frozenset[Any], observer: MemoryObserver, copied: Copied) -> None:
        self.operators = operators
        self.calls: list[RecordedBreak] = []
        self._observer = observer
        self._copied = copied

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the break, and record what it returns and writes."""
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
        # A write may leave the value that was there; of kernels that no operator shows, only a change is seen.
        filled = [
            empty and copy is not None and (storage_key(leaf) not in observer.blank or not torch.equal(copy, leaf))
            for leaf, copy, empty in zip(passed, before, blank, strict=True)
        ]
        read = [None if full else copy for full, copy in zip(filled, before, strict=True)]
        pairs = zip(passed, before, strict=True)
        effects = "it writes to what it is passed" if any(_differ(leaf, copy) for leaf, copy in pairs) else ""
        if observer.written or observer.launched:
            effects = "memory from before the call was written by then"
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
    """A break that repeats the effects of a recorded call, and must be passed what that call was passed."""

    def __init__(self, step: Break, recorded: RecordedBreak, differs: Differs, repeats: Callable[[], bool]) -> None:
        super().__init__(**{field.name: getattr(step, field.name) for field in dataclasses.fields(step)})
        self._recorded = recorded
        self._differs, self._repeats = differs, repeats

    def replay(self) -> None:
        """Put the recorded results and writes where the next segment reads them, and pad them as a replay does.

        Raises:
            BreakError: they do not fit, or the segments before pass other values.
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
            elif copy is not None:  # the segments made its padding rows
                self._front(target, copy).copy_(copy)
        recorded.outside()
        for accept, leaf in zip(self.accepts, recorded.results, strict=True):
            bridge = getattr(accept, "__self__", None)
            if isinstance(bridge, Bridge):
                # A result of the same size with padded rows may be made of all of them.
                if (
                    self.dims is None
                    and leaf.shape == bridge.target.shape
                    and recorded.shapes != [getattr(it, "shape", None) for it in passed]
                ):
                    raise BreakError(f"what eager break {self.name} returns is as large without padding rows")
                self._fill(bridge.target, leaf)
                if bridge.tail is not None:
                    self._pad(bridge.tail)
            # Other tensors are arguments, or outside, and written already.
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
        """Copy what a smaller batch left, and pad it: by zeros or, since zeros are a constant, by repeating it."""
        self._front(target.zero_(), copy).copy_(copy)
        if self._repeats() and copy.numel():
            times = [-(-padded // size) for padded, size in zip(target.shape, copy.shape, strict=True)]
            target.copy_(copy.repeat(times)[tuple(map(slice, target.shape))])

    def _front(self, target: Tensor, copy: Tensor) -> Tensor:
        if target.dim() != copy.dim() or not all(map(int.__le__, copy.shape, target.shape)):
            raise self._refused(f"a tensor of shape {tuple(copy.shape)} in the eager run")
        return target[tuple(map(slice, copy.shape))]


class FinishedBreaks:
    """Serves the first breaks of an eager forward by what they returned in a replay, and runs the others.

    Args:
        operators: operators that break by themselves.
        calls: the functions of the first ones, and what they returned.
    """

    def __init__(self, operators: frozenset[Any], calls: Iterable[tuple[Any, Any]]) -> None:
        self.operators = operators
        self._remaining = list(calls)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the break returned before, or run it. Raises BreakError if the forward calls another one."""
        if not self._remaining:
            with recording_breaks(None):
                return function(*args, **kwargs)
        earlier, result = self._remaining.pop(0)
        if earlier != function:
            raise BreakError(f"the forward called eager break {name_of(earlier)} before, and now {name_of(function)}.")
        return result

    def check_done(self) -> None:
        """Refuse a forward that did not reach all of the first ones. Raises BreakError."""
        if self._remaining:
            raise BreakError(
                f"the forward called eager break {name_of(self._remaining[0][0])} before, and now does not."
            )


def played(
    program: Program, calls: Sequence[RecordedBreak], differs: Differs, repeats: Callable[[], bool] = bool
) -> Program:
    """Return the program with its breaks played back; the segments are shared.

    Args:
        program: what replays run.
        calls: of an eager run.
        differs: says how what a break is passed differs from what it was passed in that run, or None.
        repeats: True if the results of a smaller batch are padded by themselves, not by zeros.

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
