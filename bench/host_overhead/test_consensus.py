"""Seconds that agreeing on a step's shape costs, the median step of the slowest of some ranks of this host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.host_overhead import consensus


@pytest.mark.parametrize("size", consensus.SIZES)
def test_consensus(size: int, shown: Any, record_seconds: Callable[..., None]) -> None:
    with shown():
        figures = consensus.measure(size)
        print(f"\n{consensus.render({size: figures})}")
    record_seconds([figures["median_us"] / 1e6], figures)
