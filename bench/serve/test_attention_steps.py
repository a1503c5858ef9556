"""Attention of a decode step in one full graph against the same eagerly; all figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.serve import attention_steps


def test_attention_steps(record: Callable[..., object], device: torch.device) -> None:
    plan = attention_steps.default_plan(device)
    with torch.inference_mode():
        record(lambda: attention_steps.measure(plan, device), attention_steps.render)
