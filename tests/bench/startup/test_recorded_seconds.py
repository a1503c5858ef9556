"""pytest-benchmark shows the seconds that a fresh process measured, not those that the process took."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.tools import environment

pytest.importorskip("pytest_benchmark")
pytest.importorskip("transformers")

# In place of the processes: the arm that is ready first takes longest.
PLUGIN = """
import time
from bench.startup import runs, table

READY = {"eager": [0.5, 0.7], "simplegraph": [0.004, 0.002]}

def measure(run, plan, caches, progress=None):
    if run.arm not in READY:
        return {"arm": run.arm, "status": "not available", "error": f"{run.arm} needs a GPU"}
    time.sleep(0.3 if run.arm == "simplegraph" else 0.0)
    print(f"measured {run.arm}", flush=True)
    ready = READY[run.arm].pop(0)
    return {"arm": run.arm, "status": "ok", "device": "cpu", "seconds": {"first_output": ready, "ready": ready}}

runs.measure = measure
table.render = lambda results: "the table"
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The JSON of a run with measurements that are known, and what the run printed."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "measured_before.py").write_text(PLUGIN)
    line = [sys.executable, "-m", "pytest", "-p", "measured_before", "-p", "no:cacheprovider", "--benchmark-only"]
    line += ["bench/startup/test_startup.py", "--startup-arms", "eager,simplegraph,plain-loop", "--startup-rounds", "2"]
    line += ["--benchmark-json", str(folder / "figures.json")]
    paths = os.pathsep.join([str(folder), str(environment.ROOT)])
    done = subprocess.run(
        line, cwd=environment.ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    return folder / "figures.json", done.stdout + done.stderr


def test_the_time_of_a_round_is_what_its_process_reported(saved: tuple[Path, str]) -> None:
    path, printed = saved
    assert path.is_file(), printed
    found = {one["param"]: one for one in json.loads(path.read_text())["benchmarks"]}
    assert list(found) == ["eager", "simplegraph"], printed
    assert found["eager"]["stats"]["data"] == [0.5, 0.7]
    assert found["simplegraph"]["stats"]["data"] == [0.004, 0.002]
    assert found["simplegraph"]["extra_info"]["seconds"]["ready"] == 0.003
    assert found["simplegraph"]["options"]["timer"].endswith("reported_seconds")


def test_what_cannot_run_is_skipped_and_recorded_nowhere(saved: tuple[Path, str]) -> None:
    path, printed = saved
    assert "plain-loop needs a GPU" in printed
    assert "plain-loop" not in path.read_text()


def test_figures_are_shown_as_they_come(saved: tuple[Path, str]) -> None:
    assert saved[1].index("measured eager") < saved[1].index("measured simplegraph") < saved[1].index("Name (time")


def test_compare_ranks_the_arms_by_ready(saved: tuple[Path, str]) -> None:
    line = [sys.executable, "-m", "pytest_benchmark", "compare", str(saved[0]), "--sort=mean", "--columns=median,mean"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=saved[0].parent)
    ranked = [row.split()[0] for row in done.stdout.splitlines() if row.startswith("test_startup[")]
    assert [name.partition("[")[2].partition("]")[0] for name in ranked] == ["simplegraph", "eager"], done.stdout
