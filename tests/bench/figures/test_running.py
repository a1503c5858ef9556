"""Jobs end within their limits, what was measured stays, and a file says what it was measured with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from bench.figures import __main__ as command
from bench.figures import running
from bench.figures.jobs import JSON, Job
from bench.figures.running import CUT, DONE, FAILED, KNOWN, LACKS, LEFT_OUT, Outcome, Runner
from bench.tools import environment

pytest.importorskip("transformers", minversion="5.0")

WRITE = "import os, sys; open(sys.argv[1], 'w').write(os.environ['FIGURES'])"
# In place of python: measures nothing, but tells what it was asked for.
RECORDER = """#!/usr/bin/env bash
echo "$*; $CUDA_VISIBLE_DEVICES" >>{folder}/calls
echo "$FIGURES" >"${{@: -1}}"
[[ "$*" != *"--models llama"* ]]
"""


@pytest.fixture(autouse=True)
def _figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What jobs write: the description of this machine, which a process of its own takes long to find."""
    monkeypatch.setenv("FIGURES", json.dumps({"machine_info": environment.describe(), "results": {}}))


def job(file: str, code: str = WRITE, **settings: object) -> Job:
    return Job(file, ("-S", "-c", code, JSON), **settings)  # type: ignore[arg-type]


def run(
    folder: Path, *jobs: Job, total: float = 60.0, gpus: tuple[str, ...] = (), **settings: bool
) -> dict[str, Outcome]:
    told: list[Outcome] = []
    outcomes = Runner(folder, gpus, total, tell=told.append, **settings).run(jobs)
    assert sorted(map(str, told)) == sorted(map(str, outcomes))
    return {one.job.file: one for one in outcomes}


def test_what_is_measured_at_this_commit_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = job("deep/one")
    assert run(tmp_path, one)["deep/one"].status == DONE
    monkeypatch.setenv("FIGURES", json.dumps({"machine_info": environment.describe() | {"commit": "other"}}))
    assert run(tmp_path, one)["deep/one"].status == KNOWN
    assert run(tmp_path, one, again=True)["deep/one"].status == DONE
    assert run(tmp_path, one)["deep/one"].status == DONE  # that one was of another commit
    assert json.loads((tmp_path / "deep" / "one.json").read_text())["machine_info"]["commit"] == "other"


def test_a_job_that_is_cut_or_fails_keeps_its_figures_apart_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "LEAST", 0.1)
    note = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))"
    slow = job("slow", f"{WRITE}; {note}; import time; time.sleep(60)", seconds=1.0)
    bad = job("bad", f"{WRITE}; print('no luck'); sys.exit(3)")
    nothing = job("nothing", "pass")
    found = run(tmp_path, slow, bad, nothing, job("good"))
    statuses = {file: one.status for file, one in found.items()}
    assert statuses == {"slow": CUT, "bad": FAILED, "nothing": FAILED, "good": DONE}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
    assert "status 3" in found["bad"].detail
    assert "no luck" in found["bad"].detail
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["good.json"]
    assert sorted(path.name for path in (tmp_path / "partial").glob("*.json")) == ["bad.json", "slow.json"]


def test_a_file_that_does_not_say_what_it_was_measured_with_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = environment.describe()
    del machine["cuda"], machine["versions"]
    monkeypatch.setenv("FIGURES", json.dumps({"machine_info": machine}))
    found = run(tmp_path, job("one"))["one"]
    assert found.status == LACKS
    assert found.detail.startswith("no cuda, versions, versions.torch, ")


def test_what_cannot_run_here_is_left_out_with_its_reason(tmp_path: Path) -> None:
    found = run(tmp_path, job("two", gpus=2), gpus=("0",))["two"]
    assert found.status == LEFT_OUT
    assert found.detail == "it needs 2 GPUs, here are 1"
    late = run(tmp_path, job("late"), total=1.0)["late"]
    assert late.status == LEFT_OUT
    assert late.detail == "the time is over; the same command goes on with it"


def test_figures_are_measured_and_the_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.main([str(tmp_path), "--only", "h200_host_overhead"]) == 0
    assert "1/1 h200_host_overhead [host]: done, " in capsys.readouterr().out
    file = tmp_path / "h200_host_overhead.json"
    assert running.lacks(file) == ""
    assert json.loads(file.read_text())["medians_us"]["1 size"]["in place"] > 0


def test_every_model_is_measured_once_and_what_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(RECORDER.format(folder=tmp_path))
    python.chmod(0o755)
    monkeypatch.setattr(running, "PYTHON", str(python))
    for name, value in {"CUDA_VISIBLE_DEVICES": "1,3", "PATH": os.defpath}.items():
        monkeypatch.setenv(name, value)
    only = "generate_gpt2,generate_t5,generate_llama"
    assert command.main([str(tmp_path / "figures"), "--only", only]) == 1  # as that of `llama` is
    printed = capsys.readouterr().out
    assert "h200x4_models/generate_llama [families]: FAILED" in printed
    assert printed.count(": done") == 2
    calls = [line.split("; ") for line in (tmp_path / "calls").read_text().splitlines()]
    asked = {(call[0].split()[1], call[0].split()[3]) for call in calls}
    assert asked == {("bench.transformers_generate", name) for name in ("gpt2", "t5", "llama")}
    assert len(calls) == 3
    assert {call[1] for call in calls} == {"1"}


def test_files_of_several_commits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    for name in ("one", "two"):
        monkeypatch.setenv("FIGURES", json.dumps({"machine_info": {"commit": name}}))
        outcomes += run(tmp_path, job(name)).values()
    assert list(running.commits(outcomes, tmp_path)) == ["the files are of 2 commits: one, two"]
    assert sys.executable == running.PYTHON
