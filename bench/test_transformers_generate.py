"""transformers' `generate` through graphs beside plain and compiled; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench import transformers_generate


def test_transformers_generate(benchmark: Any, device: torch.device) -> None:
    figures: transformers_generate.Figures = {}
    plan = transformers_generate.default_plan(device)
    benchmark.pedantic(lambda: figures.update(transformers_generate.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(transformers_generate.render(figures))
