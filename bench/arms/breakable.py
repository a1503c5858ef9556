"""The package breakable-cuda-graphs: one capture per size, split into segments by its `no_graph` functions."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.arms.base import NotAvailable, require_cuda
from bench.arms.plain_loop import Captured, PlainLoop
from bench.models import attention
from bench.models.workload import Batch
from bench.tools.measure import Timeline
from simplegraph.base.errors import install_command

PACKAGE = "breakable_cuda_graphs"


class Breakable(PlainLoop):
    """Follows its README's quick start: three warmups and a capture per size, attention in `no_graph`."""

    name = "breakable"
    warmups = 3
    shares_pool: ClassVar[bool] = False

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        require_cuda(device, PACKAGE)
        package()

    def start(self, first: Batch, timeline: Timeline) -> None:
        # A stub at capture, as the package offers it: the real attention would read slots that no kernel has
        # written yet, and an index out of range ends the process.
        unbroken = package().no_graph(attention.paged_attention, capture_stub=_nothing)
        with attention.routed(unbroken):
            super().start(first, timeline)
        self._check_broken()

    def _record(self, inputs: Batch, pool: Any) -> Captured:
        library = package()
        graph = library.BreakableCUDAGraph(pool if self.shares_pool else None)
        with library.breakable_graph(graph):
            output = self.setup.model(*inputs)
        return Captured(inputs, graph, output)

    def _check_broken(self) -> None:
        """Refuse graphs that contain the attention: the figures would be of another arm."""
        steps = {len(captured.graph._segments) for captured in self.captured.values()}
        expected = 2 * self.setup.segments - 1
        if steps != {expected}:
            raise RuntimeError(f"captures have {steps} steps; expected {expected}, a break between any two segments.")

    def details(self) -> dict[str, Any]:
        return super().details() | {"segments": [self.setup.segments]}


class BreakableLean(Breakable):
    """The leanest use that its README shows: one pool for all sizes, and one warmup."""

    name = "breakable-lean"
    warmups = 1
    shares_pool = True


def package() -> ModuleType:
    """Import the package.

    Raises:
        NotAvailable: it is not installed.
    """
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as error:
        needed = install_command("bench-gpu")
        raise NotAvailable(f"{PACKAGE} cannot be imported ({error}); to have it: {needed}") from None


def _nothing(*args: Tensor) -> None:
    """Replace attention while its neighbours are captured."""
