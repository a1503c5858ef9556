"""Seconds from token to token with and without speculation; what it gives and costs besides is in extra_info."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from bench.spec_decode import rounds
from bench.spec_decode.pairs import TRAINED, load_pair
from bench.tools.measure import Figures, device_of

PLAN = rounds.SpecPlan()
if device_of().type != "cuda":
    PLAN = dataclasses.replace(PLAN, batches=(1, 4), prompt=24, output=24, max_num_tokens=64, generations=1, steps=3)


def measure(device: torch.device) -> Figures:
    target, draft, real = load_pair("8b" if device.type == "cuda" else TRAINED, "eagle3", device)
    found = rounds.measure(dataclasses.replace(PLAN, mean_length=None if real else 2.4), target, draft)
    return {"results": found, "ratios": rounds.ratios(found)}


def render(figures: Figures) -> str:
    return rounds.render(figures["results"])


@pytest.mark.parametrize("batch", PLAN.batches)
@pytest.mark.parametrize("arm", list(rounds.ARMS))
def test_rounds(arm: str, batch: int, figures: Figures, record_seconds: Callable[..., None]) -> None:
    row = next(row for row in figures["results"] if (row["arm"], row["batch"]) == (arm, batch))
    record_seconds([row["tpot_ms"] / 1e3], row)
