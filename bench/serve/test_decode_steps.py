"""The engine's decode step and its milliseconds for a token; all figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.serve import decode_steps


def test_decode_steps(record: Callable[..., object], device: torch.device) -> None:
    plan = decode_steps.default_plan(device)
    record(lambda: decode_steps.measure(plan, device), decode_steps.render)
