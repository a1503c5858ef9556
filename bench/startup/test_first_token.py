"""From a process's start to its first token; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import torch

from bench.startup import first_token, runs


def test_first_token(benchmark: Any, device: torch.device, caches: runs.CompileCaches) -> None:
    on_gpu = device.type == "cuda"
    arms = [arm for arm in first_token.ARMS if on_gpu or arm not in first_token.NEEDS_GPU]
    figures: list[first_token.Figures] = []
    model = "8b" if on_gpu else "tiny"
    benchmark.pedantic(lambda: figures.extend(first_token.measure(arms, model, caches)), rounds=1)
    benchmark.extra_info["results"] = figures
    print(first_token.render(figures))
