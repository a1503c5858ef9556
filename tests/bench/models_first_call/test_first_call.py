"""The arms of the model benchmark give eager's answers, and its table says what they are."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from bench.models_first_call import first_call, model_arms, zoo
from bench.tools import fresh

CPU = torch.device("cpu")
MODELS = zoo.available()


@pytest.mark.parametrize("model", MODELS)
def test_graphs_of_every_model_are_replayed_and_right(model: str) -> None:
    for arm in ("simplegraph", "simplegraph-static"):
        figures = first_call.run_arm(model, arm, CPU, True, 1)
        assert figures["replays"] == figures["steps"] >= 50
        assert figures["difference"] <= 1e-3
        assert 0 < figures["first_seconds"] <= figures["ready_seconds"]


def test_models_without_packages_are_always_there() -> None:
    assert MODELS[:3] == ["convnet", "transformer", "unet"]


def test_a_wrong_answer_fails_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = model_arms.NamedArm(lambda module, inputs: lambda *x: module(*x) * 1.01)
    monkeypatch.setitem(model_arms.ARMS, "eager", wrong)
    with pytest.raises(RuntimeError, match=r"differ from eager's by 0\.01 "):
        first_call.run_arm("convnet", "eager", CPU, True, 1)


class WrongForThree(nn.Module):
    """Its answer to a padded batch depends on the rows that pad it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x == 0).all(1).sum()


def test_a_ragged_batch_is_part_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = zoo.Entry(lambda tiny: WrongForThree(), lambda tiny, rows: (torch.ones(rows, 2),))
    monkeypatch.setitem(zoo.ZOO, "wrong for three", entry)
    first_call.run_arm("wrong for three", "eager", CPU, True, 1)
    with pytest.raises(RuntimeError, match="answers to 3 rows differ from eager's"):
        first_call.run_arm("wrong for three", "simplegraph", CPU, True, 1)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_takes_as_many_rows_as_it_is_given(model: str) -> None:
    assert {tensor.shape[0] for tensor in zoo.ZOO[model].inputs(True, 3) if tensor.dim()} == {3}
    assert first_call.run_arm(model, "eager", CPU, True, 3)["difference"] == 0


def test_what_an_arm_imports_is_not_in_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = model_arms.NamedArm(lambda module, inputs: module, load=lambda device: time.sleep(2))
    monkeypatch.setitem(model_arms.ARMS, "slow", slow)
    assert first_call.run_arm("convnet", "slow", CPU, True, 1)["first_seconds"] < 1


def test_the_table_has_every_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh, "call", lambda function, *args, seconds: function(*args))  # quicker, in this process
    plan = first_call.FirstCallPlan(("unet",), tuple(first_call.ARMS), tiny=True, processes=1)
    figures = first_call.measure(plan, CPU)
    assert not first_call.failures(figures)
    table = first_call.render(figures)
    lines = [line for line in table.splitlines() if line.split()[:1] == ["unet"]]
    assert [line.split()[1] for line in lines] == list(first_call.ARMS)
    assert sum("needs a GPU" in line for line in lines) == 3
    assert lines[0].split()[-2:] == ["1.000", "-"]  # of eager; nothing compiled to be sooner than


def test_an_arm_of_ours_that_fails_is_told_and_one_of_others_is_a_figure() -> None:
    plan = first_call.FirstCallPlan(("no such model",), ("eager", "make-graphed-callables"), tiny=True)
    figures = first_call.measure(plan, CPU)
    (told,) = first_call.failures(figures)
    assert told.startswith("eager of no such model")
    assert first_call.render(figures).count("failed: KeyError: 'no such model'") == 2


def test_choosing_models_and_arms(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    first_call.main(["--models", "convnet", "--arms", "eager", "--device", "cpu", "--batch", "3", "--json", str(file)])
    figures = json.loads(file.read_text())
    assert figures["plan"]["batch"] == 3
    assert {model: list(arms) for model, arms in figures["models"].items()} == {"convnet": ["eager"]}
    assert figures["machine_info"]["commit"]


def test_a_process_that_dies_or_takes_too_long_is_told() -> None:
    assert fresh.call(abs, -3, seconds=60) == 3
    with pytest.raises(fresh.ProcessFailed, match="exit code 7"):
        fresh.call(os._exit, 7, seconds=60)
    with pytest.raises(fresh.ProcessFailed, match="ValueError: math domain error") as failed:
        fresh.call(math.sqrt, -1, seconds=60)
    assert failed.value.reason.startswith("ValueError: ")
    with pytest.raises(TimeoutError, match=r"more than 0\.2 s"):
        fresh.call(time.sleep, 60, seconds=0.2)
