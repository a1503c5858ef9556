"""The engine's decode step and its milliseconds for a token; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench import engine_steps


def test_engine_steps(benchmark: Any, device: torch.device) -> None:
    figures: engine_steps.Figures = {}
    plan = engine_steps.default_plan(device)
    benchmark.pedantic(lambda: figures.update(engine_steps.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(engine_steps.render(figures))
