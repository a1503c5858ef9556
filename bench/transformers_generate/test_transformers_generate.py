"""transformers' `generate` through graphs beside plain and compiled; all figures are in extra_info.

`BENCH_FAMILIES` and `BENCH_GENERATE_ARMS` in the environment, separated by commas, choose models and arms;
`BENCH_PROCESSES` is how many of each arm.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from bench.tools.options import chosen
from bench.transformers_generate import generation


def test_transformers_generate(record: Callable[..., Any], device: torch.device) -> None:
    changes = chosen(models="BENCH_FAMILIES", arms="BENCH_GENERATE_ARMS", processes="BENCH_PROCESSES")
    plan = dataclasses.replace(generation.default_plan(device), **changes)
    assert not generation.failures(record(lambda: generation.measure(plan, device), generation.render))
