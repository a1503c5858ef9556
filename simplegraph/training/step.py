"""Whole training steps in one graph: forward, backward and optimizer, captured as one function."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, overload

import torch
from torch import nn, optim

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import ConfigError
from simplegraph.base.reasons import Reason
from simplegraph.fused.watched_steps import tell_written
from simplegraph.manager.manager import CudaGraphSettings, Unpack
from simplegraph.serve.builder import GraphBuilder
from simplegraph.serve.graphed_function import GraphedFunction, P, R, check_function
from simplegraph.serve.runner import GraphRunner
from simplegraph.serve.wrap import wrap
from simplegraph.training.optimizers import StepOptimizers
from simplegraph.training.step_effects import StepModule, StepPlan


class StepBuilder(GraphBuilder):
    """Builds the graphs of a training step, whose replays leave gradients, too."""

    plan_kind = StepPlan


class StepRunner(GraphRunner):
    """Serves training steps like other calls."""

    builder_kind = StepBuilder


class TrainStep(GraphedFunction[P, R]):
    """A training step that goes through graphs; made by `train_step`."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        optimizers = self._wrapped.step.optimizers
        if optimizers.refusal:
            optimizers.look()  # the refusal may not apply any more
        if optimizers.refusal:
            runner, why = self._wrapped._graph_runner, (Reason.UNTRAINABLE, optimizers.refusal)
            refused: R = runner.run_eagerly(self._wrapped, args, kwargs, *why)
            return refused
        try:
            return super().__call__(*args, **kwargs)
        finally:
            step = self._wrapped
            tell_written(itertools.chain(optimizers.parameters, step.parameters(), step.buffers()))

    def capture_graphs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to capture before a call: the runs before a capture would train on the example.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a training step captures nothing ahead: its first calls are real steps, and lead to graphs.")

    capture_next = capture_graphs

    def use_graph_pool(self, pool: Any) -> NoReturn:
        """Refuse to share the pool, since gradients lie there from one step to the next.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("a training step has a pool of its own, where gradients lie from one step to the next.")


@overload
def train_step(
    step_fn: Callable[P, R],
    *,
    optimizers: optim.Optimizer | Sequence[optim.Optimizer],
    scaler: Any = None,
    modules: nn.Module | Sequence[nn.Module] | None = None,
    **settings: Unpack[CudaGraphSettings],
) -> TrainStep[P, R]: ...
@overload
def train_step(
    step_fn: None = None,
    *,
    optimizers: optim.Optimizer | Sequence[optim.Optimizer],
    scaler: Any = None,
    modules: nn.Module | Sequence[nn.Module] | None = None,
    **settings: Unpack[CudaGraphSettings],
) -> Callable[[Callable[P, R]], TrainStep[P, R]]: ...
def train_step(
    step_fn: Any = None,
    *,
    optimizers: Any,
    scaler: Any = None,
    modules: Any = None,
    **settings: Any,
) -> Any:
    """Put a whole training step into one graph for each combination of input shapes; also as a decorator.

        step = train_step(step_fn, optimizers=optimizer)

    `step_fn` computes a loss from its arguments, calls ``backward``, and the optimizer. The first calls are ordinary
    steps, then one is captured, and the next ones replay it. Each call trains once. Its results are detached.

    Args:
        step_fn: the step; modules and tensors that it reaches through globals, its closure or its object are found.
        optimizers: every optimizer whose step it calls.
        scaler: the `torch.amp.GradScaler` that it calls.
        modules: the modules that it trains, if its code does not name them.
        **settings: fields of `CudaGraphConfig`; shapes are always exact. The first replay is compared with eager if it
            writes at most 1 GiB, or any amount if `verify` is set here.

    Raises:
        ConfigError: it is not a function, something is not an optimizer or scaler, or a setting is invalid.
        InputError: raised by a call if the step calls neither backward nor an optimizer.
    """
    if step_fn is None:
        options = {"optimizers": optimizers, "scaler": scaler, "modules": modules, **settings}
        return functools.partial(train_step, **options)
    check_function(step_fn, "train_step")
    if isinstance(modules, nn.Module):
        modules = [modules]
    for module in modules or ():
        if not isinstance(module, nn.Module):
            raise ConfigError(f"modules has {module!r}; expected a torch.nn.Module, or a list of them.")
    if not (scaler is None or isinstance(scaler, torch.amp.GradScaler)):
        raise ConfigError(f"scaler is {scaler!r}; expected the torch.amp.GradScaler that the step calls.")
    if settings.get("training"):
        raise ConfigError("train_step got training=True, which is for modules: wrap(module, training=True).")
    config = CudaGraphConfig().replace(**{**settings, "exact_shapes": True})
    made = StepModule(step_fn, StepOptimizers(optimizers), scaler, list(modules or ()))
    made.proves_any_size = settings.get("verify", 0) > 0
    return TrainStep(step_fn, wrap(made, config))
