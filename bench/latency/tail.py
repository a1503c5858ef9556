"""The slowest of many calls that are waited for: proofs as users have them, beside none, and beside eager."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.latency.arms import EAGER, OURS
from bench.tools.measure import Figures, synchronize
from bench.tools.replays import Replays, Served, timed
from bench.tools.tables import cell, grid

UNPROVEN = "verify=0"
QUANTILES = {"p50_us": 0.5, "p99_us": 0.99, "p999_us": 0.999, "max_us": 1.0}
BLOCK = 1000  # calls of an arm before another's turn
WARMUP = 5  # calls of a turn that are not timed, and ready an arm in its first one


def tails(module: nn.Module, batch: tuple[Tensor, ...], calls: int, device: torch.device) -> Figures:
    """Measure so many calls of each arm, in turns: quantiles in us, replays and proofs. Raises NotReplayed."""
    steps: dict[str, Any] = {EAGER: module, OURS: _wrapped(module, batch), UNPROVEN: _wrapped(module, batch, verify=0)}
    served = {arm: Served(lambda step=step: step(*batch), _replays(arm, step)) for arm, step in steps.items()}
    taken: dict[str, list[float]] = {arm: [] for arm in steps}
    while (left := calls - len(taken[EAGER])) > 0:
        for arm, call in served.items():
            for _ in range(WARMUP):
                call()
            synchronize(device)
            count = min(left, BLOCK)
            with timed(call, count) as bare:
                for _ in range(count):
                    began = time.perf_counter()
                    bare()
                    synchronize(device)
                    taken[arm].append(time.perf_counter() - began)
    expected, found = module(*batch).double(), {}
    for arm, step in steps.items():
        difference = float((step(*batch).double() - expected).norm() / expected.norm())
        found[arm] = {
            "calls": calls,
            **quantiles(taken[arm]),
            **served[arm].replays.figures(),
            "difference": difference,
        }
    return {"arms": found}


def _wrapped(module: nn.Module, batch: tuple[Tensor, ...], **settings: Any) -> Any:
    return sg.wrap(module, capture_sizes=[len(batch[0])], progress=False, **settings)


def _replays(arm: str, step: Any) -> Replays:
    return Replays(step, name=arm) if isinstance(step, sg.CudaGraphWrapper) else Replays()


def quantiles(seconds: list[float]) -> dict[str, float]:
    """Return `QUANTILES` in us, each the time of a call that was made."""
    ordered = sorted(seconds)
    return {name: ordered[min(int(share * len(ordered)), len(ordered) - 1)] * 1e6 for name, share in QUANTILES.items()}


def render(rows: Mapping[str, Figures]) -> str:
    """Format a line for each model and arm."""
    lines = [
        [f"{name}, {arm}", *(cell(each, key, ".1f") for key in QUANTILES), cell(each, "proofs", "d")]
        for name, row in rows.items()
        for arm, each in row["arms"].items()
    ]
    return grid([["waited for, us", "p50", "p99", "p99.9", "max", "proofs"], *lines])
