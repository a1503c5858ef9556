"""Play back what the breaks of an eager run returned and wrote, where a replay would call them again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from simplegraph.base.break_operators import recording_breaks
from simplegraph.base.errors import BreakError
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.tensors import storage_key, wait_collectives
from simplegraph.program.breaks.results import Bridge
from simplegraph.program.breaks.step import Break
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.program import Program

Restore = Callable[[], object]
Differs = Callable[[Tensor, Tensor], str | None]


class Copies(Protocol):
    """Copies memory that outlives a run."""

    def copied(self, keys: Collection[int]) -> Restore:
        """Copy memory, given by its storage keys; what is returned puts it back."""


class RecordedBreak(NamedTuple):
    """One call of a break in an eager run.

    Attributes:
        function: what was called.
        results, spec: the leaves of what it returned, tensors cloned, and how they nest.
        arguments: for each leaf of its arguments that the run made, what the call left in it; None for others.
        passed: the same before the call; None also for memory that nothing had written and the call filled.
        outside: puts back what it wrote to memory from before the run.
    """

    function: Callable[..., Any]
    results: Sequence[Any]
    spec: TreeSpec
    arguments: Sequence[Tensor | None]
    passed: Sequence[Tensor | None]
    outside: Restore


class BreakTape:
    """Runs the breaks of an eager forward, and records their effects.

    Args:
        operators: operators that break by themselves.
        observer: sees the run.
        memory: copies what breaks write to memory from before the run.

    Attributes:
        calls: what was recorded, in the order of the forward.
    """

    def __init__(self, operators: frozenset[Any], observer: MemoryObserver, memory: Copies) -> None:
        self.operators = operators
        self.calls: list[RecordedBreak] = []
        self._observer = observer
        self._memory = memory

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the break, and record what it returns and writes."""
        observer = self._observer
        args, kwargs = wait_collectives((args, kwargs))
        passed, _ = flatten((args, kwargs))
        made = [isinstance(leaf, Tensor) and observer.made(leaf) for leaf in passed]
        before = [leaf.clone() if own else None for leaf, own in zip(passed, made, strict=True)]
        blank = [own and storage_key(leaf) in observer.blank for leaf, own in zip(passed, made, strict=True)]
        written, observer.written = observer.written, set()
        try:
            with recording_breaks(None), observer.inside_break():
                result = function(*args, **kwargs)
            outside = self._memory.copied(observer.written)
        finally:
            observer.written |= written
        leaves, spec = flatten(result)
        results = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        arguments = [leaf.clone() if own else None for leaf, own in zip(passed, made, strict=True)]
        entries = zip(before, arguments, blank, strict=True)
        read = [
            None if empty and copy is not None and now is not None and not torch.equal(copy, now) else copy
            for copy, now, empty in entries
        ]
        self.calls.append(RecordedBreak(function, results, spec, arguments, read, outside))
        return result


class PlayedBreak(Break):
    """A break whose effects are a recorded call's, and that must be passed what that call was."""

    def __init__(self, step: Break, recorded: RecordedBreak, differs: Differs) -> None:
        super().__init__(**{field.name: getattr(step, field.name) for field in dataclasses.fields(step)})
        self._recorded = recorded
        self._differs = differs

    def replay(self) -> None:
        """Put the recorded results and writes where the next segment reads them; a smaller batch fills the front.

        Raises:
            BreakError: they do not fit, or the segments before pass other values.
        """
        recorded = self._recorded
        if recorded.spec != self.spec:
            raise self._refused("another structure in the eager run")
        passed, _ = flatten(self.rebuilt.value() if self.rebuilt else (self.args, self.kwargs))
        for target, given, copy in zip(passed, recorded.passed, recorded.arguments, strict=True):
            found = None if given is None else self._differs(self._front(target, given), given)
            if found is not None:
                raise BreakError(f"what eager break {self.name} is passed {found}")
            if copy is not None:
                self._front(target, copy).copy_(copy)
        recorded.outside()
        for accept, leaf in zip(self.accepts, recorded.results, strict=True):
            bridge = getattr(accept, "__self__", None)
            if isinstance(bridge, Bridge):
                bridge.target.zero_()
                self._front(bridge.target, leaf).copy_(leaf)
            elif not isinstance(leaf, Tensor):  # other tensors are arguments, or outside, and written already
                problem = accept(leaf)
                if problem is not None:
                    raise self._refused(problem)

    def _front(self, target: Tensor, copy: Tensor) -> Tensor:
        fits = target.dim() == copy.dim() and all(map(int.__le__, copy.shape, target.shape))
        if not fits:
            raise self._refused(f"a tensor of shape {tuple(copy.shape)} in the eager run")
        return target[tuple(map(slice, copy.shape))]


def played(program: Program, calls: Sequence[RecordedBreak], differs: Differs) -> Program:
    """Return the program with its breaks played back; the segments are shared.

    Args:
        program: what replays run.
        calls: of an eager run.
        differs: says how what a break is passed differs from what it was passed in that run, or None.

    Raises:
        BreakError: the eager run called other breaks than the program has.
    """
    found, expected = [call.function for call in calls], [step.function for step in program.breaks]
    if found != expected:
        raise BreakError(f"the eager run called {len(found)} eager breaks, the graph has {len(expected)} or others.")
    left = iter(calls)
    steps = tuple(PlayedBreak(step, next(left), differs) if isinstance(step, Break) else step for step in program.steps)
    return Program(program.device, steps, program.outputs, program.spec, generators=program.generators)
