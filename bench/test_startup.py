"""How soon every arm is ready. A round is a whole process; the figures that count are in extra_info."""

from __future__ import annotations

from typing import Any

import pytest

from bench import startup


def test_startup(
    run: startup.Run,
    benchmark: Any,
    plan: startup.Plan,
    caches: startup.CompileCaches,
    ledger: dict[str, startup.Result],
) -> None:
    results: list[startup.Result] = []
    benchmark.pedantic(lambda: results.append(startup.measure(run, plan, caches)), rounds=plan.rounds_of(run))
    result = ledger[run.label] = startup.combine(results)
    benchmark.extra_info.update(result)
    if result["status"] == "not available":
        pytest.skip(result["error"])
    assert result["status"] == "ok", result["error"]
