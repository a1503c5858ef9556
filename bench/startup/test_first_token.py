"""Seconds from a process's start until every size is ready, caches cold and warm; all figures are in extra_info."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench.startup import first_token
from bench.startup.processes import CompileCaches
from bench.tools.measure import Figures, device_of


def measure(device: torch.device) -> Figures:
    model = "8b" if device.type == "cuda" else "tiny"
    with tempfile.TemporaryDirectory() as folder:
        arms = first_token.default_arms(device)
        return {"results": first_token.measure(arms, model, CompileCaches(Path(folder)))}


def render(figures: Figures) -> str:
    return first_token.render(figures["results"])


@pytest.mark.parametrize("cache", ["cold", "warm"])
@pytest.mark.parametrize("arm", first_token.default_arms(device_of()))
def test_first_token(arm: str, cache: str, figures: Figures, record_seconds: Callable[..., None]) -> None:
    found = next(one for one in figures["results"] if (one["arm"], one["cache"]) == (arm, cache))
    record_seconds([found["seconds"]["ready"]], found)
