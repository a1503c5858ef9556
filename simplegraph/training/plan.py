"""The replay path of a training step: a module's, with gradients and learning rates around it."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from simplegraph.base.nested import TreeSpec
from simplegraph.call.call import Call
from simplegraph.call.plan import Copies, Plan
from simplegraph.manager.table import CapturedGraph, ProgramTable
from simplegraph.training.effects import KEPT, StepEffects


class WithGradients(NamedTuple):
    """Holds what a captured step returns, and the gradients that it leaves, in the order of its parameters."""

    result: Any
    gradients: tuple[Any, ...]

    @staticmethod
    def make_plan(call: Call, table: ProgramTable, graph: CapturedGraph, *more: Any) -> Plan:
        """Make the plan by which calls like this are served; see `Plan`."""
        return StepPlan(call, table, graph, *more)


class StepPlan(Plan):
    """Serves training steps; see `Plan`."""

    def _prepare_outputs(self, call: Call, whole: Sequence[Any], spec: TreeSpec) -> None:
        self.step: StepEffects = call.module.step
        self._used = sorted(self.step.used)
        count = spec.children[0].num_leaves
        self._left = whole[count:]
        self._kept = [index for index, gradient in enumerate(self._left) if gradient is KEPT]
        self._known: Sequence[Any] = ()
        super()._prepare_outputs(call, whole[:count], spec.children[0])
        self.compared = [*self.outputs, *self._left]

    def whole(self, result: Any) -> Any:
        """Return eager's result, and the gradients that it left."""
        found = (parameter.grad for parameter in self.step.gradients.parameters)
        left = zip(found, self._left, strict=True)
        return WithGradients(super().whole(result), tuple(KEPT if then is KEPT else now for now, then in left))

    @contextlib.contextmanager
    def proving(self) -> Iterator[None]:
        """Let an eager run find the gradients where replays do."""
        self._enter()
        yield
        self.step.proven = not self.unproven

    def replay(self, leaves: Sequence[Any], copies: Copies) -> Any:
        step = self.step
        entry = step.gradients.entry
        known = self._known
        same = len(known) == len(entry) and all(map(operator.is_, entry, known))
        if not same:
            self._enter()
        step.optimizers.refresh(self.table.order_streams)
        result = super().replay(leaves, copies)
        if not same:
            self._leave()
        if step.proven:  # give back what the proof took, and eager's last gradients, among which it lies
            step.proven = False
            step.gradients.state()
            self.device.release_cached_memory()
        return result

    def _enter(self) -> None:
        """Bring the gradients that the graph reads, and those that its replay would overwrite, to their places."""
        self.table.order_streams()
        gradients = self.step.gradients
        gradients.enter(self._used)
        lost = []
        for index in self._kept:
            gradient = gradients.parameters[index].grad
            if gradient is not None and self.device.in_pool(self.pool, gradient):
                lost.append(index)
        gradients.enter(lost)

    def _leave(self) -> None:
        """Let every `.grad` be the graph's."""
        gradients = self.step.gradients
        found = []
        for parameter, left in zip(gradients.parameters, self._left, strict=True):
            gradient = parameter.grad
            if left is KEPT:
                found.append(gradient)
                continue
            if gradient is not left:
                parameter.grad = left
            found.append(parameter.grad)
        self._known = found
