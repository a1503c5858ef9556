"""Vision, diffusion and encoder models: eager, through graphs of several makers; all figures are in extra_info.

`BENCH_MODELS` and `BENCH_MODEL_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bench.models_first_call import first_call
from bench.tools.environment import chosen


def test_models(benchmark: Any, device: torch.device) -> None:
    figures: first_call.Figures = {}
    changes = chosen(models="BENCH_MODELS", arms="BENCH_MODEL_ARMS", processes="BENCH_PROCESSES")
    plan = dataclasses.replace(first_call.default_plan(device), **changes)
    benchmark.pedantic(lambda: figures.update(first_call.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(first_call.render(figures))
    assert not first_call.failures(figures)
