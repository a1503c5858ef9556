"""Measures the time until a model is ready: ``python -m pytest bench/startup --benchmark-only``.

A benchmark is a start of an arm. Each round is a fresh process, and lasts the seconds that this process measured
itself, as `python -m bench` shows them.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.arms.base import NotAvailable
from bench.startup.runs import Processes, Result, Run
from bench.startup.starts import CLOCK, FIRST, SECOND, Start, extra_info, group, reported


@pytest.mark.benchmark(timer=CLOCK)
def test_startup(benchmark: Any, processes: Processes, arm: str, start: str) -> None:
    """Measure the seconds from the built model until every size is ready."""
    one = Start(Run(arm, None if start in (FIRST, SECOND) else start), start)
    numbers, results = itertools.count(), list[Result]()

    def process() -> None:
        result = reported(one, processes.result(one.run, next(numbers)))
        CLOCK.advance(result["seconds"]["ready"])
        results.append(result)

    benchmark.group = group(one, processes.plan)
    try:
        benchmark.pedantic(process, rounds=processes.plan.rounds_of(one.run), iterations=1)
    except NotAvailable as reason:
        pytest.skip(str(reason))
    except BaseException:
        benchmark.has_error = True  # else a benchmark that is interrupted has statistics of the rounds before, or none
        raise
    benchmark.extra_info.update(extra_info(one, results))
    assert results[0]["seconds"]["ready"] > 0
