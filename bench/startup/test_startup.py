"""Startup of every arm under pytest-benchmark, each round a fresh process: ``python -m pytest bench/startup``.

``pytest-benchmark compare`` then shows arms beside each other; `python -m bench` makes the project's own tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.arms import ALONE
from bench.startup import runs
from bench.startup.__main__ import default_plan
from bench.startup.processes import CompileCaches

PLAN = default_plan()


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> CompileCaches:
    return CompileCaches(Path(tmp_path_factory.mktemp("compile-caches")))


@pytest.mark.timeout(PLAN.timeout * 5)
@pytest.mark.parametrize("run", runs.runs_of(ALONE), ids=lambda run: run.label)
def test_startup(benchmark: Any, run: runs.Run, caches: CompileCaches) -> None:
    """Time one process of an arm, from its start to its end; the seconds until it is ready are in `extra_info`."""
    found = runs.unavailable(run.arm, PLAN)
    if found is not None:
        pytest.skip(found)
    result = benchmark.pedantic(runs.measure, args=(run, PLAN, caches), rounds=1, iterations=1)
    if result["status"] == "not available":
        pytest.skip(result["error"])
    assert result["status"] == "ok", result["error"]
    benchmark.group = "startup"
    benchmark.extra_info.update({"ready_s": result["seconds"]["ready"], "environment": result["environment"]})
    assert result["seconds"]["ready"] > 0
