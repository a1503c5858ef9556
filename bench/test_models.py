"""Vision, diffusion and encoder models: eager, through graphs, make_graphed_callables; all figures in extra_info.

`BENCH_MODELS` and `BENCH_MODEL_ARMS` in the environment, separated by commas, choose models and arms.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import torch

from bench import models_first_call


def test_models(benchmark: Any, device: torch.device) -> None:
    figures: models_first_call.Figures = {}
    chosen = {"models": os.environ.get("BENCH_MODELS"), "arms": os.environ.get("BENCH_MODEL_ARMS")}
    changes: dict[str, Any] = {name: tuple(text.split(",")) for name, text in chosen.items() if text}
    plan = dataclasses.replace(models_first_call.default_plan(device), **changes)
    benchmark.pedantic(lambda: figures.update(models_first_call.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(models_first_call.render(figures))
    assert not models_first_call.failures(figures)
