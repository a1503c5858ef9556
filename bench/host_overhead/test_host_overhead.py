"""Seconds that a call costs the host, and a bare replay; a call's do not grow with the captured sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from bench.host_overhead import calls
from bench.tools.measure import Figures, device_of, say
from bench.tools.tables import grid
from simplegraph.batch.sizes import default_sizes

SIZES = {"1 size": [calls.SIZE], "51 sizes": default_sizes(512)}
CALLS = ("in place", "copied", "eager", "refused", *(("bare",) if device_of().type == "cuda" else ()))


def measure(device: torch.device) -> Figures:
    rounds = calls.ROUNDS[device.type]
    samples = {name: calls.sampled(device, sizes, rounds, say) for name, sizes in SIZES.items()}
    medians = {name: found.medians() for name, found in samples.items()}
    return {"medians_us": medians, "seconds": {name: found.seconds for name, found in samples.items()}}


def render(figures: Figures) -> str:
    medians = figures["medians_us"]
    rows = [(call, *(f"{found[call]:.2f}" for found in medians.values())) for call in medians["1 size"]]
    return grid([("call, us", *medians), *rows])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sizes", list(SIZES))
def test_host_overhead(sizes: str, call: str, figures: Figures, record_seconds: Callable[..., None]) -> None:
    record_seconds(figures["seconds"][sizes][call], {"microseconds": figures["medians_us"][sizes]})
