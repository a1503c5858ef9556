"""The benchmark of training steps: every arm trains as eager does, and the table compares what has to be compared."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.tools import fresh
from bench.training import step_arms, training_steps, workloads
from bench.training.step_arms import ARMS, TrainingArm

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_steps, "TIMED_STEPS", (2, 2))


@pytest.mark.parametrize("name", workloads.available(tiny=True))
def test_every_workload_learns_its_batches(name: str) -> None:
    task = workloads.Task(workloads.WORKLOADS[name], CPU, True, capturable=True)
    batch = task.batch()
    losses = [float(task.step(*batch)) for _ in range(12)]
    assert losses[-1] < losses[0]


def test_the_workloads_of_torch_alone_are_always_there() -> None:
    assert {"mlp", "vit-b 8", "vit-b 64", "resnet50", "dqn", "two linears"} <= set(workloads.available(tiny=True))


def test_frozen_weights_stay_and_the_target_network_follows() -> None:
    pytest.importorskip("transformers")
    lora = workloads.Task(workloads.WORKLOADS["lora"], CPU, True, capturable=True)
    frozen = {name: p.clone() for name, p in lora.model.named_parameters() if not p.requires_grad}
    assert any("q_proj.frozen" in name for name in frozen)
    assert not any(".up." in name or ".down." in name for name in frozen)
    dqn = workloads.Task(workloads.WORKLOADS["dqn"], CPU, True, capturable=True)
    assert dqn.target is not None
    before = [weight.clone() for weight in dqn.target.parameters()]
    for task in (lora, dqn):
        task.step(*task.batch())
    assert all(torch.equal(dict(lora.model.named_parameters())[name], value) for name, value in frozen.items())
    for old, new, followed in zip(before, dqn.target.parameters(), dqn.model.parameters(), strict=True):
        assert torch.allclose(new, old.lerp(followed, workloads.POLYAK))


def test_steady_is_the_first_step_after_the_last_slow_one() -> None:
    assert training_steps.first_steady([5.0, 9.0, 9.1, 9.2, 9.3, 9.4]) == 2
    assert training_steps.first_steady([0.1, 0.2, 3.0, 3.1, 3.2, 3.3]) == 3
    assert training_steps.first_steady([0.1, 0.2, 0.3, 0.4]) == 0


def _training_twice(task: workloads.Task) -> Callable[..., torch.Tensor]:
    def step(*batch: torch.Tensor) -> torch.Tensor:
        task.step(*batch)
        return task.step(*batch)

    return step


def test_an_arm_that_trains_otherwise_than_eager_fails(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ARMS, "train-step", TrainingArm(_training_twice, ours=True))
    plan = training_steps.TrainingPlan(("mlp",), ("eager", "eager-capturable", "train-step"), True, ())
    figures = training_steps.measure(plan, CPU)
    (told,) = training_steps.failures(figures)
    assert told.startswith("train-step of mlp: losses differ from eager's by up to 0.")


def test_a_compiled_arm_that_fails_costs_no_other(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(task: workloads.Task) -> workloads.Step:
        if task.target is not None:
            raise RuntimeError("Refused: no")
        return task.step

    monkeypatch.setitem(ARMS, "compiled-reduce-overhead", TrainingArm(make, compiles=True))
    plan = training_steps.TrainingPlan(("mlp", "dqn"), ("eager", "compiled-reduce-overhead"), True, ())
    figures = training_steps.measure(plan, CPU)["workloads"]
    assert figures["mlp"]["compiled-reduce-overhead"]["ms"] > 0
    assert figures["dqn"]["compiled-reduce-overhead"]["failed"].endswith("Refused: no")


def _run(ms: float, kernels: float, first: float, index: int | None, **more: Any) -> dict[str, Any]:
    ends = [first + 0.01 * step for step in range(12)]
    return {"ms": ms, "kernel_ms": kernels, "calls": ends, "first_replay": index, "steady": 2} | more


def test_the_table_compares_with_eager_and_names_what_is_not_timed() -> None:
    arms = {
        "eager": _run(10.0, 5.0, 0.1, None),
        "train-step": _run(5.0, 5.0, 0.6, 4),
        "hand-made": {"skipped": "it needs a GPU"},
        "in turn": {"ms": {"forward-backward": 1.5, "make-graphed-callables": 1.25}},
    }
    shapes = {"eager": {"reserved_mib": 2000.0}}
    told = training_steps.render({"device": "cuda", "workloads": {"mlp": arms}, "shapes": {"gpt2": shapes}})
    rows = {line.split()[1]: line.split()[2:] for line in told.splitlines() if line.startswith("mlp  ")}
    assert rows["train-step"][:4] == ["5.000", "5.000", "0.500", "0.500"]  # ms, kernels, times eager, s to a replay
    assert "mlp, hand-made: skipped: it needs a GPU" in told
    assert "mlp, in turn: forward-backward 1.500 ms, make-graphed-callables 1.250 ms" in told
    assert "gpt2, eager: reserved 2000 MiB" in told


def test_a_run_writes_every_figure_and_leaves_whole_steps_out_where_they_do_not_count(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    line = ["--workloads", "mlp,two-linears", "--arms", "eager,hand-made", "--device", "cpu", "--json", str(file)]
    training_steps.main(line)
    figures = json.loads(file.read_text())
    assert {name: list(arms) for name, arms in figures["workloads"].items()} == {
        "mlp": ["eager", "hand-made"],
        "two linears": ["eager"],
    }
    assert figures["workloads"]["mlp"]["hand-made"] == {"skipped": "it needs a GPU"}
    assert len(figures["workloads"]["mlp"]["eager"]["losses"]) == training_steps.FIRST_CALLS
    assert figures["machine_info"]["commit"]


def test_what_is_preloaded_stays_unless_a_process_fails_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(function: Any, device: str, seconds: float) -> None:
        if device == "cuda":
            raise fresh.ProcessFailed("cannot start CUDA in a forked process")
        function(device)

    servers: list[str | None] = []
    monkeypatch.setenv(fresh.MODULES, "")
    monkeypatch.setattr(fresh, "call", answer)
    monkeypatch.setattr(fresh, "stop_server", lambda: servers.append(os.environ.get(fresh.MODULES)))
    fresh.preload("cpu", "one", "two")
    assert os.environ[fresh.MODULES] == "one,two"
    fresh.preload("cuda", "three")
    assert servers[-1] is None  # none goes on that has imported it


def test_modules_that_are_installed_are_imported_once_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fresh.MODULES, "")
    fresh.preload("cpu", "no_such_module", "colorsys")
    assert fresh.call(_has_colorsys, seconds=60)
    fresh.stop_server()


def _has_colorsys() -> bool:
    return "colorsys" in sys.modules


def test_eager_is_the_yardstick_of_ours() -> None:
    assert [name for name, arm in step_arms.ARMS.items() if arm.compiles] == ["compiled-reduce-overhead"]
    assert training_steps.difference({"losses": [1.0, 2.0]}, {"losses": [1.0, 2.5]}) == pytest.approx(0.2)
    assert training_steps.beyond_eager({"calls": [1.0, 3.0]}, {"calls": [0.5, 1.0]}, 1) == 2.0
