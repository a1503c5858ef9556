"""transformers' `generate` through graphs beside plain and compiled; all figures are in extra_info.

`BENCH_FAMILIES` and `BENCH_GENERATE_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bench.tools.environment import chosen
from bench.transformers_generate import generation


def test_transformers_generate(benchmark: Any, device: torch.device) -> None:
    figures: generation.Figures = {}
    changes = chosen(models="BENCH_FAMILIES", arms="BENCH_GENERATE_ARMS", processes="BENCH_PROCESSES")
    plan = dataclasses.replace(generation.default_plan(device), **changes)
    benchmark.pedantic(lambda: figures.update(generation.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(generation.render(figures))
    assert not generation.failures(figures)
