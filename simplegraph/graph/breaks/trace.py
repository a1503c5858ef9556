"""Trace the run before a piecewise capture: what each break is passed and returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.graph.breaks.operators import recording_breaks
from simplegraph.graph.breaks.results import classify_result
from simplegraph.graph.breaks.step import BreakCall, BreakTrace
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.tensors import is_wrapper, parts, storage_key, wait_collectives
from simplegraph.nested import TreeSpec, flatten


class BreakTracer:
    """Runs the breaks of an eager forward and notes what they are passed and return.

    Args:
        operators: operators that break by themselves.
        observer: sees the run, and hence what memory the forward made.
        device: where the forward runs.

    Attributes:
        trace: what was seen so far.
    """

    def __init__(self, operators: frozenset[Any], observer: MemoryObserver, device: torch.device) -> None:
        self.operators = operators
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
        with recording_breaks(None), observer.inside_break() as made:
            result = function(*args, **kwargs)
        leaves, spec = flatten(result)
        tensors = (part for leaf in leaves if isinstance(leaf, Tensor) for part in parts(leaf))
        returned = {storage_key(tensor) for tensor in tensors if tensor.layout is torch.strided}
        observer.left |= dict.fromkeys(made - returned, len(self.trace.calls))
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
        self.trace.calls.append(BreakCall(function, made_here, spec, results, problem))
        return result

    def finish(self, outputs: Any = None) -> BreakTrace:
        """Return the trace of the run, which returned these outputs and is over."""
        if self._observer is not None:
            self._observer.find(flatten(outputs)[0], "returns it")
            for number, use in self._observer.found.items():
                # A replay would go on with the tensor that the warmup's call of the break made.
                call = self.trace.calls[number]
                problem = call.problem or f"makes a tensor without returning it, and the forward {use}; return it"
                self.trace.calls[number] = call._replace(problem=problem)
        self._observer = None
        return self.trace


def _changed(passed: Any, leaves: Sequence[Any], nesting: TreeSpec) -> bool:
    """True if containers among the arguments hold something else than they did."""
    after, now = flatten(passed)
    return now != nesting or any(leaf is not before for leaf, before in zip(after, leaves, strict=True))


def _geometry(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or is_wrapper(leaf):
        return None
    storage = leaf.untyped_storage()
    return leaf.shape, leaf.stride(), leaf.storage_offset(), storage.data_ptr(), storage.nbytes()
