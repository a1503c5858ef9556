"""This library: one graph per size, captured up front or at the first calls of each size."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from bench.arms.base import Arm, NotAvailable, OnDTensors, Setup, require_cuda, rows
from bench.models import attention
from bench.models.fused import fused
from bench.models.llama import Llama
from bench.models.workload import INPUT_NAMES, PAD_VALUES, Batch
from bench.tools.measure import Timeline
from bench.tools.replays import Replays
from simplegraph import wrap  # by name: the library loads here, not under the clock


class Upfront(Arm):
    """All sizes captured in one session, before the first output."""

    name = "simplegraph"
    capture: ClassVar[str] = "upfront"
    mode: ClassVar[str] = "FULL"
    verify: ClassVar[int] = 1
    restartable = True

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._summary: Any = None
        self._variant = contextlib.ExitStack()
        self.graphed = wrap(
            self.model,
            mode=self.mode,
            capture_sizes=setup.sizes,
            capture=self.capture,
            outputs="static",
            batch_dims=dict.fromkeys(INPUT_NAMES, 0),
            pad_values=PAD_VALUES,
            on_capture_failure="raise",
            progress=False,
            verify=self.verify,
            ranks=setup.ranks,
        )

    @property
    def model(self) -> Llama:
        """The model that is captured."""
        return self.setup.model

    @contextlib.contextmanager
    def variant(self) -> Iterator[None]:
        """Context in which the model's variant is set."""
        yield

    def start(self, first: Batch, timeline: Timeline) -> None:
        self._variant.enter_context(self.variant())  # for good: graphs serve the model as it was at their capture
        self._start(first, timeline)
        self.replays = Replays(self.graphed, name=self.name)

    def _start(self, first: Batch, timeline: Timeline) -> None:
        self._summary = self.graphed.capture_graphs(*self.setup.largest)
        timeline.mark("ready")
        self(*first)
        timeline.mark("first_output")
        self._check_captured()

    def __call__(self, *batch: Tensor) -> Tensor:
        return self.graphed(*batch)

    def graphs(self) -> str:
        if not self.replays.replays:
            return "none"
        return "CUDA graphs" if self.setup.device.type == "cuda" else "emulator"

    def details(self) -> dict[str, Any]:
        stats = self.graphed.graph_stats
        counted = {"captures": stats.captures, "graph_bytes": stats.graph_bytes}
        summary = self._summary
        return counted | ({} if summary is None else _of_captures(summary))

    def _check_captured(self) -> None:
        """Refuse sizes that run eagerly: their figures would be of another arm."""
        captures, sizes = self.graphed.graph_stats.captures, len(self.setup.sizes)
        if captures != sizes:
            raise RuntimeError(f"{captures} of {sizes} sizes were captured:\n{self.graphed.graph_report()}")


class Lazy(Upfront):
    """Each size is captured after its first call; ready when every size was called often enough."""

    name = "simplegraph-lazy"
    capture = "lazy"
    restartable = False

    def _start(self, first: Batch, timeline: Timeline) -> None:
        self(*first)
        timeline.mark("first_output")
        for size in self.setup.sizes:
            self._call_until_captured(rows(self.setup.largest, size))
        timeline.mark("ready")
        self._check_captured()

    def _call_until_captured(self, batch: Batch) -> None:
        """Call a size until it is captured: once to warm up, and a second time if the size needs another."""
        for _ in range(2):
            captures = self.graphed.graph_stats.captures
            self(*batch)
            if self.graphed.graph_stats.captures > captures:
                return


class DTensors(OnDTensors, Upfront):
    """As `Upfront`, on DTensors."""

    name = "simplegraph-dtensor"


class Piecewise(Upfront):
    """As `Upfront`, but every attention runs eagerly between two graphs, split by the operator's tag."""

    name = "simplegraph-piecewise"
    mode = "PIECEWISE"
    verify = 0  # the model is this variant while it is captured alone, so no later eager call could be compared

    @contextlib.contextmanager
    def variant(self) -> Iterator[None]:
        # Eager arms call the operator's Python function, which is cheaper; the tag needs a call of the operator.
        with attention.routed(torch.ops.bench.paged_attention.default):
            yield

    def details(self) -> dict[str, Any]:
        segments = {graph.segments for graph in self.graphed.graph_stats.graphs.values()}
        return super().details() | {"segments": sorted(segments)}

    def _check_captured(self) -> None:
        super()._check_captured()
        expected = self.setup.segments
        wrong = [g for g in self.graphed.graph_stats.graphs.values() if g.segments != expected]
        if wrong:
            raise RuntimeError(
                f"{wrong[0].label} was captured as {wrong[0].segments} segments; expected {expected}, one before, "
                f"between and after its eager attention calls. {len(wrong)} graphs are like this."
            )


class _Fused(Upfront):
    """Layers of fused operators, which round in another order than the plain ones."""

    exact = False
    verify = 0  # as `Piecewise`

    @classmethod
    def check_available(cls, device: torch.device) -> None:
        require_cuda(device, "Triton's kernels")

    @classmethod
    def load(cls, setup: Setup) -> None:
        """Compile the kernels that are not in Triton's cache yet.

        Raises:
            NotAvailable: they do not run here.
        """
        with fused(setup.model) as operators:
            if not operators.triton:
                raise NotAvailable("Triton's kernels do not run on this machine; the log says why.")
            setup.model(*setup.batch(1))

    def __init__(self, setup: Setup) -> None:
        # The layers are fused in a copy on the same weights, so that eager's are not.
        held = (*setup.model.parameters(), *setup.model.buffers())
        copied = copy.deepcopy(setup.model, {id(tensor): tensor for tensor in held})
        super().__init__(dataclasses.replace(setup, model=copied))

    @contextlib.contextmanager
    def variant(self) -> Iterator[None]:
        with fused(self.setup.model), super().variant():
            yield


class Fused(_Fused):
    """As `Upfront`, with fused layers."""

    name = "simplegraph-fused"


class PiecewiseFused(_Fused, Piecewise):
    """As `Piecewise`, with fused layers."""

    name = "simplegraph-piecewise-fused"


def _of_captures(summary: Any) -> dict[str, Any]:
    parts = dict(summary.parts)
    return {
        "capture_s": summary.seconds,
        "captures_alone_s": parts.get("capture", 0.0) + parts.get("instantiate", 0.0),
        "capture_bytes": summary.bytes,
        "parts_s": parts,
    }
