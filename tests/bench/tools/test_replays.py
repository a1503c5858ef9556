"""No figure of a run that did not happen: every arm of ours whose graphs stop serving fails, and says why."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from bench.arms import load_arm
from bench.arms.base import Setup
from bench.host_overhead import calls
from bench.models.workload import Workload
from bench.optimized import rows
from bench.startup import runs
from bench.tools.measure import Timeline, step_milliseconds
from bench.tools.replays import NotReplayed, Replays, Served
from bench.training import training_steps
from simplegraph import Reason

pytest.importorskip("transformers", minversion="5.0")

from bench.accuracy import engine_runs, generate_runs
from bench.layer_kinds import steps
from bench.layer_kinds.steps import KINDS
from bench.model_table import builders, times
from bench.model_table.row import BY_NAME, FULL, Row
from bench.models.eagle import tiny_pair
from bench.serve import decode_steps, load, serving
from bench.spec_decode import rounds
from bench.transformers_generate import generation, same_tokens
from bench.two_batch import steps as two_batch

CPU = torch.device("cpu")


def linear(**settings: Any) -> Any:
    return sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[2, 4], progress=False, **settings)


@torch.no_grad()
def test_steps_and_replays_are_counted_while_they_are_timed() -> None:
    model, given = linear(), torch.ones(2, 4)
    replays = Replays(model, name="linear")
    for _ in range(3):
        model(given)
    step_milliseconds(Served(lambda: model(given), replays), CPU, warmup=2, steps=7)
    assert replays.figures() == {"steps": 7, "replays": 7, "proofs": 0}
    assert Replays().figures() == {}


@torch.no_grad()
def test_what_runs_eagerly_has_no_time_and_the_reason_is_said() -> None:
    model = linear(capture="upfront")
    call = Served(lambda: model(torch.ones(2, 4)), Replays(model, name="linear"))
    with pytest.raises(
        NotReplayed, match=r"linear: 0 of 3 timed steps .* 3 not_captured_upfront(.|\n)*cost speed:\s+4 x"
    ):
        step_milliseconds(call, CPU, warmup=1, steps=3)


@torch.no_grad()
def test_a_proof_among_replays_is_allowed_and_counted_and_proofs_alone_are_not() -> None:
    model = linear()
    replays = Replays(model)
    model.graph_stats.eager[Reason.PROOF] += 2
    with pytest.raises(NotReplayed, match="0 of 2 timed steps were replayed; eager calls: 2 proof"):
        replays.end(2)


@torch.no_grad()
def test_calls_that_neither_replay_nor_count_are_noticed() -> None:
    with pytest.raises(NotReplayed, match="0 of 5 timed steps were replayed; eager calls: none"):
        step_milliseconds(Served(lambda: None, Replays(linear())), CPU, steps=5)


def test_expected_eager_calls_count_as_steps_but_do_not_replace_all_replays() -> None:
    model = linear()
    replays = Replays(model, expected=frozenset({Reason.MIXED_BATCH}))
    model.graph_stats.eager[Reason.MIXED_BATCH] += 3
    with pytest.raises(NotReplayed, match="0 of 3"):
        replays.end(3)


# Every arm, up to its times; `stopping` takes the graphs from it as soon as their replays are counted.


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        begin = Replays.begin

        def stop(replays: Replays) -> None:
            for each in replays.by:
                if isinstance(each, sg.CudaGraphManager):
                    each.reset()
                elif hasattr(each, "remove"):  # an integration's handle
                    each.remove()
                else:
                    stack.enter_context(sg.eager())
            begin(replays)

        monkeypatch.setattr(Replays, "begin", stop)
        yield


def _startup(name: str) -> None:
    workload = Workload("tiny", (1, 2), CPU, layers=1)
    setup = Setup(workload.build(), workload)
    arm = load_arm(name)(setup)
    arm.start(setup.batch(1), Timeline(CPU))
    runs.speeds(arm, setup, 2)


def _table() -> None:
    entry = BY_NAME["torch/GRU"]
    row = Row(entry, builders.find(entry), CPU, tiny=True)
    untimed = row.timed(row.served_whole, contextlib.nullcontext(), FULL)["untimed"]
    assert untimed.startswith("NotReplayed: torch/GRU: 0 of")
    raise NotReplayed(untimed.removeprefix("NotReplayed: "))


def _generation(arm: str) -> None:
    plan = dataclasses.replace(generation.default_plan(CPU), rounds=1, tokens=6)
    generation.run_arm(plan, "llama", arm, CPU, torch.float32)


def _serving(arm: str) -> None:
    target, draft = tiny_pair("eagle3", device=CPU)
    plan = serving.ServePlan([load.Load(50.0)], 3, 0, 24, 2, 24, 2, None, 100.0)
    list(serving.served(plan, target, draft if "speculation" in arm else None, [arm], ["sdpa"], None))


def _rounds(arm: str) -> None:
    plan = rounds.SpecPlan((1,), 2, "sdpa", prompt=8, output=8, max_num_tokens=24, generations=1, steps=1)
    rounds.measure(plan, *tiny_pair("eagle3", device=CPU), (arm,))


def _decode() -> None:
    decode_steps.measure(dataclasses.replace(decode_steps.default_plan(CPU), batches=(1,)), CPU)


def _accuracy() -> None:
    target, _ = tiny_pair("eagle3", device=CPU)
    run = engine_runs.engine_run(target, None, "full", engine_runs.EnginePlan(2, 16, 2, "sdpa"))
    run.generate([[1, 2, 3]], 4)
    run.close()


def _accuracy_of_generate() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, vocab_size=32)).eval()
    run = generate_runs.GenerateRun(model, generate_runs.GRAPHS, 2, 16)
    run.generate([[1, 2, 3]], 6)
    run.close()


TRAINING = ("train-step", "forward-backward")
ARMS: dict[str, Callable[[], object]] = {
    **{f"startup {name}": lambda name=name: _startup(name) for name in ("simplegraph", "simplegraph-lazy")},
    "startup simplegraph-piecewise": lambda: _startup("simplegraph-piecewise"),
    "host overhead": lambda: calls.measure(CPU, [calls.SIZE], 1, str),
    "model table": _table,
    **{
        f"optimized {arm}": lambda arm=arm: rows.run_row("bert", 1, [arm], CPU, True)
        for arm in (rows.GRAPH, rows.OPTIMIZED, rows.STATIC)
    },
    **{f"training {arm}": lambda arm=arm: training_steps.run_arm("mlp", arm, CPU, True) for arm in TRAINING},
    **{f"shapes {arm}": lambda arm=arm: training_steps.run_shapes("mlp", arm, CPU, True) for arm in TRAINING},
    **{f"in turn {arm}": lambda arm=arm: training_steps.run_in_turn("mlp", [arm], CPU, True) for arm in TRAINING},
    **{f"generate {arm}": lambda arm=arm: _generation(arm) for arm in (*generation.FUSED, "simplegraph-4-tokens")},
    "same tokens": lambda: same_tokens.compare("llama", CPU, True, 6, 4),
    # Modes of the engine's graphs are one arm with other settings.
    **{f"serve {arm}": lambda arm=arm: _serving(arm) for arm in ("full-and-piecewise", "speculation, draft full")},
    **{f"rounds {arm}": lambda arm=arm: _rounds(arm) for arm in ("no speculation", "piecewise")},
    "decode": _decode,
    "kinds, steps": lambda: steps.measure(KINDS["hybrid"], CPU, (1,), small=True),
    "two micro-batches": lambda: list(two_batch.measure(_one_layer(), None, two_batch.decode_steps((2,), CPU))),
    "accuracy": _accuracy,
    "accuracy of generate": _accuracy_of_generate,
}


def _one_layer() -> Any:
    return Workload("tiny", (1,), CPU, lm_head=True, layers=1).build()


@pytest.mark.parametrize("arm", ARMS)
def test_an_arm_that_stops_replaying_has_no_figures(arm: str, stopping: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(times, "kernel_milliseconds", lambda call, calls: 0.25)
    monkeypatch.setattr(training_steps, "TIMED_STEPS", (2, 2))
    training = arm.startswith(("training", "shapes", "in turn"))
    with torch.set_grad_enabled(training), pytest.raises(NotReplayed, match=r"of \d+ timed steps were replayed"):
        ARMS[arm]()


def test_the_table_says_what_replayed() -> None:
    figures = runs.measure_arm("simplegraph", runs.StartupPlan("tiny", (1, 2), "cpu", layers=1, steps=2))
    assert figures["graphs"] == "emulator"
    assert figures["replays"] == figures["steps"] > 2  # the comparisons with eager, too
