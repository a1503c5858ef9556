"""Seconds of the engine's decode step, and of a token that it generates; all figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.serve import decode_steps
from bench.serve.decode_steps import render
from bench.tools.measure import Figures, device_of

PLAN = decode_steps.default_plan(device_of())
ARMS = [*(f"{name} {way}" for name in PLAN.attention for way in ("graph", "eager")), *PLAN.beside]


def measure(device: torch.device) -> Figures:
    return decode_steps.measure(PLAN, device)


__all__ = ["measure", "render"]


@pytest.mark.parametrize("batch", PLAN.batches)
@pytest.mark.parametrize("arm", ARMS)
def test_decode_steps(arm: str, batch: int, figures: Figures, record_seconds: Callable[..., None]) -> None:
    row = next(row for row in figures["decode"] if row["batch"] == batch)
    record_seconds([row["ms"][arm] / 1e3], {"ms": row["ms"][arm]})


@pytest.mark.parametrize("batch", PLAN.batches)
@pytest.mark.parametrize("attention", PLAN.attention)
def test_generated_token(attention: str, batch: int, figures: Figures, record_seconds: Callable[..., None]) -> None:
    key = (attention, batch)
    row = next(row for row in figures["generation"] if (row["attention"], row["batch"]) == key)
    record_seconds([row["ms_per_token"] / 1e3], row)
