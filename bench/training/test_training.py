"""Training steps: milliseconds a step; all figures are in extra_info.

`BENCH_WORKLOADS` and `BENCH_TRAINING_ARMS` in the environment, separated by commas, choose workloads and arms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.tools.measure import Figures, device_of
from bench.tools.options import changed, from_environment, names
from bench.training import training_steps
from bench.training.requirements import describe, render
from bench.training.step_arms import ARMS
from bench.training.workloads import WORKLOADS

CHOSEN = {
    "workloads": from_environment("BENCH_WORKLOADS", names(WORKLOADS)),
    "arms": from_environment("BENCH_TRAINING_ARMS", names(ARMS)),
}
PLAN = changed(training_steps.default_plan(device_of()), CHOSEN)


def measure(device: torch.device) -> Figures:
    return training_steps.measure(PLAN, device)


__all__ = ["measure", "render"]


@pytest.mark.parametrize(("workload", "arm"), training_steps.pairs(PLAN))
def test_training(workload: str, arm: str, figures: Figures, record_seconds: Callable[..., None]) -> None:
    found = figures["workloads"][workload][arm]
    if "ms" not in found and not ("failed" in found and ARMS[arm].ours):
        pytest.skip(describe(found))
    assert "failed" not in found, found["failed"]
    record_seconds([found["ms"] / 1e3], found)
