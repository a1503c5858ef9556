"""transformers' `generate` plain, compiled and through graphs: seconds of the first; the rest is in extra_info.

`BENCH_FAMILIES` and `BENCH_GENERATE_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.tools.measure import Figures, device_of
from bench.tools.options import changed, count, from_environment, names
from bench.transformers_generate import families, generation
from bench.transformers_generate.generation import render

CHOSEN = {
    "models": from_environment("BENCH_FAMILIES", names(families.FAMILIES)),
    "arms": from_environment("BENCH_GENERATE_ARMS", names(generation.ALL_ARMS)),
    "processes": from_environment("BENCH_PROCESSES", count),
}
PLAN = changed(generation.default_plan(device_of()), CHOSEN)


def measure(device: torch.device) -> Figures:
    return generation.measure(PLAN, device)


__all__ = ["measure", "render"]


@pytest.mark.parametrize("arm", PLAN.arms)
@pytest.mark.parametrize("model", PLAN.models)
def test_transformers_generate(model: str, arm: str, figures: Figures, record_seconds: Callable[..., None]) -> None:
    assert "failed" not in figures["models"][model], figures["models"][model]["failed"]
    found = figures["models"][model]["arms"][arm]
    if "skipped" in found:
        pytest.skip(found["skipped"])
    assert "failed" not in found, found["failed"]
    record_seconds([run["first_seconds"] for run in found["runs"]], found)
