"""What speculative decoding gives and costs; all figures are in extra_info."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from bench.spec_decode import rounds
from bench.spec_decode.pairs import TRAINED, load_pair


def test_rounds(record: Callable[..., object], device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    target, draft, real = load_pair("8b" if on_gpu else TRAINED, "eagle3", device)
    plan = rounds.SpecPlan(mean_length=None if real else 2.4)
    if not on_gpu:
        plan = dataclasses.replace(
            plan, batches=(1, 4), prompt=24, output=24, max_num_tokens=64, generations=1, steps=3
        )

    def measure() -> rounds.Figures:
        found = rounds.measure(plan, target, draft)
        return {"results": found, "ratios": rounds.ratios(found)}

    record(measure, lambda figures: rounds.render(figures["results"]))
