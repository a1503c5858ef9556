"""From a process's start to its first token; all figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable

import torch

from bench.startup import first_token
from bench.startup.processes import CompileCaches


def test_first_token(record: Callable[..., object], device: torch.device, caches: CompileCaches) -> None:
    arms, model = first_token.default_arms(device), "8b" if device.type == "cuda" else "tiny"
    record(
        lambda: {"results": first_token.measure(arms, model, caches)},
        lambda figures: first_token.render(figures["results"]),
    )
