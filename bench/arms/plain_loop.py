"""Plain loops of CUDA graphs: `torch.cuda.graph` with a warmup per size, as users write it today, and the leanest."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from bench.arms.base import Arm, Setup, fill, padded_size, require_cuda
from bench.models.workload import Batch
from bench.tools.lean_capture import LeanCapture
from bench.tools.measure import Timeline
from simplegraph.distributed.ranks import Stopwatch


class Captured(NamedTuple):
    """One size: its inputs, its graph, anything with `replay`, and the output that the graph writes."""

    inputs: Batch
    graph: Any
    output: Tensor


class PlainLoop(Arm):
    """Largest size first, one shared pool; each size has inputs and an output of its own."""

    name = "plain-loop"
    restartable = True
    warmups: ClassVar[int] = 1

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.captured: dict[int, Captured] = {}
        self.parts = Stopwatch()
        self._ascending = sorted(setup.sizes)

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        require_cuda(device, "a loop of torch.cuda.graph")

    def start(self, first: Batch, timeline: Timeline) -> None:
        # One side stream for all warmups: libraries keep a workspace for every stream they have run on.
        pool, side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        for size in self.setup.sizes:
            self.captured[size] = self._capture(size, pool, side)
        self._answer(first, timeline)

    def _answer(self, first: Batch, timeline: Timeline) -> None:
        timeline.mark("ready")
        self(*first)
        timeline.mark("first_output")

    def _capture(self, size: int, pool: Any, side: torch.cuda.Stream) -> Captured:
        """Capture one size as in the PyTorch notes on CUDA graphs: a warmup on a side stream, then the capture."""
        inputs = self._inputs(size)
        side.wait_stream(torch.cuda.current_stream())
        first = "first warmup" if not self.captured else "warmups"  # the first one sets up NCCL, where there are ranks
        with torch.cuda.stream(side), self.parts.timed(first):
            for _ in range(self.warmups):
                self.setup.model(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        with self.parts.timed("captures"):
            return self._record(inputs, pool)

    def _inputs(self, size: int) -> Batch:
        return tuple(tensor[:size].clone() for tensor in self.setup.largest)  # type: ignore[return-value]

    def _record(self, inputs: Batch, pool: Any) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            output = self.setup.model(*inputs)
        return Captured(inputs, graph, output)

    def __call__(self, *batch: Tensor) -> Tensor:
        count = batch[0].shape[0]
        captured = self.captured[padded_size(self._ascending, count)]
        fill(captured.inputs, batch)
        captured.graph.replay()
        return captured.output[:count]

    def graphs(self) -> str:
        return "CUDA graphs"

    def details(self) -> dict[str, Any]:
        return {"captures": len(self.captured), "parts_s": dict(self.parts)}


class LeanLoop(PlainLoop):
    """One warmup on the largest size, then bare captures in one session on the same stream, garbage collection off."""

    name = "lean-loop"

    def start(self, first: Batch, timeline: Timeline) -> None:
        lean = LeanCapture()
        with lean.on_stream(), self.parts.timed("first warmup"):
            self.setup.model(*self.setup.largest)
        with self.parts.timed("captures"), lean.session():
            for size in self.setup.sizes:
                inputs = self._inputs(size)
                self.captured[size] = Captured(inputs, *lean.capture(self.setup.model, *inputs))
        self._answer(first, timeline)
