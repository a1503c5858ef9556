"""`check`: tries if a module can be captured, in how many pieces, and if padding changes its outputs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from simplegraph.base.break_operators import name_of
from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import InputError
from simplegraph.base.failures import BREAK
from simplegraph.doctor.trial import TRIED, ModuleTrial
from simplegraph.manager.jobs import MemoryEstimate
from simplegraph.serve.mixin import wrap


@dataclasses.dataclass(frozen=True)
class CheckReport:
    """The findings of `check`. True as a condition if the module can be captured and padded without changes.

    Attributes:
        capturable: True if the forward was captured as one full graph, with its eager breaks inline, and its replays
            equal eager on new inputs.
        problem: why it is not capturable, with the user's line; None if it is.
        breaks: function that breaks -> what is wrong with capturing it inline; None if nothing is.
        piecewise: what is wrong even with all breaks run eagerly; None if nothing is.
        rows_independent: True if the padding tried changed no real row; None if two eager runs already differ.
        mixing: what padding changed; None if nothing.
        state_written: names of parameters, buffers and attributes that the forward writes to: every replay
            changes them again, as every eager call does.
        inputs_written: names of arguments that the forward writes to.
        output_aliases: outputs that share memory with an argument or with the module.
        memory: the memory that capturing `capture_sizes` would take; None if they were not given.
    """

    capturable: bool
    problem: str | None
    breaks: dict[str, str | None]
    piecewise: str | None
    rows_independent: bool | None
    mixing: str | None
    state_written: tuple[str, ...]
    inputs_written: tuple[str, ...]
    output_aliases: tuple[str, ...]
    memory: MemoryEstimate | None = None

    def __bool__(self) -> bool:
        return self.capturable and self.rows_independent is not False

    def __str__(self) -> str:
        independent = {
            None: "unknown, since two eager runs on the same inputs differ",
            True: f"yes, as far as these inputs show: {TRIED}",
            False: f"no ({self.mixing}); use padding=False, which captures exact sizes only",
        }
        lines = [*self._capture_lines(), f"rows independent: {independent[self.rows_independent]}"]
        lists = self.state_written, self.inputs_written, self.output_aliases
        titles = "writes its own state", "writes its inputs", "outputs that alias"
        lines += [f"{title}: {', '.join(names)}" for title, names in zip(titles, lists, strict=True) if names]
        if self.memory is not None:
            lines.append(str(self.memory))
        return "\n".join(lines)

    def _capture_lines(self) -> list[str]:
        if self.capturable:
            return ["capturable: yes" + (", as one full graph: use mode='FULL'" if self.breaks else "")]
        if not self.breaks:
            return [f"capturable: no\n  {self.problem}"]
        if self.piecewise is not None:
            return [f"capturable: no\n  {self.problem}", f"  not piecewise either: {self.piecewise}"]
        guilty = {name: problem for name, problem in self.breaks.items() if problem is not None}
        lines = ["capturable: piecewise, not as one full graph"]
        lines += [f"  {name} must stay an eager break: {_without_advice(problem)}" for name, problem in guilty.items()]
        lines += [f"  {name} could be captured" for name in self.breaks if name not in guilty]
        return lines if guilty else [*lines, f"  all breaks together: {self.problem}"]


def check(
    module: nn.Module,
    *args: Any,
    others: Sequence[tuple[Any, ...]] = (),
    before: Callable[[int], object] | None = None,
    batch_dims: Mapping[str, Any] | None = None,
    capture_sizes: Collection[int] | None = None,
    **kwargs: Any,
) -> CheckReport:
    """Try if a module can be captured, in one graph or in pieces, and if padding would change its outputs.

    It runs the forward several times eagerly (as called, padded with four different contents, and on half of the rows;
    the same with copies of the first row), captures it, and compares replays with eager on new inputs. If a module with
    eager breaks cannot be one full graph, each break is tried inline separately, to name those that prevent it. The
    module's state and the default random generator are restored afterwards; memory that breaks write elsewhere (a KV
    cache in a context) is not.

        report = sg.check(model, input_ids, positions)
        print(report)

    Args:
        module: the module, in evaluation mode, with its breaks marked.
        *args: example inputs, with a batch size that no other dimension has. The batch is dimension 0 of the first
            tensor unless `batch_dims` says otherwise.
        others: further batches, each a tuple of positional arguments, such as sequences of other lengths. Batches of
            the same shapes share a graph, and replays are compared on each of them.
        before: called with the batch's number (0 for `args`) before each of its runs and replays; it can set metadata
            that breaks read.
        batch_dims: batch dimensions by argument name, as in `CudaGraphConfig`.
        capture_sizes: batch sizes whose graphs' memory is to be measured, by capturing them.
        **kwargs: example inputs passed by keyword, for every batch.

    Raises:
        InputError: `module` is no module or in training mode, or these inputs cannot be bound to a graph.
        CaptureError: `capture_sizes` was given, and one of the sizes cannot be captured.
    """
    if not isinstance(module, nn.Module):
        told = " A function tells by its graph_report() after a few calls." if callable(module) else ""
        raise InputError(f"check got a {type(module).__name__}; expected a torch.nn.Module instance first.{told}")
    if module.training:
        raise InputError("the module is in training mode; call .eval() before check.")
    if not all(isinstance(other, tuple) for other in others):
        raise InputError("check got others that are not tuples of positional arguments, such as [(x2,), (x3,)].")
    config = CudaGraphConfig(
        batch_dims=batch_dims or {},
        on_capture_failure="raise",
        verify=0,  # a trial compares replays itself
        progress=False,
    )
    wrapped = functools.partial(wrap, module, config)
    with torch.no_grad():
        trials: list[ModuleTrial] = []
        for number, batch in enumerate([args, *others]):
            if not any(trial.add_batch(number, batch, kwargs) for trial in trials):
                trials.append(ModuleTrial(module, batch, kwargs, config, wrapped, before or bool, number))
        return _report(trials, capture_sizes)


def _report(trials: Sequence[ModuleTrial], capture_sizes: Collection[int] | None) -> CheckReport:
    first = trials[0]
    # Measure memory first: the first capture also allocates what libraries keep for the capture stream.
    memory = None if capture_sizes is None else first.memory(capture_sizes)
    mixing = first.mixing()
    for trial in trials[1:] if mixing == "" else ():
        mixing = trial.mixing() or mixing
    problem = _problem(trials)
    functions = list(dict.fromkeys(function for trial in trials for function in trial.breaks))
    piecewise = _problem(trials, "PIECEWISE") if functions else problem
    breaks: dict[str, str | None] = {name_of(function): None for function in functions}
    if problem is not None and piecewise is None:
        breaks = {name_of(function): _problem(trials, "PIECEWISE", [function]) for function in functions}
    return CheckReport(
        problem is None,
        problem,
        breaks,
        piecewise,
        None if mixing is None else mixing == "",
        mixing or None,
        first.state_written,
        first.inputs_written,
        first.output_aliases,
        memory,
    )


def _without_advice(problem: str) -> str:
    """Leave out how to do what is done: these are breaks already."""
    return "\n".join(line for line in problem.splitlines() if BREAK not in line)


def _problem(trials: Sequence[ModuleTrial], mode: str = "FULL", inlined: Collection[Any] = ()) -> str | None:
    """Return the first problem that any of the batches has; None if there is none."""
    found = (trial.problem(mode, inlined) for trial in trials)
    return next((problem for problem in found if problem is not None), None)
