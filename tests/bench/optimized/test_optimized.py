"""The benchmark of optimized modules: answers are checked, and its table compares ours with the compiler."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.arms.base import NotAvailable
from bench.optimized import rows, shapes
from bench.optimized.rows import COMPILED, EAGER, GRAPH, OPTIMIZED

CPU = torch.device("cpu")
MODELS = shapes.available()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_replayed_and_exact_in_all_arms_of_ours(name: str) -> None:
    found = rows.run_row(name, 2, (EAGER, OPTIMIZED), CPU, True)["arms"]
    assert found[OPTIMIZED]["replays"] == found[OPTIMIZED]["steps"] > 0
    assert found[OPTIMIZED]["error"] <= 1.5 * found[EAGER]["error"] + 2e-7
    assert 0 < found[OPTIMIZED]["first_seconds"] <= found[OPTIMIZED]["ready_seconds"]


def test_calls_of_several_sizes_take_turns_and_each_has_a_graph(here: None) -> None:
    pytest.importorskip("transformers")
    found = rows.measure(rows.OptimizedPlan(("bert",), (1, 3), (EAGER, GRAPH), in_turn=True, tiny=True), CPU)["rows"]
    arm = found["bert 1+3"]["arms"][GRAPH]
    assert arm["replays"] == arm["steps"] > 0
    assert "2 graphs" in arm["report"][0]


def test_what_takes_one_size_is_left_out_where_sizes_take_turns() -> None:
    batches = [(torch.zeros(1, 2),), (torch.zeros(3, 2),)]
    with pytest.raises(NotAvailable, match="a graphed callable takes one batch size"):
        rows.ARMS["make-graphed-callables"].make(None, torch.nn.Identity(), batches)


def test_cold_and_warm_compilers_are_measured_in_two_calls() -> None:
    with pytest.raises(SystemExit, match="measure them in two calls"):
        rows.measure(rows.OptimizedPlan(("bert",), (1,), (COMPILED, rows.WARM)), CPU)


def test_first_calls_and_times_are_measured_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[int] = []
    held: list[int] = []

    class Turn:
        def __enter__(self) -> None:
            turns.append(1)

        def __exit__(self, *_: object) -> None:
            turns.pop()

    monkeypatch.setattr(rows, "_first_calls", lambda *args: held.append(len(turns)) or args[1])
    monkeypatch.setattr(rows, "_measure", lambda *args: held.append(len(turns)))
    rows.run_row(MODELS[0], 1, (EAGER, OPTIMIZED), CPU, True, 0, Turn())
    assert held == [1] * 3
    assert turns == []


def test_the_compiler_is_left_out_without_a_gpu_and_the_file_is_continued(here: None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "figures.json"
    line = ["--device", "cpu", "--models", "bert", "--arms", "eager,optimized,compiled", "--json", str(file)]
    rows.main([*line, "--batches", "2"])
    first = json.loads(file.read_text())["rows"]
    assert first["bert 2"]["arms"][COMPILED]["skipped"] == "it needs a GPU"
    rows.main([*line, "--batches", "1,2", "--more"])
    both = json.loads(file.read_text())["rows"]
    assert set(both) == {"bert 1", "bert 2"}
    assert both["bert 2"] == first["bert 2"]


def test_a_compiler_that_fails_or_ends_its_process_costs_no_other_arm_its_figures(
    here: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = rows.run_row

    def run(name: str, sizes: int, arms: tuple[str, ...], *rest: Any) -> dict[str, Any]:
        if rows.AHEAD in arms and name == "vit":
            raise RuntimeError("the process died with exit code -11")
        return {"dtype": "float32", "arms": {arm: {"ms": 1.0, "first_seconds": 1.0, "error": 0.0} for arm in arms}}

    monkeypatch.setattr(rows, "run_row", run)
    plan = rows.OptimizedPlan(("vit", "bert"), (1,), (EAGER, OPTIMIZED, rows.AHEAD))
    found = rows.measure(plan, CPU)
    assert set(found["rows"]["bert 1"]["arms"]) == set(plan.arms)
    died = found["rows"]["vit 1"]["arms"]
    assert died.keys() == {*plan.arms}
    assert "ms" in died[OPTIMIZED]
    assert "exit code -11" in died[rows.AHEAD]["failed"]
    assert rows.failures(found) == []
    assert "vit 1: aot-inductor: its process: " in rows.render(found)
    monkeypatch.setattr(rows, "run_row", known)
    monkeypatch.setitem(rows.ARMS, rows.AHEAD, rows.NamedArm(lambda *_: 1 / 0))
    arms = rows.run_row(MODELS[0], 1, (EAGER, OPTIMIZED, rows.AHEAD), CPU, True)["arms"]
    assert arms[rows.AHEAD] == {"failed": "ZeroDivisionError: division by zero"}
    assert {"ms", "error"} <= arms[OPTIMIZED].keys()


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_what_aot_inductor_compiled_is_loaded_and_gives_the_answer() -> None:
    module, batch = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).requires_grad_(False), torch.ones(2, 4)
    with rows.empty_caches(), torch.no_grad():
        step = rows.ARMS[rows.AHEAD].make(None, module, [(batch,)])
        torch.testing.assert_close(step(batch), module(batch))


def row(ours: float, theirs: float, *, error: float = 1e-3, first: float = 0.5) -> dict[str, Any]:
    kernels = [["a_gemm", 12.0, 80.5], ["others", 3.0, 4.0]]
    arms = {
        EAGER: {"ms": 2.0, "error": 1e-3, "first_seconds": 0.1},
        GRAPH: {"ms": 1.0, "error": 1e-3, "first_seconds": 0.1},
        OPTIMIZED: {"ms": ours, "error": error, "first_seconds": first, "kernels": kernels},
        COMPILED: {"ms": theirs, "error": 1e-3, "first_seconds": 20.0, "kernels": kernels},
    }
    return {"dtype": "bfloat16", "arms": arms}


def test_the_table_lists_the_kernels_of_rows_that_take_longer() -> None:
    found = {"vit 1": row(1.18, 1.0), "unet 8": row(1.3, 1.0), "dit 1": row(0.8, 1.0, first=4.0)}
    told = rows.render({"device": "cuda", "rows": found})
    assert f"mean of 3 rows {(1.18 * 1.3 * 0.8) ** (1 / 3):.3f}" in told
    assert "sooner: 5.0 times at least" in told
    assert told.count("a_gemm") == 2
    assert told.index("unet 8: kernels") < told.index("a_gemm")


def test_an_inexact_answer_fails_the_command() -> None:
    found = {"resnet18 1": row(0.9, 1.0, error=0.02), "bert 1": row(0.9, 1.0)}
    (told,) = rows.failures({"rows": found, "failed": {"bert 1": "an earlier try"}})
    assert told == "resnet18 1: optimized's error against float64 is 2.00e-02, eager's 1.00e-03"


def test_a_failed_row_is_told_and_not_kept(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(rows, "run_row", fail)
    found = rows.measure(rows.OptimizedPlan(("bert",), (1,)), CPU)
    assert found["rows"] == {}
    assert rows.failures(found) == ["bert 1:\nno memory"]
