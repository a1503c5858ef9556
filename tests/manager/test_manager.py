"""The manager, as an engine uses it: its own buffers, its own loop, and every batch on the graph it should be on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import simplegraph as sg
from simplegraph import (
    BatchDescriptor,
    CaptureError,
    ConfigError,
    CudaGraphManager,
    CudaGraphMode,
    InputError,
    Reason,
    ReplayError,
)
from tests.manager.engines import SIZES, WIDTH, Engine
from tests.support.reserved import reserved

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


FULL, PIECEWISE, NONE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE, CudaGraphMode.NONE


# Capture, replay, fall back.


def test_every_size_up_to_the_largest_is_replayed_and_not_quietly_run_eagerly(engine: Engine) -> None:
    manager = engine.manager
    assert manager.needs_capture()
    summary = manager.capture(engine.forward)
    assert (summary.captured, summary.failed) == (4, {})
    assert not manager.needs_capture()
    engine.runs.clear()
    for count in range(1, 9):
        engine.step(count)
    assert engine.runs == [], "a replay runs no Python"
    assert manager.stats.replays == 8
    assert not manager.stats.eager
    replays = {graph.size: (graph.replays, graph.padded_tokens) for graph in manager.stats.graphs.values()}
    assert replays == {1: (1, 0), 2: (1, 0), 4: (2, 1), 8: (4, 3 + 2 + 1)}
    assert manager.stats.padded_tokens == 7


def test_captures_go_from_the_largest_to_the_smallest_after_warming_up_the_largest(engine: Engine) -> None:
    engine.manager.capture(engine.forward)
    assert [(mode, descriptor.num_tokens, capturing) for mode, descriptor, capturing in engine.runs] == [
        (FULL, 8, False),
        (FULL, 8, True),
        (FULL, 4, True),
        (FULL, 2, True),
        (FULL, 1, True),
    ]
    assert [descriptor.num_tokens for _, descriptor in engine.manager.descriptors()] == [8, 4, 2, 1]


def test_before_the_capture_batches_run_eagerly_with_a_reason(engine: Engine) -> None:
    for count in (3, 8, 1):
        engine.step(count)
    assert engine.manager.stats.eager == {Reason.NOT_CAPTURED_UPFRONT: 3}
    assert "call the manager's capture first" in str(engine.manager.report())
    assert "capture_graphs" not in str(engine.manager.report()), "a manager has no such method"
    assert [(mode, descriptor.num_tokens) for mode, descriptor, _ in engine.runs] == [(NONE, 4), (NONE, 8), (NONE, 1)]
    engine.manager.capture(engine.forward)
    engine.step(3)
    assert engine.manager.stats.replays == 1


def test_a_batch_above_every_size_runs_eagerly_as_it_is(engine: Engine) -> None:
    engine.manager.capture(engine.forward)
    assert engine.step(9).descriptor == BatchDescriptor(9)
    assert engine.manager.stats.eager == {Reason.BATCH_TOO_LARGE: 1}


def test_replaying_what_was_not_captured_says_so(engine: Engine) -> None:
    manager = engine.manager
    with pytest.raises(ReplayError, match="4 tokens in mode FULL; capture it, or use run"):
        manager.replay(manager.dispatch(3))
    manager.capture(engine.forward)
    with pytest.raises(ReplayError, match="9 tokens in mode NONE"):
        manager.replay(manager.dispatch(9))
    engine.x.fill_(1)
    torch.testing.assert_close(manager.replay(manager.dispatch(3)), engine.model(engine.x[:4]) * 2)
    assert manager.stats.replays == 1


@pytest.mark.parametrize("batch", [BatchDescriptor(2), 2, None])
def test_a_batch_that_was_not_dispatched_is_refused_with_the_remedy(engine: Engine, batch: Any) -> None:
    engine.manager.capture(engine.forward)
    runs = len(engine.runs)
    for use in (lambda: engine.manager.run(batch, engine.forward), lambda: engine.manager.replay(batch)):
        with pytest.raises(InputError, match=r"batch is .*; expected what dispatch\(\) returned"):
            use()
    assert (len(engine.runs), engine.manager.stats.replays) == (runs, 0)


def test_capturing_again_does_nothing_until_a_reset(engine: Engine) -> None:
    manager = engine.manager
    manager.capture(engine.forward)
    runs = len(engine.runs)
    assert manager.capture(engine.forward).captured == 0
    assert len(engine.runs) == runs
    old = [*manager.programs.values()]
    engine.step(3)
    manager.reset()
    assert manager.needs_capture()
    assert manager.programs == {}
    with pytest.raises(ReplayError):
        manager.replay(manager.dispatch(3))
    assert all(not program.live for program in old)
    engine.step(3)
    assert manager.stats.eager == {Reason.NOT_CAPTURED_UPFRONT: 1}
    assert manager.capture(engine.forward).captured == 4
    for count in (1, 3, 8):
        engine.step(count)
    assert manager.stats.replays == 1 + 3, "dropped graphs' replays still count"
    assert manager.stats.captures == 8


@pytest.mark.parametrize("kinds", [*itertools.product(["passes on", "returns nothing", "makes a tensor"], repeat=2)])
def test_a_break_that_returns_something_else_after_a_reset_is_captured_as_it_is_then(
    device: torch.device, kinds: tuple[str, str]
) -> None:
    """What warmups before it learnt of breaks would stand in captures for what they return now."""
    manager = CudaGraphManager(device=device, capture_sizes=SIZES, mode="PIECEWISE", progress=False)
    x, then = torch.zeros(8, WIDTH, device=device), [*kinds]

    @sg.eager_break
    def attention(rows: Tensor) -> Tensor | None:
        if then[0] == "makes a tensor":
            return rows * 3
        return rows if then[0] == "passes on" else None

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        rows = x[: descriptor.num_tokens] * 2
        attended = attention(rows)
        return (rows.add_(1) if attended is None else attended) * 5

    while then:
        summary = manager.capture(forward)
        assert (summary.captured, summary.failed) == (len(SIZES), {})
        for count in (8, 3, 1):
            x[:count] = torch.randn(count, WIDTH, device=device)
            batch = manager.dispatch(count)
            found = manager.run(batch, forward)
            torch.testing.assert_close(found[:count], forward(NONE, batch.descriptor)[:count])
        assert not manager.stats.eager
        manager.reset()
        del then[0]
    assert manager.stats.replays == 6


def test_a_size_that_failed_is_captured_after_a_reset(engine: Engine) -> None:
    def failing(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        return engine.forward(mode, descriptor) * float(engine.x.sum())

    manager = engine.manager
    assert len(manager.capture(failing).failed) == len(SIZES)
    assert not manager.needs_capture()
    manager.reset()
    assert manager.capture(engine.forward).captured == len(SIZES)
    engine.step(3)
    assert (manager.stats.replays, manager.stats.eager.total()) == (1, 0)


def test_dropped_graphs_give_their_memory_back(engine: Engine, measured: None) -> None:
    manager = engine.manager
    if not manager.device.emulated:
        pytest.skip("tests/gpu measures this on a GPU")
    before = reserved(manager.device)
    for _ in range(3):
        manager.capture(engine.forward)
        assert reserved(manager.device) >= before + 8 * WIDTH * 4
        manager.reset()
        assert reserved(manager.device) == before


def test_nested_outputs_come_back_as_the_forward_made_them(device: torch.device) -> None:
    x = torch.zeros(8, WIDTH, device=device)
    manager = CudaGraphManager(device=device, capture_sizes=[2, 8], progress=False)

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Any:
        rows = x[: descriptor.num_tokens]
        return {"hidden": rows * 2, "extra": [rows + 1, (None, descriptor.num_tokens)]}

    manager.capture(forward)
    x.fill_(3)
    result = manager.run(manager.dispatch(5), forward)
    assert result["hidden"].tolist() == [[6.0] * WIDTH] * 8
    assert result["extra"][0].tolist() == [[4.0] * WIDTH] * 8
    assert result["extra"][1] == (None, 8)


def test_memory_only_the_forward_knows_is_kept_alive(device: torch.device) -> None:
    manager = CudaGraphManager(device=device, capture_sizes=SIZES, progress=False)
    made: dict[int, Tensor] = {}

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        count = descriptor.num_tokens
        return made[count] * 2

    for size in SIZES:
        made[size] = torch.full((size, WIDTH), float(size), device=device)
    manager.capture(forward)
    made.clear()  # the engine forgot; the graphs must not read freed memory
    junk = [torch.full((size, WIDTH), float("nan"), device=device) for size in SIZES * 10]
    for size in SIZES:
        assert manager.replay(manager.dispatch(size)).unique().tolist() == [2.0 * size]
    assert len(junk) == 40


# What the numbers say.


def test_every_graph_reports_its_seconds_bytes_and_replays(engine: Engine, measured: None) -> None:
    summary = engine.manager.capture(engine.forward)
    for count in (3, 4, 7):
        engine.step(count)
    report = engine.manager.report().to_dict()
    assert [graph["size"] for graph in report["graphs"]] == SIZES
    assert all(graph["seconds"] > 0 for graph in report["graphs"])
    assert [graph["replays"] for graph in report["graphs"]] == [0, 0, 2, 1]
    assert report["graph_bytes"] == sum(graph["bytes"] for graph in report["graphs"])
    assert 0 < report["capture_seconds"] <= summary.seconds
    if engine.manager.device.emulated:
        largest = max(report["graphs"], key=lambda graph: graph["size"])
        assert largest["bytes"] >= 8 * WIDTH * 4
        assert summary.bytes >= report["graph_bytes"] > 0
        assert all(graph["nodes"] >= 2 for graph in report["graphs"])
    assert json.loads(engine.manager.report().to_json()) == json.loads(json.dumps(report))
    text = str(engine.manager.report())
    assert "4 graphs" in text
    assert "3 replays, 2 padded tokens, 0 eager calls" in text


def test_the_memory_estimate_measures_and_leaves_nothing(device: torch.device, measured: None) -> None:
    engine = Engine(device, capture_sizes=[16, 32, 64])
    manager = engine.manager
    before = reserved(manager.device)
    estimate = manager.memory_estimate(engine.forward)
    assert estimate.graphs == 3
    assert estimate.bytes == estimate.first_bytes + 2 * estimate.next_bytes
    assert manager.needs_capture()
    assert manager.programs == {}
    assert manager.stats.captures == 0
    assert {descriptor.num_tokens for _, descriptor, capturing in engine.runs if capturing} == {64, 32, 16}
    if manager.device.emulated:
        assert reserved(manager.device) == before
        manager.capture(engine.forward)
        graphs = {graph.size: graph.bytes for graph in manager.stats.graphs.values()}
        assert (estimate.first_bytes, 2 * estimate.next_bytes) == (graphs[64], graphs[32] + graphs[16])
        assert estimate.bytes == manager.stats.graph_bytes
        assert estimate.first_bytes >= 64 * WIDTH * 4
    else:
        manager.capture(engine.forward)
    engine.step(40)
    assert manager.stats.replays == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"capture_sizes": sg.default_sizes(64)},
        {"capture_sizes": [1, 2, 4, 8, 16, 32, 64]},
        {"capture_sizes": range(1, 65)},
        {"mode": "FULL_AND_PIECEWISE", "capture_sizes": range(1, 65), "max_num_seqs": 32},
    ],
)
def test_the_estimate_is_what_all_graphs_take(device: torch.device, settings: Any) -> None:
    """On the emulator, whose memory is that of the tensors; a GPU's is in tests/gpu."""
    if device.type == "cuda":
        pytest.skip("a few KiB, in a device's steps of 2 MiB")
    engine = Engine(device, **settings)
    estimate = engine.manager.memory_estimate(engine.forward)
    assert estimate.emulated
    assert "(emulated: tensors only)" in str(estimate)
    summary = engine.manager.capture(engine.forward)
    assert estimate.graphs == summary.captured
    assert abs(estimate.bytes - engine.manager.stats.graph_bytes) <= 0.05 * engine.manager.stats.graph_bytes


def test_an_estimate_of_what_cannot_be_captured_is_an_error_and_not_zero(engine: Engine) -> None:
    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Any:
        return engine.x.sum().item()

    with pytest.raises(CaptureError, match="batch size 8"):
        engine.manager.memory_estimate(forward)
    assert engine.manager.capture(engine.forward).failed == {}


def test_an_estimate_without_graphs_is_nothing(device: torch.device) -> None:
    engine = Engine(device, mode="NONE")
    assert engine.manager.memory_estimate(engine.forward).bytes == 0
    assert Engine(device, capture_sizes=[4]).manager.memory_estimate(engine.forward).graphs == 1


# Modes and keys.


def test_full_takes_decode_and_mixed_batches_alike(device: torch.device) -> None:
    engine = Engine(device, mode="FULL")
    engine.manager.capture(engine.forward)
    assert engine.step(3, 3, 1).mode is FULL
    assert engine.step(3).mode is FULL
    assert engine.manager.stats.replays == 2


def test_full_decode_only_replays_decode_and_runs_mixed_batches_eagerly(device: torch.device) -> None:
    engine = Engine(device, mode="FULL_DECODE_ONLY")
    assert engine.manager.capture(engine.forward).captured == 4
    assert engine.step(3, 3, 1) == (FULL, BatchDescriptor(4, 4, 1), Reason.PADDED, 1)
    assert engine.step(3).mode is NONE
    assert engine.step(6, 2).mode is NONE
    assert engine.manager.stats.replays == 1
    assert engine.manager.stats.eager == {Reason.MIXED_BATCH: 2}


def test_full_and_piecewise_keeps_two_graphs_of_every_size_apart(device: torch.device) -> None:
    engine = Engine(device, mode="FULL_AND_PIECEWISE", capture_sizes=[2, 4])
    x, calls = engine.x, []

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        calls.append(mode)
        return x[: descriptor.num_tokens] * (10 if mode is FULL else 20)

    summary = engine.manager.capture(forward)
    assert summary.captured == 4
    assert calls.count(FULL) + calls.count(PIECEWISE) == len(calls)
    x.fill_(1)
    manager = engine.manager
    assert manager.run(manager.dispatch(3, 3, 1), forward).unique().tolist() == [10]
    assert manager.run(manager.dispatch(3), forward).unique().tolist() == [20]
    assert manager.run(manager.dispatch(3, 3, 1, allow_full=False), forward).unique().tolist() == [20]
    assert manager.stats.replays == 3
    assert {(graph.mode, graph.size): graph.replays for graph in manager.stats.graphs.values()} == {
        ("FULL", 2): 0,
        ("FULL", 4): 1,
        ("PIECEWISE", 2): 0,
        ("PIECEWISE", 4): 2,
    }


def test_mode_none_captures_nothing_and_counts_why(device: torch.device) -> None:
    engine = Engine(device, mode="NONE")
    assert not engine.manager.needs_capture()
    assert engine.manager.capture(engine.forward).captured == 0
    assert engine.runs == []
    engine.step(3)
    assert engine.manager.stats.eager == {Reason.SWITCHED_OFF: 1}


def test_lora_counts_have_graphs_of_their_own(device: torch.device) -> None:
    engine = Engine(device, capture_sizes=[2, 4], lora_cases=(0, 1, 4))
    x = engine.x

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        return x[: descriptor.num_tokens] + descriptor.num_active_loras

    manager = engine.manager
    assert manager.capture(forward).captured == 6
    found = {
        loras: manager.run(manager.dispatch(3, None, None, loras), forward).unique().tolist() for loras in range(5)
    }
    assert found == {0: [0], 1: [1], 2: [4], 3: [4], 4: [4]}
    assert manager.stats.replays == 5
    assert manager.run(manager.dispatch(3, None, None, 5), forward).unique().tolist() == [5]
    assert manager.stats.eager == {Reason.BATCH_TOO_LARGE: 1}
    assert "batch size 4, 1 LoRAs" in {graph.label for graph in manager.stats.graphs.values()}


def test_graphs_keyed_by_requests_are_found_by_batches_of_fewer(device: torch.device) -> None:
    engine = Engine(device, max_num_seqs=4, max_num_tokens=8)
    engine.manager.capture(engine.forward)
    engine.runs.clear()
    for tokens, requests in ((8, 3), (7, 4), (3, 1), (1, 1)):
        assert engine.step(tokens, requests).mode is FULL
    assert engine.runs == []
    assert engine.manager.stats.replays == 4


def count_calls(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def counted(*args: Any) -> Any:
        calls.append(args)
        return function(*args)

    return counted


def test_a_replay_makes_no_new_program_and_asks_the_forward_nothing(engine: Engine) -> None:
    calls: list[Any] = []
    forward = count_calls(engine.forward, calls)
    engine.manager.capture(forward)
    captured = len(calls)
    programs = dict(engine.manager.programs)
    for count in (1, 5, 8) * 10:
        engine.manager.run(engine.manager.dispatch(count), forward)
    assert len(calls) == captured
    assert engine.manager.programs == programs
    assert engine.manager.stats.replays == 30


def test_attention_of_uniform_batches_gets_full_decode_graphs(device: torch.device) -> None:
    manager = CudaGraphManager(
        device=device, mode="FULL_DECODE_ONLY", capture_sizes=[4], support=sg.AttentionCGSupport.UNIFORM_BATCH
    )
    assert manager.dispatch(4, 4, 1).mode is sg.CudaGraphMode.FULL
    assert manager.dispatch(4, 2).mode is sg.CudaGraphMode.NONE


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="emulator"):
        CudaGraphManager(device="cuda")
