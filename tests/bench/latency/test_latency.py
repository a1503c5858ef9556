"""The benchmark of single calls: what is timed is served by graphs and right, and its goals are told where missed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from bench.latency import rows, tail
from bench.latency.arms import BARE, CALLABLES, EAGER, OPTIMIZED, OURS, STATIC, UNGUARDED, remove_guards
from bench.latency.models import MODELS, STEP, TEN, available
from bench.tools.measure import NOT_SPEED
from simplegraph.serve import call_proof

CPU = torch.device("cpu")
OWN = {OURS, STATIC, UNGUARDED, OPTIMIZED}


def test_a_smoke_times_replays_that_are_right_and_says_that_times_are_no_speed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "latency.json"
    rows.main(["--device", "cpu", "--smoke", "--guards", "--json", str(file)])
    found = json.loads(file.read_text())
    assert found["machine_info"]["commit"]
    arms = found["rows"][TEN]["arms"]
    assert {arm for arm, each in arms.items() if rows.WAITED in each} == OWN | {EAGER}
    assert all(arms[arm]["difference"] < 1e-6 for arm in OWN)
    assert arms[BARE] == {"skipped": "it needs a GPU"}
    guards = found["rows"][TEN]["guards"]
    assert (guards["dicts"], guards["tensors"]) == (24, 20)
    assert guards["reading_us"] > 0
    told = capsys.readouterr().out
    assert NOT_SPEED in told
    assert "goal_us" in told


@pytest.mark.parametrize("name", [name for name in MODELS if name in (*available(), STEP)])
def test_graphs_serve_every_model(name: str) -> None:
    plan = rows.LatencyPlan((name,), (EAGER, STATIC, UNGUARDED), rounds=1, calls=2, smoke=True)
    found = rows.measure(plan, CPU)
    assert rows.failures(found) == []
    assert found["rows"][name]["arms"][UNGUARDED][rows.ROW] > 0


@pytest.mark.proofs
def test_the_slowest_calls_are_told_with_the_proofs_among_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_proof, "_SHARE", 1.0)  # so that one falls due on a busy machine, too
    file = tmp_path / "tail.json"
    rows.main(["--device", "cpu", "--models", "ten-layers", "--smoke", "--tail", "5000", "--json", str(file)])
    arms = json.loads(file.read_text())["rows"][TEN]["arms"]
    assert set(arms) == {EAGER, OURS, tail.UNPROVEN}
    for figures in arms.values():
        assert 0 < figures["p50_us"] <= figures["p99_us"] <= figures["p999_us"] <= figures["max_us"]
        assert figures["difference"] < 1e-6
    assert arms[OURS]["steps"] == arms[tail.UNPROVEN]["replays"] == 5000
    assert arms[OURS]["proofs"] > 0 == arms[tail.UNPROVEN]["proofs"]
    assert f"{TEN}, {OURS}" in capsys.readouterr().out


def test_a_quantile_is_the_time_of_a_call() -> None:
    found = tail.quantiles([each / 1e6 for each in range(1000, 0, -1)])
    assert found == pytest.approx({"p50_us": 501, "p99_us": 991, "p999_us": 1000, "max_us": 1000})


def test_no_arm_pads_its_batch() -> None:
    plan = rows.LatencyPlan((TEN,), (OURS, STATIC, OPTIMIZED), rounds=1, calls=2, smoke=True)
    with torch.no_grad():
        module, batch = rows._built(TEN, True, CPU, torch.float32)
        steps: dict[str, Any] = dict(rows._ready(TEN, module, batch, plan, CPU, {}))
    assert len(steps) == 3
    assert all(step.graph_stats.replays and not step.graph_stats.padded_tokens for step in steps.values())


def test_calls_without_guards_do_not_look_and_those_of_another_wrapper_do() -> None:
    module, x = nn.Linear(4, 4).eval().requires_grad_(False), torch.ones(1, 4)
    wrapped, unguarded = (sg.wrap(module, capture_sizes=[1], outputs="static", progress=False) for _ in range(2))
    with pytest.raises(RuntimeError, match="found no guards"):
        remove_guards(unguarded)
    with torch.no_grad():
        for _ in range(rows.READY_CALLS):
            wrapped(x), unguarded(x)
        remove_guards(unguarded)
        before, kept = module(x), module.bias  # the unguarded graph reads its memory
        module.bias = nn.Parameter(torch.ones(4), requires_grad=False)
        assert torch.equal(unguarded(x), before)
        assert torch.equal(wrapped(x), module(x))
        assert not torch.equal(kept, module.bias)


def test_a_model_that_fails_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(MODELS, STEP, MODELS[TEN].__class__(lambda tiny: nn.Identity(), lambda *_: 1 / 0, "torch"))
    plan = rows.LatencyPlan((STEP, TEN), (EAGER, STATIC), rounds=1, calls=2, smoke=True, json=tmp_path / "it.json")
    found = rows.measure(plan, CPU)
    assert set(found["rows"]) == {TEN}
    assert rows.failures(found) == [f"{STEP}: ZeroDivisionError: division by zero"]


def row(static: float, *, unguarded: float = 100.0, difference: float = 0.0) -> dict[str, Any]:
    waited = {STATIC: static, UNGUARDED: unguarded, BARE: 90.0, CALLABLES: 110.0}
    arms = {arm: {rows.WAITED: us, "difference": difference} for arm, us in waited.items()}
    return {"arms": arms, "dicts": 50, "tensors": 20}


def test_goals_that_are_missed_are_listed_and_an_answer_that_differs_fails_the_command() -> None:
    assert rows.goals({"good": row(112.0)}) == []
    assert rows.goals({"slow": row(120.0, unguarded=107.0)}) == [
        "slow: guards cost 13.0 us, goal 12.0",
        "slow: without guards 107.0 us, goal 106.8 (bare graph x 1.02 + 15)",
        "slow: 1.09 times make_graphed_callables, goal 1.05",
    ]
    wrong = {"rows": {"good": row(112.0), "wrong": row(112.0, difference=float("nan"))}}
    assert [each.partition("'")[0] for each in rows.failures(wrong)] == [
        f"wrong: {arm}" for arm in (STATIC, UNGUARDED, BARE, CALLABLES)
    ]
