"""What speculative decoding gives and costs; all figures are in extra_info."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from bench.spec_decode import rounds
from bench.spec_decode.__main__ import TRAINED, models


def test_spec_steps(benchmark: Any, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    target, draft, real = models("8b" if on_gpu else TRAINED, "eagle3", device)
    plan = rounds.Plan(mean_length=None if real else 2.4)
    if not on_gpu:
        plan = dataclasses.replace(
            plan, batches=(1, 4), prompt=24, output=24, max_num_tokens=64, generations=1, steps=3
        )
    found: list[rounds.Figures] = []
    benchmark.pedantic(lambda: found.extend(rounds.measure(plan, target, draft)), rounds=1)
    graphs = "CUDA graphs" if on_gpu else "emulator: not speed"
    benchmark.extra_info.update({"results": found, "ratios": rounds.ratios(found), "graphs": graphs})
    print(rounds.render(found))
