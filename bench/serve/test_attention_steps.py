"""Seconds of the attention of a decode step, in one full graph and eagerly; all figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.serve import attention_steps
from bench.serve.attention_steps import render
from bench.tools.measure import Figures, device_of

PLAN = attention_steps.default_plan(device_of())


@torch.inference_mode()
def measure(device: torch.device) -> Figures:
    return attention_steps.measure(PLAN, device)


__all__ = ["measure", "render"]


@pytest.mark.parametrize("way", ["graph", "eager"])
@pytest.mark.parametrize("batch", PLAN.batches)
@pytest.mark.parametrize("context", PLAN.contexts)
@pytest.mark.parametrize("backend", PLAN.backends)
def test_attention_steps(
    backend: str, context: int, batch: int, way: str, figures: Figures, record_seconds: Callable[..., None]
) -> None:
    if backend in figures["missing"]:
        pytest.skip(figures["missing"][backend])
    key = (backend, context, batch)
    row = next(row for row in figures["rows"] if (row["backend"], row["context"], row["batch"]) == key)
    record_seconds([row[f"{way}_ms"] / 1e3], row)
