"""Serves training steps like other calls; their replays leave gradients, too."""

from __future__ import annotations

from simplegraph.serve.builder import GraphBuilder
from simplegraph.serve.runner import GraphRunner
from simplegraph.training.step_effects import StepPlan


class StepBuilder(GraphBuilder):
    """Builds the graphs of a training step; see `GraphBuilder`."""

    plan_kind = StepPlan


class StepRunner(GraphRunner):
    """Serves training steps; see `GraphRunner`."""

    builder_kind = StepBuilder
