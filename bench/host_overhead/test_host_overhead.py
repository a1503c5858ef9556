"""Microseconds a call costs the host above a bare replay, and that they do not grow with the captured sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.host_overhead import calls
from simplegraph.batch.sizes import default_sizes

SIZES = {"1 size": [calls.SIZE], "51 sizes": default_sizes(512)}


@pytest.mark.parametrize("sizes", list(SIZES))
def test_host_overhead(sizes: str, benchmark: Any, device: torch.device) -> None:
    with torch.no_grad():
        samples = calls.Samples(device, calls.calls(device, SIZES[sizes]))
        samples.take()  # the first block warms up
        samples = calls.Samples(device, samples.calls)
        benchmark.pedantic(samples.take, rounds=calls.ROUNDS[device.type])
    graphs = "CUDA graphs" if device.type == "cuda" else "emulator: not speed"
    benchmark.extra_info.update({"microseconds": samples.medians(), "graphs": graphs})
