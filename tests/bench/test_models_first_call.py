"""The arms of the model benchmark give eager's answers, and its table says what they are."""

from __future__ import annotations

import pytest
import torch

from bench import models_first_call, zoo

CPU = torch.device("cpu")
MODELS = zoo.available()


@pytest.mark.parametrize("model", MODELS)
def test_graphs_of_every_model_are_replayed_and_right(model: str) -> None:
    for arm in ("simplegraph", "simplegraph-static"):
        figures = models_first_call.run_arm(model, arm, CPU, tiny=True)
        assert figures["replays"] >= models_first_call.READY_CALLS - 1 + 50
        assert figures["difference"] <= 1e-3
        assert 0 < figures["first_seconds"] <= figures["ready_seconds"]


def test_models_without_packages_are_always_there() -> None:
    assert MODELS[:3] == ["convnet", "transformer", "unet"]


def test_a_wrong_answer_fails_the_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models_first_call.ARMS, "eager", lambda module, inputs: lambda *x: module(*x) * 1.01)
    with pytest.raises(RuntimeError, match=r"differ from eager's by 0\.01 "):
        models_first_call.run_arm("convnet", "eager", CPU, tiny=True)


def test_the_table_has_every_arm_and_says_that_a_cpu_is_no_speed() -> None:
    plan = models_first_call.Plan(("unet",), tuple(models_first_call.ARMS), tiny=True, processes=1)
    table = models_first_call.render(models_first_call.measure(plan, CPU))
    assert models_first_call.NOT_SPEED in table
    lines = [line for line in table.splitlines() if line.split()[:1] == ["unet"]]
    assert [line.split()[1] for line in lines] == list(models_first_call.ARMS)
    assert sum("needs a GPU" in line for line in lines) == 2
