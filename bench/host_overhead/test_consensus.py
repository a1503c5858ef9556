"""Microseconds that agreeing on a step's shape costs, by ranks of this host; all figures are in extra_info."""

from __future__ import annotations

from typing import Any

import pytest

from bench.host_overhead import consensus


@pytest.mark.parametrize("size", consensus.SIZES)
def test_consensus(size: int, benchmark: Any) -> None:
    figures = benchmark.pedantic(consensus.measure, args=(size,), rounds=1)
    benchmark.extra_info.update(figures)
    print(consensus.render({size: figures}))
