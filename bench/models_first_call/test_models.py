"""Vision, diffusion and encoder models: seconds until a module is ready; all figures are in extra_info.

`BENCH_MODELS` and `BENCH_MODEL_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.models_first_call import first_call
from bench.models_first_call.first_call import render
from bench.models_first_call.model_arms import ARMS
from bench.models_first_call.zoo import available
from bench.tools.measure import Figures, device_of
from bench.tools.options import changed, count, from_environment, names

CHOSEN = {
    "models": from_environment("BENCH_MODELS", names(available())),
    "arms": from_environment("BENCH_MODEL_ARMS", names(ARMS)),
    "processes": from_environment("BENCH_PROCESSES", count),
}
PLAN = changed(first_call.default_plan(device_of()), CHOSEN)


def measure(device: torch.device) -> Figures:
    return first_call.measure(PLAN, device)


__all__ = ["measure", "render"]


@pytest.mark.parametrize("arm", PLAN.arms)
@pytest.mark.parametrize("model", PLAN.models)
def test_models(model: str, arm: str, figures: Figures, record_seconds: Callable[..., None]) -> None:
    found = figures["models"][model][arm]
    if "skipped" in found or ("failed" in found and not ARMS[arm].ours):
        pytest.skip(found.get("skipped") or found["failed"].splitlines()[-1])
    assert "failed" not in found, found["failed"]
    record_seconds([run["ready_seconds"] for run in found["runs"]], found)
