"""Seconds of the engine's decode step, and of a token that it generates; all figures are in extra_info.

`BENCH_LAUNCHES` in the environment, such as 1,4,8, measures generations by graphs of as many tokens, too.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.serve import decode_steps
from bench.serve.decode_steps import render
from bench.tools.measure import Figures, device_of
from bench.tools.options import changed, from_environment, numbers

CHOSEN = {"launches": from_environment("BENCH_LAUNCHES", numbers)}
PLAN = changed(decode_steps.default_plan(device_of()), CHOSEN)
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
@pytest.mark.parametrize("tokens", PLAN.launches)
def test_generated_token(
    tokens: int, attention: str, batch: int, figures: Figures, record_seconds: Callable[..., None]
) -> None:
    key = (tokens, attention, batch)
    names = ("tokens_per_launch", "attention", "batch")
    row = next(row for row in figures["generation"] if tuple(row[name] for name in names) == key)
    record_seconds([row["ms_per_token"] / 1e3], row)
