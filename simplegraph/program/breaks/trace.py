"""Trace the run before a piecewise capture: what each break is passed and returns."""

from __future__ import annotations

import collections
import gc
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.break_operators import recording_breaks
from simplegraph.base.nested import ATOMS, TreeSpec, flatten
from simplegraph.base.tensors import is_wrapper, parts, storage_key, wait_collectives
from simplegraph.program.breaks.results import classify_result
from simplegraph.program.breaks.step import BreakCall, BreakTrace
from simplegraph.program.observe import MemoryObserver

_KEPT = "returns an object that the forward keeps, where no replay would put its own; keep it inside the break"
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
        self._observer: MemoryObserver | None = observer
        self._device = device
        self._handles = _Handles()
        self._inside: dict[int, str] = {}  # by break, the class of an object that it returns a tensor in

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the break, and note what it is passed and returns."""
        observer = self._observer
        if observer is None:
            return function(*args, **kwargs)
        args, kwargs = wait_collectives((args, kwargs))
        arguments, nesting = flatten((args, kwargs))
        made_here = tuple(isinstance(leaf, Tensor) and observer.made(leaf) for leaf in arguments)
        observer.pass_on(arguments)
        before = [_geometry(leaf) for leaf in arguments]
        earlier = self._handles.counts()
        rewritten = [
            leaf for leaf, made in zip(arguments, made_here, strict=True) if made or _key(leaf) in self._inputs
        ]
        owners = list(map(_owners, rewritten))
        with recording_breaks(None), observer.inside_break() as made:
            result = function(*args, **kwargs)
        self._handles.expect_more(earlier)
        fresh: list[Any] = []
        own = sys.getrefcount(result) > sys.getrefcount(fresh)  # the break goes on holding it
        leaves, spec = flatten(result)
        tensors = (part for leaf in leaves if isinstance(leaf, Tensor) for part in parts(leaf))
        returned = {storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided}
        observer.left |= dict.fromkeys(made - returned, len(self.trace.calls))
        kinds = (type(leaf).__name__ for leaf in leaves if not (made - returned).isdisjoint(_memory_inside(leaf)))
        self._inside |= {len(self.trace.calls): kind for kind in kinds}
        more = map(operator.gt, map(_owners, rewritten), owners)
        kept = any(_key(leaf) not in returned for leaf in itertools.compress(rewritten, list(more)))
        # Autograd keeps what a backward needs.
        differentiable = torch.is_grad_enabled() or any(getattr(leaf, "grad_fn", None) is not None for leaf in leaves)
        problem = _KEEPS if kept and not differentiable else None
        if before != [_geometry(leaf) for leaf in arguments]:
            problem = "resizes, reshapes or re-points a tensor it is passed; return a new one"
        elif _changed((args, kwargs), arguments, nesting):
            # A replay would hand over the same container again, and the segments after it hold the tensors of now.
            problem = "changes a list, dict or dataclass it is passed; return what it makes"
        results = tuple(
            classify_result(leaf, leaves[:place], arguments, observer.made, self._device)
            for place, leaf in enumerate(leaves)
        )
        self.trace.calls.append(BreakCall(function, made_here, spec, results, problem))
        handles = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *ATOMS)) and not _among(leaf, arguments)]
        self._handles.add(handles, len(self.trace.calls) - 1, passing=1 if own and spec.type is not None else 2)
        return result

    def finish(self, outputs: Any = None) -> BreakTrace:
        """Return the trace of the run, which returned these outputs and is over."""
        if self._observer is not None:
            self._observer.find(flatten(outputs)[0], "returns it")
            for number, use in self._observer.found.items():
                # A replay would go on with the tensor that the warmup's call of the break made.
                call = self.trace.calls[number]
                self.trace.calls[number] = call._replace(problem=call.problem or self._left_behind(number, use))
            del outputs
            for number in self._handles.kept():
                call = self.trace.calls[number]
                self.trace.calls[number] = call._replace(problem=call.problem or _KEPT)
        self._observer, self._handles = None, _Handles()
        return self.trace

    def _left_behind(self, number: int, use: str) -> str:
        """Say what is wrong with a break that made a tensor which a replay would not put where the forward reads it."""
        kind = self._inside.get(number)
        if kind is None:
            return f"makes a tensor without returning it, and the forward {use}; return it"
        return (
            f"makes a tensor without returning it where a replay could put it: inside the class {kind}, and the "
            f"forward {use}. Return tensors in tuples, lists, dicts or dataclasses; where the code is not yours, "
            "break at the part around it, or wrap the parts after it"
        )


def _memory_inside(leaf: Any) -> set[int]:
    """Return the storage keys of tensors among the attributes of an object that is no container."""
    if isinstance(leaf, (Tensor, *ATOMS)) or not hasattr(leaf, "__dict__"):
        return set()
    held = (tensor for tensor in flatten(dict(vars(leaf)))[0] if isinstance(tensor, Tensor))
    return {storage_key(part) for tensor in held for part in parts(tensor) if part.layout is torch.strided}


class _Handles:
    """Counts the references to objects that breaks return, to find those that the forward keeps.

    A segment goes on with the warmup's, whatever later calls of the break return, and a replay runs none of the Python
    that would put those in their place.
    """

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._breaks: list[int] = []  # their numbers
        self._expected: list[int] = []  # references

    def counts(self) -> list[int]:
        """Count the references to each."""
        return [sys.getrefcount(thing) for thing in self._objects]

    def add(self, handles: list[Any], number: int, *, passing: int) -> None:
        """Expect the references that there are now, but for those that are gone when the forward is over.

        Args:
            handles: objects, as often as the break's result holds them.
            number: of the break.
            passing: how often each is held for the time of the forward, and for each time that it is in `handles`.
        """
        times = collections.Counter(map(id, handles))
        new = {id(thing): thing for thing in handles}
        self._objects += new.values()
        self._breaks += [number] * len(new)
        handles.clear()
        new.clear()
        gone = [times[id(thing)] * passing for thing in self._objects[len(self._expected) :]]
        self._expected += map(operator.sub, self.counts()[len(self._expected) :], gone)

    def expect_more(self, before: Sequence[int]) -> None:
        """Expect the references that a break has added to the counts of before: it runs at every replay."""
        more = map(operator.sub, self.counts(), before)
        self._expected = list(map(operator.add, self._expected, more))

    def kept(self) -> set[int]:
        """Return the numbers of breaks whose objects the forward keeps."""
        if any(map(operator.gt, self.counts(), self._expected)):
            gc.collect()  # a cycle keeps nothing
        found = zip(self._breaks, self.counts(), self._expected, strict=True)
        return {number for number, now, expected in found if now > expected}


def _among(leaf: Any, others: Sequence[Any]) -> bool:
    return any(leaf is other for other in others)


def _changed(passed: Any, leaves: Sequence[Any], nesting: TreeSpec) -> bool:
    """True if containers among the arguments hold something else than they did."""
    after, now = flatten(passed)
    return now != nesting or any(leaf is not before for leaf, before in zip(after, leaves, strict=True))


def _key(leaf: Any) -> int:
    return storage_key(leaf) if isinstance(leaf, Tensor) and leaf.layout is torch.strided else 0


def _owners(tensor: Tensor) -> int:
    """Count what refers to a tensor, and the tensors of its memory if torch tells."""
    views = 0 if _use_count is None or is_wrapper(tensor) else _use_count(tensor.untyped_storage()._cdata)
    return sys.getrefcount(tensor) + views


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


def _geometry(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or is_wrapper(leaf):
        return None
    storage = leaf.untyped_storage()
    return leaf.shape, leaf.stride(), leaf.storage_offset(), storage.data_ptr(), storage.nbytes()
