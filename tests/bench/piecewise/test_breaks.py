"""The script on eager breaks: a wrong result gets no time, and a graph without breaks is not taken for one with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from bench.arms.base import Setup
from bench.arms.correctness import Mismatch
from bench.arms.graphed import Piecewise
from bench.models.workload import Workload
from bench.piecewise import breaks, mixed_steps
from bench.tools.measure import Timeline

CPU = torch.device("cpu")
WORKLOAD = Workload("tiny", (1, 16), CPU, layers=3)


@pytest.fixture(scope="module")
def setup() -> Setup:
    return Setup(WORKLOAD.build(), WORKLOAD)


def test_the_script_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "piecewise.json"
    options = ["--device", "cpu", "--layers", "3", "--sizes", "1,2,16", "--mixed-sizes", "8,32", "--json", str(out)]
    breaks.main(options)
    figures = json.loads(out.read_text())
    assert figures["layers"] == 3
    assert len(figures["starts"]["full"]["every"]) == 2
    assert all(figures["starts"][mode]["again_s"] > 0 for mode in breaks.MODES)
    assert figures["starts"]["piecewise_over_full"]["again_s"] > 0
    assert set(figures["steps"]) == {"1"}
    assert [one["equal"] for one in figures["correct"]["piecewise"] if one["captured"]] == [True] * 6
    assert [one["size"] for one in figures["mixed"]] == [8] * 4 + [32] * 4
    assert all(one["error"] <= one["allowed"] for one in figures["mixed"])
    printed = capsys.readouterr().out
    assert "NOT speed" in printed
    for column in ("again s", "launch us", "break us", "piecewise ms", "chunks among decodes"):
        assert column in printed


def test_the_break_cost_is_the_difference_per_layer_without_the_launch() -> None:
    assert breaks.above_launch(full=5000.0, piecewise=5600.0, layers=3, launch=50.0) == 150.0
    assert breaks.above_launch(full=5000.0, piecewise=5000.0, layers=3, launch=50.0) == -50.0


def test_the_timed_attention_calls_are_those_of_a_step(setup: Setup) -> None:
    made = breaks.attention_calls(setup, setup.batch(16))
    caches = [arguments[3] for arguments in made]
    assert [cache is layer.self_attn.k_cache for cache, layer in zip(caches, setup.model.model.layers, strict=True)]
    assert [arguments[0].shape[0] for arguments in made] == [16] * 3
    assert breaks.launch_microseconds(setup, setup.batch(1), calls=2) > 0


def test_a_graph_that_does_not_break_is_refused(setup: Setup) -> None:
    class Unbroken(Piecewise):
        mode = "FULL"

    with pytest.raises(RuntimeError, match="captured as 1 segments; expected 4"):
        Unbroken(setup).start(setup.batch(1), Timeline(CPU))


def test_a_mixed_batch_that_is_off_gets_no_time(setup: Setup) -> None:
    graphed = mixed_steps.capture(setup, [8])
    mix = mixed_steps.mixes(8, WORKLOAD)[1]
    batch = mixed_steps._batch(setup, mix, 0)
    assert mixed_steps.compare(graphed, mix, batch, noise=0.0).equal

    def wrong(*inputs: torch.Tensor) -> torch.Tensor:
        return graphed.piecewise(*inputs) * 1.001

    with pytest.raises(Mismatch, match=r"a prefill of 8 tokens is off from eager by 1\.00e-03"):
        mixed_steps.compare(dataclasses.replace(graphed, piecewise=wrong), mix, batch, noise=0.0)


def test_a_mixed_step_that_writes_no_keys_is_seen(setup: Setup) -> None:
    mix = mixed_steps.mixes(8, WORKLOAD)[0]
    batch = mixed_steps._batch(setup, mix, 0)
    caches = [layer.self_attn.k_cache for layer in setup.model.model.layers]
    mixed_steps.forget(setup.model, batch.metadata.slots)
    assert all(not cache.flatten(0, 1)[batch.metadata.slots].any() for cache in caches)
    assert all(cache.any() for cache in caches)


def test_the_plan_of_a_cpu_is_small() -> None:
    plan = breaks.default_plan(CPU)
    assert plan == breaks.CPU_PLAN
    assert plan.model == "tiny"
    assert max(breaks.BreaksPlan().sizes) == 512
    assert len(breaks.BreaksPlan().sizes) == 51
