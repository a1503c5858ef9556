"""Trace the run before a piecewise capture: what each break is passed and returns."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.break_operators import recording_breaks
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.tensors import is_wrapper, parts, storage_key, wait_collectives
from simplegraph.program.breaks.results import classify_result, hand_on
from simplegraph.program.breaks.step import BreakCall, BreakTrace, Result
from simplegraph.program.observe import MemoryObserver

_LEFT = (
    "makes a tensor without returning it where a replay could put it, and the forward {}. Return tensors by themselves "
    "or in tuples, lists, dicts or dataclasses; where the code is not yours, break at the part around it, or wrap the "
    "parts after it"
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
        self._observer: MemoryObserver | None = observer
        self._device = device

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
        rewritten = [
            leaf for leaf, made in zip(arguments, made_here, strict=True) if made or _key(leaf) in self._inputs
        ]
        owners = list(map(_owners, rewritten))
        with recording_breaks(None), observer.inside_break() as made:
            result = function(*args, **kwargs)
        leaves, spec = flatten(result)
        tensors = (part for leaf in leaves if isinstance(leaf, Tensor) for part in parts(leaf))
        returned = {storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided}
        observer.left |= dict.fromkeys(made - returned, len(self.trace.calls))
        found = [
            classify_result(leaf, leaves[:place], arguments, observer.made, self._device)
            for place, leaf in enumerate(leaves)
        ]
        more = map(operator.gt, map(_owners, rewritten), owners)
        kept = any(_key(leaf) not in returned for leaf in itertools.compress(rewritten, list(more)))
        # Autograd keeps what a backward needs, and a handle of work that was begun what it works on.
        hands_on = any(isinstance(result, Result) and result.make is hand_on for result in found)
        differentiable = torch.is_grad_enabled() or any(getattr(leaf, "grad_fn", None) is not None for leaf in leaves)
        problem = _KEEPS if kept and not differentiable and not hands_on else None
        if before != [_geometry(leaf) for leaf in arguments]:
            problem = "resizes, reshapes or re-points a tensor it is passed; return a new one"
        elif _changed((args, kwargs), arguments, nesting):
            # A replay would hand over the same container again, and the segments after it hold the tensors of now.
            problem = "changes a list, dict or dataclass it is passed; return what it makes"
        results = tuple(result for result in found if isinstance(result, Result))
        problem = problem or next((said for said in found if isinstance(said, str)), None)
        self.trace.calls.append(BreakCall(function, made_here, spec, results, problem))
        return result

    def finish(self, outputs: Any = None) -> BreakTrace:
        """Return the trace of the run, which returned these outputs and is over."""
        if self._observer is not None:
            self._observer.find(flatten(outputs)[0], "returns it")
            for number, use in self._observer.found.items():
                # A replay would go on with the tensor that the warmup's call of the break made.
                call = self.trace.calls[number]
                self.trace.calls[number] = call._replace(problem=call.problem or _LEFT.format(use))
        self._observer = None
        return self.trace


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
