"""The engine's decode step and its milliseconds for a token; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench.serve import decode_steps


def test_engine_steps(benchmark: Any, device: torch.device) -> None:
    figures: decode_steps.Figures = {}
    plan = decode_steps.default_plan(device)
    benchmark.pedantic(lambda: figures.update(decode_steps.measure(plan, device)), rounds=1)
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update(figures | {"graphs": graphs})
    print(decode_steps.render(figures))
