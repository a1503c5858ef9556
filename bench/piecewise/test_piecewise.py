"""What eager breaks cost, and mixed batches that only they can serve; all figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.piecewise import breaks


def test_piecewise(record: Callable[..., object], device: torch.device) -> None:
    plan = breaks.default_plan(device.type)
    record(lambda: breaks.measure(plan), breaks.render)
