"""`python -m pytest bench/startup --benchmark-only`: every arm and start, in seconds that fresh processes measured."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bench.arms import ALONE, COMPILED
from bench.arms.base import NotAvailable
from bench.startup import merge, runs, starts
from bench.startup.starts import CLOCK, SECOND, Start, reported
from docs.tools import raw
from tests.docs.pages import ROOT

pytest.importorskip("pytest_benchmark", reason='pip install -e ".[bench]"')

COMMAND = ("bench/startup", "--benchmark-only")
SMALL = ("--smoke", "--layers", "1", "-p", "no:cacheprovider")


def started(*options: str) -> subprocess.Popen[str]:
    """Start the command of the README in a process of its own, without a GPU."""
    line = [sys.executable, "-m", "pytest", *COMMAND, *SMALL, *options]
    plain = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, cwd=ROOT, env={**os.environ, **plain}, **pipes)


def command(*options: str) -> subprocess.CompletedProcess[str]:
    """Run it to its end."""
    with started(*options) as process:
        out, errors = process.communicate(timeout=240)
    return subprocess.CompletedProcess(process.args, process.returncode, out, errors)


def test_the_readme_and_ci_run_the_command() -> None:
    line = f"python -m pytest {' '.join(COMMAND)}"
    assert line in (ROOT / "README.md").read_text(encoding="utf-8")
    assert line in (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    ci = ROOT / ".ci" / "run"
    if ci.is_file():  # an unpacked sdist has none
        assert line in ci.read_text(encoding="utf-8")


def test_every_arm_has_a_benchmark_for_each_of_its_starts() -> None:
    found = {f"{start.run.arm}-{start.name}" for start in starts.starts_of(runs.runs_of(ALONE))}
    first = {f"{arm}-first" for arm in ALONE if arm not in COMPILED}
    compiled = {f"{arm}-{cache}" for arm in COMPILED for cache in ("cold", "warm")}
    again = {"plain-loop", "lean-loop", "simplegraph", "simplegraph-piecewise"}
    again |= {"simplegraph-fused", "simplegraph-piecewise-fused"}
    assert found == first | compiled | {f"{arm}-{SECOND}" for arm in again}


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any], Path]:
    """What two rounds of two arms print and write on the emulator."""
    file = tmp_path_factory.mktemp("startup") / "startup.json"
    done = command("--arms", "eager,simplegraph", "--rounds", "2", "--benchmark-json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(file.read_text(encoding="utf-8")), file


@pytest.mark.timeout(300)
def test_the_command_collects_and_measures_every_start(measured: tuple[str, dict[str, Any], Path]) -> None:
    printed, figures, _ = measured
    names = [one["name"] for one in figures["benchmarks"]]
    assert names == [f"test_startup[{which}]" for which in ("eager-first", "simplegraph-first", "simplegraph-second")]
    assert all(name in printed for name in names)
    assert "3 passed" in printed


@pytest.mark.timeout(300)
def test_without_a_gpu_it_says_that_it_is_the_emulator(measured: tuple[str, dict[str, Any], Path]) -> None:
    printed, figures, _ = measured
    assert "Times are NOT speed" in printed
    assert "'first start: tiny, 3 sizes, emulator, no speed'" in printed
    assert "'second start: tiny, 3 sizes, emulator, no speed'" in printed
    assert figures["machine_info"]["gpu"] is None


@pytest.mark.timeout(300)
def test_a_round_is_a_fresh_process_and_lasts_what_that_process_measured(
    measured: tuple[str, dict[str, Any], Path],
) -> None:
    """The wall time of a process holds imports and weights, which every arm shares."""
    for one in measured[1]["benchmarks"]:
        info, stats = one["extra_info"], one["stats"]
        assert stats["data"] == pytest.approx([seconds["ready"] for seconds in info["rounds"]], rel=1e-9)
        assert (stats["rounds"], stats["iterations"]) == (2, 1)
        assert len({process["pid"] for process in info["processes"]} | {os.getpid()}) == 3
        assert stats["median"] == pytest.approx(statistics.median(stats["data"]))
        assert {"min", "max", "mean", "iqr"} <= set(stats)
        assert one["options"]["timer"] == "seconds_of_processes"
    first, second = (one["extra_info"] for one in measured[1]["benchmarks"][1:])
    # One process has both starts.
    assert [each["pid"] for each in first["processes"]] == [each["pid"] for each in second["processes"]]
    assert first["rounds"] != second["rounds"]


@pytest.mark.timeout(300)
def test_the_json_says_what_ran_and_where(measured: tuple[str, dict[str, Any], Path]) -> None:
    eager, first, second = (one["extra_info"] for one in measured[1]["benchmarks"])
    assert first["replays"] == first["steps"] > 2
    assert first["sizes"] == eager["sizes"] == [1, 2, 4]
    for info in (first, second):
        assert 0 < info["details"]["captures_alone_s"] < info["seconds"]["ready"]
        assert info["details"]["graph_bytes"] > 0
        assert info["environment"]["commit"] == measured[1]["machine_info"]["commit"] == "c0ffee"
        assert "torch" in info["environment"]["versions"]
        assert info["clock"] == starts.CLOCK_SAYS
    assert first["primed"]["seconds"] == second["seconds"]
    assert raw.commit(str(measured[2].with_suffix(""))) == "c0ffee"


@pytest.mark.timeout(300)
def test_starts_are_grouped_and_compared_with_earlier_ones(measured: tuple[str, dict[str, Any], Path]) -> None:
    done = command("--arms", "eager", "--benchmark-group-by", "param:start", f"--benchmark-compare={measured[2]}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "benchmark 'start=first': 2 tests" in done.stdout
    assert "NOW" in done.stdout
    assert "machine_info is different" not in done.stdout + done.stderr


@pytest.mark.timeout(300)
def test_documents_and_merged_calls_read_the_file(
    measured: tuple[str, dict[str, Any], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, merged = raw.startup(str(measured[2].with_suffix(""))), tmp_path / "merged.json"
    assert list(found) == ["eager", "simplegraph"]
    assert found["simplegraph"]["primed"]["seconds"]["ready"] > 0
    assert merge.main([str(merged), str(measured[2]), str(measured[2])]) == 0
    again = json.loads(merged.read_text(encoding="utf-8"))
    assert [one["stats"]["rounds"] for one in again["benchmarks"]] == [4, 4, 4]
    assert "Times are NOT speed" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_what_is_complete_when_a_run_is_interrupted_is_written(tmp_path: Path) -> None:
    """On a machine that is lent for minutes, a run that is cut must not lose all of them."""
    file = tmp_path / "cut.json"
    with started("-v", "--arms", "eager,simplegraph", "--rounds", "5", "--benchmark-json", str(file)) as process:
        assert process.stdout is not None
        while "eager-first] PASSED" not in process.stdout.readline():
            assert process.poll() is None
        time.sleep(1)  # into the rounds of the next benchmark
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    (one,) = json.loads(file.read_text(encoding="utf-8"))["benchmarks"]
    assert (one["param"], one["stats"]["rounds"]) == ("eager-first", 5)


def test_an_unknown_arm_is_refused_with_those_that_there_are() -> None:
    done = command("--arms", "eager,foo")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "argument --arms: 'foo' is none of eager, eager-dtensor, plain-loop, " in done.stderr
    assert "test_startup" not in done.stdout


def test_without_pytest_benchmark_it_skips_and_says_how_to_install_it() -> None:
    done = command("--arms", "eager,simplegraph", "-p", "no:benchmark")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "SKIPPED [3] bench/startup/test_startup.py" in done.stdout
    assert 'needs pytest-benchmark: pip install -e ".[bench]"' in done.stdout


def test_without_a_package_the_command_names_the_extra_that_brings_it() -> None:
    code = "import runpy, sys; sys.modules['safetensors'] = None; runpy.run_module('bench', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith('pip install -e ".[bench]"')


def test_an_arm_that_needs_a_gpu_is_skipped_with_the_reason() -> None:
    done = command("--arms", "lean-loop")
    assert "2 skipped" in done.stdout
    assert "a loop of torch.cuda.graph needs a GPU" in done.stdout


def result(ready: float, **more: Any) -> dict[str, Any]:
    return {"status": "ok", "pid": 1, "seconds": {"ready": ready}, **more}


def test_the_clock_stands_still_between_the_seconds_that_are_reported() -> None:
    before = CLOCK()
    CLOCK.advance(1.5)
    assert CLOCK() == before + 1.5
    assert CLOCK() == before + 1.5


def test_a_process_without_figures_is_no_round() -> None:
    """Its benchmark fails with the reason, or is skipped where it cannot run."""
    start = Start(runs.Run("simplegraph"), "first")
    with pytest.raises(NotAvailable, match="needs a GPU"):
        reported(start, {"status": "not available", "error": "it needs a GPU"})
    with pytest.raises(RuntimeError, match="no luck"):
        reported(start, {"status": "failed", "error": "RuntimeError: no luck"})
    second = reported(Start(runs.Run("simplegraph"), SECOND), result(2.0, primed={"seconds": {"ready": 1.0}}))
    assert second == {"status": "ok", "pid": 1, "seconds": {"ready": 1.0}}


def test_a_warm_start_alone_fills_its_cache_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def measure(run: runs.Run, *_: Any) -> dict[str, Any]:
        started.append(run.label)
        return result(1.0)

    monkeypatch.setattr(runs, "measure", measure)
    processes = runs.Processes(runs.StartupPlan("tiny", (1,)), runs.CompileCaches(tmp_path))
    warm = runs.Run("compiled-full", "warm")
    assert [processes.result(warm, number) for number in (0, 1, 1)] == [result(1.0)] * 3
    assert started == ["compiled-full (cold)", "compiled-full (warm)", "compiled-full (warm)"]
