"""The benchmark of advice, on the emulator: each program's first line, and the change that it names followed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributions import Distribution

from bench.advise import __main__ as bench
from bench.advise.__main__ import main
from bench.advise.programs import gain

CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_cuda_advise.py has the times")


def test_advice_is_followed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "advise.json"
    main(["--device", "cpu", "--rounds", "1", "--programs", "evaluation,ppo,engine", "--json", str(figures)])
    found = json.loads(figures.read_text())
    assert {"machine_info", "tolerance", "programs"} <= found.keys()
    rows = found["programs"]
    assert rows["evaluation"]["first"].startswith("`model` (programs.py:")
    assert rows["evaluation"]["called"] == "model"
    assert {"optimizer.step", "agent.get_action_and_value"} == {line.split("`")[1] for line in rows["ppo"]["lines"]}
    assert rows["engine"]["first"].startswith("graphs captured at ")
    assert all(rows[name]["measured"] > 0 for name in ("evaluation", "ppo"))
    assert "the first line" in capsys.readouterr().out


def test_plain_calls_check_arguments_of_distributions_and_followed_ones_do_not() -> None:
    checked: dict[str, list[bool]] = {"plain": [], "followed": []}
    calls = {name: lambda name=name: checked[name].append(Distribution._validate_args) for name in checked}
    before = Distribution._validate_args
    assert gain(calls["plain"], calls["followed"], CPU, 20).keys() == {"plain_ms", "followed_ms"}
    assert {name: set(seen) for name, seen in checked.items()} == {"plain": {True}, "followed": {False}}
    assert len(checked["plain"]) >= 20
    assert Distribution._validate_args == before


class Runs:
    """In place of processes: reports whose figures come from a list, and how many seconds a run takes."""

    def __init__(self, seconds: float, gains: list[float | None], plain_ms: list[float]) -> None:
        self.now, self.seconds, self.gains, self.plain_ms, self.names = 0.0, seconds, gains, plain_ms, list[str]()

    def perf_counter(self) -> float:
        return self.now

    def advise(self, name: str) -> dict[str, Any]:
        self.names.append(name)
        self.now += self.seconds
        trial = {"gain": self.gains[self.names.count(name) - 1], "eager_ms": 2.0, "graph_ms": 1.0}
        return {"lines": [f"`{name}`"], "watched": [{"name": "few", "trial": None}, {"name": name, "trial": trial}]}

    def call(self, function: object, name: str, *args: object, seconds: float) -> dict[str, float]:
        return {"plain_ms": self.plain_ms[self.names.count(name) - 1], "followed_ms": 1.0}


def _measured(runs: Runs, monkeypatch: pytest.MonkeyPatch, *programs: str) -> dict[str, Any]:
    monkeypatch.setattr(bench, "time", runs)
    monkeypatch.setattr(bench, "fresh", SimpleNamespace(call=runs.call))
    monkeypatch.setattr(bench, "advise", runs.advise)
    rows: dict[str, Any] = bench.measure(bench.AdvicePlan(programs, 8, 3), CPU)["programs"]
    return rows


def test_programs_take_turns_and_medians_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(10.0, [2.0, 4.4, 5.0], [4.0, 3.0, 9.0])
    rows = _measured(runs, monkeypatch, "ppo", "busy", "engine")
    assert runs.names == ["ppo", "busy", "engine", "ppo", "busy", "ppo", "busy"]
    row = rows["ppo"]
    assert (row["called"], row["told"], row["measured"], row["off"]) == ("ppo", 4.4, 4.0, pytest.approx(0.1))
    assert [(run["told"], run["measured"]) for run in row["runs"]] == [(2.0, 4.0), (4.4, 3.0), (5.0, 9.0)]
    assert "called" not in rows["engine"]


def test_a_gain_that_one_run_did_not_tell_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    row = _measured(Runs(10.0, [None, 4.0, 5.0], [4.0, 4.0, 4.0]), monkeypatch, "ppo")["ppo"]
    assert (row["told"], row["measured"]) == (4.5, 4.0)


def test_nothing_is_repeated_that_would_end_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = Runs(60.0, [2.0] * 3, [2.0] * 3)
    _measured(runs, monkeypatch, "ppo", "busy")
    assert runs.names == ["ppo", "busy", "ppo"]
