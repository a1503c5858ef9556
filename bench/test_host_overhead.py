"""Microseconds a call costs the host above a bare replay, and that they do not grow with the captured sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench import host_overhead
from simplegraph.batch.sizes import default_sizes

ROUNDS = {"cuda": 50, "cpu": 3}
SIZES = {"1 size": [host_overhead.SIZE], "51 sizes": default_sizes(512)}


@pytest.mark.parametrize("sizes", list(SIZES))
def test_host_overhead(sizes: str, benchmark: Any, device: torch.device) -> None:
    with torch.no_grad():
        samples = host_overhead.Samples(device, host_overhead.calls(device, SIZES[sizes]))
        samples.take()  # the first block warms up
        samples = host_overhead.Samples(device, samples.calls)
        benchmark.pedantic(samples.take, rounds=ROUNDS[device.type])
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update({"microseconds": samples.medians(), "graphs": graphs})
