"""Seconds until every arm is ready, as measured by its fresh processes; other figures are in extra_info."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bench.startup import runs
from bench.startup.processes import CompileCaches
from bench.startup.results import Result, combine


def test_startup(
    run: runs.Run,
    record_seconds: Callable[..., None],
    plan: runs.StartupPlan,
    caches: CompileCaches,
    ledger: dict[str, Result],
    shown: Any,
) -> None:
    with shown():
        results = runs.measure_rounds(run, plan, caches)
    result = ledger[run.label] = combine(results)
    if result["status"] == "not available":
        pytest.skip(result["error"])
    assert result["status"] == "ok", result["error"]
    record_seconds([one["seconds"]["ready"] for one in results], result)
