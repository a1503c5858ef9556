"""Serves the calls of a module wrapped for training: those under grad mode by pairs of graphs, all others as ever."""

from __future__ import annotations

from typing import Any

import torch

from simplegraph.base.config import CudaGraphConfig, CudaGraphMode
from simplegraph.base.context import CALLS
from simplegraph.base.errors import ConfigError
from simplegraph.base.reasons import CannotBind
from simplegraph.device.protocol import GraphPool
from simplegraph.distributed.ranks import RankGroup
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.report import GraphReport
from simplegraph.serve.replay import MISS
from simplegraph.serve.runner import GraphRunner
from simplegraph.training.calls import TrainingCalls

_grad_enabled = torch.is_grad_enabled  # looked up once


class TrainingRunner(GraphRunner):
    """The graphs of a module wrapped with ``training=True``."""

    def _use(
        self, settings: CudaGraphConfig, config: CudaGraphConfig, pool: GraphPool | None, ranks: RankGroup | None
    ) -> None:
        if ranks is not None:
            raise ConfigError("training=True does not go with ranks: training graphs are captured by each rank alone.")
        super()._use(settings, config, pool, ranks)
        self._training = TrainingCalls(config, self._known, self._new_manager)
        self._graphs_training = config.training and config.mode is not CudaGraphMode.NONE

    def _new_manager(self, device: torch.device) -> CudaGraphManager:
        # Not in the wrapper's pool: a forward's memory must last until its backward, whatever runs between.
        config = self.config.replace(progress=False)
        return CudaGraphManager(config, device=device, requests=False, stats=self.stats)

    def call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve one call."""
        context = CALLS.context
        if not self._graphs_training or not _grad_enabled() or (context is not None and context.bypass is not None):
            return super().call(module, args, kwargs)
        try:
            result = self._training.call(module, args, kwargs)
        except CannotBind as error:
            return self.run_eagerly(module, args, kwargs, error.reason, error.detail, error.size)
        return super().call(module, args, kwargs) if result is MISS else result

    def report(self) -> GraphReport:
        """See `CudaGraphWrapper.graph_report`."""
        known = self.manager or self._training.manager
        return super().report() if known is None else known.report()

    def reset(self, what: str = "reset_graphs") -> None:
        """Drop all graphs; see `GraphRunner.reset`."""
        super().reset(what)
        self._training.reset()
