"""How soon every arm is ready. A round is a whole process; the figures that count are in extra_info."""

from __future__ import annotations

from typing import Any

import pytest

from bench.startup import runs
from bench.startup.processes import CompileCaches
from bench.startup.results import Result, combine


def test_startup(
    run: runs.Run,
    benchmark: Any,
    plan: runs.StartupPlan,
    caches: CompileCaches,
    ledger: dict[str, Result],
) -> None:
    results: list[Result] = []
    benchmark.pedantic(lambda: results.append(runs.measure(run, plan, caches)), rounds=plan.rounds_of(run))
    result = ledger[run.label] = combine(results)
    benchmark.extra_info.update(result)
    if result["status"] == "not available":
        pytest.skip(result["error"])
    assert result["status"] == "ok", result["error"]
