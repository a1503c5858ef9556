"""What eager breaks cost, and mixed batches that only they can serve; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench.piecewise import breaks


def test_piecewise(benchmark: Any, device: torch.device) -> None:
    figures: breaks.Figures = {}
    plan = breaks.default_plan(device.type)
    benchmark.pedantic(lambda: figures.update(breaks.measure(plan)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(breaks.render(figures))
