"""The unchanged model, on plain tensors or on DTensors."""

from __future__ import annotations

from torch import Tensor

from bench.arms.base import Arm, OnDTensors, rows
from bench.models.llama import Llama
from bench.models.workload import Batch
from bench.tools.measure import Timeline


class Eager(Arm):
    """Nothing captured, nothing compiled; every size has run once when it is ready."""

    name = "eager"

    @property
    def model(self) -> Llama:
        """The model that runs."""
        return self.setup.model

    def start(self, first: Batch, timeline: Timeline) -> None:
        self(*first)
        timeline.mark("first_output")
        for size in self.setup.sizes:
            self(*rows(self.setup.largest, size))
        timeline.mark("ready")

    def __call__(self, *batch: Tensor) -> Tensor:
        return self.model(*batch)


class EagerDTensors(OnDTensors, Eager):
    """As `Eager`, on DTensors."""

    name = "eager-dtensor"
