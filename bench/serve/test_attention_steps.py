"""Attention of a decode step in one full graph against the same eagerly; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench.serve import attention_steps


def test_attention_steps(benchmark: Any, device: torch.device) -> None:
    figures: attention_steps.Figures = {}
    plan = attention_steps.default_plan(device)
    with torch.inference_mode():
        benchmark.pedantic(lambda: figures.update(attention_steps.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(attention_steps.render(figures))
