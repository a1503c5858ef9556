"""Seconds of a later start in each mode; what breaks cost, and mixed batches, are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.piecewise import breaks
from bench.piecewise.breaks import render
from bench.tools.measure import Figures


def measure(device: torch.device) -> Figures:
    return breaks.measure(breaks.default_plan(device.type))


__all__ = ["measure", "render"]


@pytest.mark.parametrize("mode", list(breaks.MODES))
def test_piecewise(mode: str, figures: Figures, record_seconds: Callable[..., None]) -> None:
    found = figures["starts"][mode]
    record_seconds([one["seconds"]["ready"] for one in found["every"][1:]], found)
