"""Vision, diffusion and encoder models: eager, through graphs of several makers; all figures are in extra_info.

`BENCH_MODELS` and `BENCH_MODEL_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench.models_first_call import first_call
from bench.tools.options import chosen


def test_models(record: Callable[..., Any], device: torch.device) -> None:
    changes = chosen(models="BENCH_MODELS", arms="BENCH_MODEL_ARMS", processes="BENCH_PROCESSES")
    plan = dataclasses.replace(first_call.default_plan(device), **changes)
    assert not first_call.failures(record(lambda: first_call.measure(plan, device), first_call.render))
