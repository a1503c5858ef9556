"""Vision and diffusion models: eager, through graphs, compiled, make_graphed_callables; all figures in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench import models_first_call


def test_models(benchmark: Any, device: torch.device) -> None:
    figures: models_first_call.Figures = {}
    plan = models_first_call.default_plan(device)
    benchmark.pedantic(lambda: figures.update(models_first_call.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(models_first_call.render(figures))
