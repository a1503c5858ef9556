"""Inductor's graph partition around attention, with the CUDA graphs of reduce-overhead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.arms.base import NotAvailable, require_cuda
from bench.arms.compiled import Compiling, without_guards
from bench.arms.static import fill, padded_size, rows
from bench.models.workload import Batch
from bench.tools.measure import Timeline

# Inductor runs a shape once to warm up, records it at the second call, replays it from the third on.
CALLS_TO_RECORD = 2


class InductorPartition(Compiling):
    """`torch.compile` with `graph_partition`; the attention operator's tag keeps it out of the graphs."""

    name = "inductor-partition"

    def compile(self, model: torch.nn.Module) -> Callable[..., Tensor]:
        options = {"graph_partition": True, "triton.cudagraphs": True, "guard_filter_fn": without_guards}
        return torch.compile(model, fullgraph=True, options=options)

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        require_cuda(device, "Inductor's graph partition with CUDA graphs")
        if not hasattr(torch.Tag, "cudagraph_unsafe"):
            raise NotAvailable("this torch has no cudagraph_unsafe tag to partition at")
        if not hasattr(torch._inductor.config, "graph_partition"):
            raise NotAvailable("this torch has no graph_partition")

    def start(self, first: Batch, timeline: Timeline) -> None:
        self.compile_and_run(first, timeline)
        for size in self.setup.sizes:
            for _ in range(CALLS_TO_RECORD):
                self.run(rows(self._static, size))
        timeline.mark("ready")
        self._check_recorded()

    def run(self, batch: Batch) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return super().run(batch)

    def _check_recorded(self) -> None:
        """Raise `NotAvailable` if Inductor recorded no graphs: the figures would be of another arm."""
        skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
        if skips:
            raise NotAvailable(f"Inductor skipped its CUDA graphs {skips} times (TORCH_LOGS=perf_hints says why)")

    def __call__(self, *batch: Tensor) -> Tensor:
        count = batch[0].shape[0]
        views = rows(self._static, padded_size(self._ascending, count))
        fill(views, batch)
        return self.run(views)[:count]

    def graphs(self) -> str:
        return "CUDA graphs"

    def details(self) -> dict[str, Any]:
        return {"cache": {k: v for k, v in torch._dynamo.utils.counters["inductor"].items() if "cache" in k}}
