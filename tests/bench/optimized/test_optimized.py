"""The benchmark of optimized modules: answers are checked, and its table compares ours with the compiler."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.optimized import one_row, rows, shapes
from bench.optimized.one_row import COMPILED, EAGER, GRAPH, OPTIMIZED
from bench.tools import fresh
from bench.tools.turns import Turn

CPU = torch.device("cpu")
MODELS = shapes.available()


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, quicker than in fresh ones."""
    monkeypatch.setattr(fresh, "call", lambda function, *args, seconds: function(*args))
    monkeypatch.setattr(fresh, "preload", lambda module, device: None)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_replayed_and_exact_in_all_arms_of_ours(name: str) -> None:
    found = one_row.run_row(name, 2, (EAGER, OPTIMIZED), CPU, True)["arms"]
    assert found[OPTIMIZED]["replays"] == found[OPTIMIZED]["steps"] > 0
    assert found[OPTIMIZED]["error"] <= 1.5 * found[EAGER]["error"] + 2e-7
    assert 0 < found[OPTIMIZED]["first_seconds"] <= found[OPTIMIZED]["ready_seconds"]


def test_first_calls_are_made_by_one_process_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alone, held = threading.Lock(), []
    monkeypatch.setattr(one_row, "_first_calls", lambda *args: held.append(alone.locked()) or torch.nn.Identity())
    monkeypatch.setattr(one_row, "_measure", lambda *args: held.append(alone.locked()))
    monkeypatch.setattr(one_row, "_error", lambda *args: 0.0)
    one_row.run_row(MODELS[0], 1, (EAGER, OPTIMIZED), CPU, True, Turn(threading.Barrier(1), alone, 20.0))
    assert held == [True] * 3
    assert not alone.locked()


def test_a_process_that_was_killed_in_its_turn_is_not_waited_for_for_ever() -> None:
    alone = threading.Lock()
    alone.acquire()
    with Turn(threading.Barrier(1), alone, 0.01).timed():
        assert alone.locked()
    assert alone.locked()  # it is not ours to release


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


def row(ours: float, theirs: float, *, error: float = 1e-3, first: float = 0.5) -> dict[str, Any]:
    kernels = [["a_gemm", 12.0, 80.5], ["others", 3.0, 4.0]]
    arms = {
        EAGER: {"ms": 2.0, "error": 1e-3, "first_seconds": 0.1},
        GRAPH: {"ms": 1.0, "error": 1e-3, "first_seconds": 0.1},
        OPTIMIZED: {"ms": ours, "error": error, "first_seconds": first, "kernels": kernels},
        COMPILED: {"ms": theirs, "error": 1e-3, "first_seconds": 20.0, "kernels": kernels},
    }
    return {"dtype": "bfloat16", "arms": arms}


def test_the_table_names_rows_above_their_limits_and_lists_their_kernels() -> None:
    found = {"vit 1": row(1.18, 1.0), "unet 8": row(1.3, 1.0), "dit 1": row(0.8, 1.0, first=4.0)}
    told = rows.render({"device": "cuda", "rows": found})
    assert f"mean of 3 rows {(1.18 * 1.3 * 0.8) ** (1 / 3):.3f}" in told
    assert "own limit: vit 1 1.18 > 1.15" in told  # above 1.2 a row is explained, above 1.5 it fails
    assert "at least; below 10: dit 1 5.0" in told
    assert told.count("a_gemm") == 2
    assert told.index("unet 8: kernels") < told.index("a_gemm")


def test_an_inexact_answer_fails_the_command() -> None:
    found = {"resnet18 1": row(0.9, 1.0, error=0.02), "bert 1": row(0.9, 1.0)}
    (told,) = rows.failures({"rows": found, "failed": {"bert 1": "an earlier try"}})
    assert told == "resnet18 1: optimized's error against float64 is 2.00e-02, eager's 1.00e-03"


def test_a_failed_row_is_told_and_not_kept(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, seconds: float) -> None:
        raise fresh.ProcessFailed("Traceback\nRuntimeError: no memory")

    monkeypatch.setattr(fresh, "call", fail)
    found = rows.measure(rows.OptimizedPlan(("bert",), (1,)), CPU)
    assert found["rows"] == {}
    assert rows.failures(found) == ["bert 1:\nTraceback\nRuntimeError: no memory"]
