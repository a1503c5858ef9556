"""`try_full`: whether what runs piecewise could run as one full graph, or which break is in the way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from simplegraph.batch.reasons import Reason
from simplegraph.checking.check import ModuleTrial
from simplegraph.config import CudaGraphConfig
from simplegraph.context import bypassed
from simplegraph.errors import InputError
from simplegraph.graph.breaks.marks import name_of


@dataclasses.dataclass(frozen=True)
class FullReport:
    """What `try_full` found. True in a condition if one full graph can serve the module.

    Attributes:
        possible: with every break captured inline, replays equalled eager on every batch tried.
        problem: what is in the way of that; None if nothing is.
        breaks: for every function that broke, what is wrong with capturing that one inline; None if nothing is.
        piecewise: what is wrong even with all breaks honoured; None if nothing is.
    """

    possible: bool
    problem: str | None
    breaks: dict[str, str | None]
    piecewise: str | None

    def __bool__(self) -> bool:
        return self.possible

    def __str__(self) -> str:
        lines = [f"full graph: {'yes, use mode=' + repr('FULL') if self.possible else 'no'}"]
        if self.possible:
            return lines[0]
        if self.piecewise is not None:
            return "\n".join([*lines, f"  not piecewise either: {self.piecewise}"])
        guilty = {name: problem for name, problem in self.breaks.items() if problem is not None}
        lines += [f"  {name} must stay an eager break: {problem}" for name, problem in guilty.items()]
        lines += [f"  {name} could be captured" for name in self.breaks if name not in guilty]
        return "\n".join(lines if guilty else [*lines, f"  all breaks together: {self.problem}"])


def try_full(
    module: nn.Module,
    *args: Any,
    others: Sequence[tuple[Any, ...]] = (),
    before: Callable[[int], object] | None = None,
    batch_dims: Mapping[str, Any] | None = None,
    break_ops: Sequence[str] = (),
    **kwargs: Any,
) -> FullReport:
    """Try whether PIECEWISE can become FULL: capture with breaks inlined, and compare replays with eager.

    Batches of the same shapes share a graph; its replays are compared with eager on each of them, and on
    their rows in other orders. Where that fails, every break is tried inline alone, to name those that are
    in the way. What the module holds is put back; what breaks write elsewhere (a KV cache in a context) is not.

        print(sg.try_full(model, input_ids, positions))

    Args:
        module: in evaluation mode, with its breaks marked.
        *args: example inputs, as for `check`.
        others: further batches, each a tuple of positional arguments; of other lengths, say.
        before: called with the batch's number (0 for `args`) before every run and replay of it: sets the metadata that
            breaks read.
        batch_dims: batch dimensions by argument name, as in `CudaGraphConfig`.
        break_ops: operators that break, as in `CudaGraphConfig`.
        **kwargs: example inputs passed by keyword, for every batch.

    Raises:
        InputError: it is no module, or in training mode, or the inputs cannot be bound to a graph.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"try_full got a {type(module).__name__}; expected a torch.nn.Module instance first.")
    if module.training:
        raise InputError("the module is in training mode; call .eval() before try_full.")
    if not all(isinstance(other, tuple) for other in others):
        raise InputError("try_full got others that are not tuples of positional arguments, such as [(x2,), (x3,)].")
    config = CudaGraphConfig(batch_dims=batch_dims or {}, break_ops=break_ops)
    with torch.no_grad(), bypassed(Reason.NESTED):
        checkers: list[ModuleTrial] = []
        for number, batch in enumerate([args, *others]):
            if not any(checker.also(number, batch, kwargs) for checker in checkers):
                checkers.append(ModuleTrial(module, batch, kwargs, config, before or bool, number))
        return _report(checkers)


def _report(checkers: Sequence[ModuleTrial]) -> FullReport:
    piecewise = _problem(checkers, frozenset())
    found = {call.function: None for checker in checkers for call in checker.trace().calls}
    problem = _problem(checkers, None)
    if problem is None or piecewise is not None:
        return FullReport(problem is None, problem, {name_of(function): None for function in found}, piecewise)
    return FullReport(
        False, problem, {name_of(function): _problem(checkers, frozenset({function})) for function in found}, None
    )


def _problem(checkers: Sequence[ModuleTrial], inlined: frozenset[Any] | None) -> str | None:
    """The first batch's problem, if any has one."""
    return next((problem for checker in checkers if (problem := checker.problem(inlined)) is not None), None)
