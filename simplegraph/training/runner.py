"""Serves the calls of a module wrapped for training: those under grad mode by pairs of graphs, all others as ever."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphConfig, CudaGraphMode
from simplegraph.base.context import CALLS
from simplegraph.base.errors import ConfigError
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.batch.dispatch import Dispatch
from simplegraph.call.call import Call, invoke
from simplegraph.device.protocol import GraphPool
from simplegraph.distributed.ranks import RankGroup
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats
from simplegraph.serve.runner import GraphRunner
from simplegraph.training.builder import PairBuilder
from simplegraph.training.notes import refuse_hooks
from simplegraph.training.proof import PairProof

_grad_enabled = torch.is_grad_enabled  # looked up once


class NothingToDifferentiate(Exception):
    """Nothing in a call wants gradients; internal."""


class PairRunner(GraphRunner):
    """The pairs of one module in one mode, training or not, each for the exact shapes of its calls.

    They are in no pool of others: a forward's memory must last until its backward, whatever runs between.

    Args:
        config: of the wrapper; stats: its counters.
    """

    trains = True
    builder_kind = PairBuilder

    def __init__(self, config: CudaGraphConfig, stats: GraphStats) -> None:
        exact = {"mode": CudaGraphMode.FULL, "exact_shapes": True, "lengths": None, "length_dims": {}}
        super().__init__(config.replace(**exact, progress=False), stats=stats)

    def _gradients(self, builder: Any, module: Any, leaves: Sequence[Any]) -> Hashable:
        """Describe what wants gradients; autocast's cache of casts is part of a backward, too."""
        if not builder.seen.read.wants_grad(module, leaves):
            raise NothingToDifferentiate
        refuse_hooks(module)
        wanting = tuple(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)
        return wanting, builder.leaves_of(module).wanting_names, torch.is_autocast_cache_enabled()

    def _serve(self, builder: Any, call: Call) -> Any:
        """Run a call that a pair could serve, taking the next step towards it where there is none."""
        self._drop_if_stale(builder)
        sized = [at for at, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor) and leaf.dim()]
        rows = call.leaves[sized[0]].shape[0] if sized else 1
        if rows == 0:
            shape = tuple(call.leaves[sized[0]].shape)
            raise CannotBind(Reason.EMPTY_BATCH, f"{call.names[sized[0]]} has shape {shape}")
        dispatch = Dispatch(CudaGraphMode.FULL, BatchDescriptor(rows), Reason.EXACT, 0)
        call = call._replace(batch=rows, dispatch=dispatch)
        table, binding, notes = builder.manager.table, call.binding, builder.notes(call)
        table.order_streams()
        if (refused := builder.refused.get(builder.key(call))) is not None:
            raise refused.again()
        call.check()
        builder.seen.check(call)
        if notes.twice:
            raise CannotBind(Reason.UNTRAINABLE, "its backward is to be differentiated itself (create_graph=True)")
        if not binding.called or builder.needs_warmup(call):
            return builder.run_as_called(call, Reason.WARMUP if binding.called else Reason.FIRST_CALL)
        if self.config.capture == "upfront":
            raise CannotBind(Reason.NOT_CAPTURED_UPFRONT, "training graphs are captured by the calls that they serve")
        if notes.seen is None:
            self.stats.ran_eagerly(Reason.GRAD, "graphs are captured once a backward of such a call was seen", rows)
            result = invoke(call.module, call.args, call.kwargs)
            builder.watch(call, result)
            return result
        if builder.last.pending:  # a capture would write over what it needs
            raise CannotBind(Reason.BACKWARD_PENDING, "")
        if builder.key(call) not in builder.pairs:  # the replays of this very call do not pay for the capture
            self._served_before = self.stats.replays + 2
        plan = builder.plan(call)
        copies = plan.copies(call.leaves)
        if plan.unproven:
            return plan.serve(PairProof(plan, builder, call), call.leaves)
        return plan.replay(call.leaves, copies)


class TrainingRunner(GraphRunner):
    """The graphs of a module wrapped with ``training=True``."""

    def _use(
        self, settings: CudaGraphConfig, config: CudaGraphConfig, pool: GraphPool | None, ranks: RankGroup | None
    ) -> None:
        if ranks is not None:
            raise ConfigError("training=True does not go with ranks: training graphs are captured by each rank alone.")
        super()._use(settings, config, pool, ranks)
        self._pairs = {mode: PairRunner(config, self.stats) for mode in (False, True)}
        self._graphs_training = config.training and config.mode is not CudaGraphMode.NONE

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call."""
        context = CALLS.context
        if self._graphs_training and _grad_enabled() and (context is None or context.bypass is None):
            try:
                return self._pairs[module.training].call(module, args, kwargs)
            except NothingToDifferentiate:
                return super().call(module, args, kwargs)
        return super().call(module, args, kwargs)

    @property
    def builders(self) -> list[Any]:
        return [*super().builders, *(builder for pairs in self._pairs.values() for builder in pairs.builders)]

    def report(self) -> GraphReport:
        """See `CudaGraphWrapper.graph_report`."""
        used = next((builder.manager for builder in self.builders), None)
        return super().report() if used is None else used.report()

    def reset(self, what: str = "reset_graphs") -> None:
        """Drop all graphs; see `GraphRunner.reset`."""
        super().reset(what)
        for pairs in self._pairs.values():
            pairs.reset(what)
