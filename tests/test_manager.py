"""The manager, as an engine uses it: its own buffers, its own loop, and every batch on the graph it should be on."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import (
    AttentionCGSupport,
    BatchDescriptor,
    CaptureError,
    ConfigError,
    CudaGraphManager,
    CudaGraphMode,
    GraphHooks,
    InputError,
    Reason,
    ReplayError,
)
from simplegraph.graph.select import graph_device

FULL, PIECEWISE, NONE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE, CudaGraphMode.NONE
SIZES = [1, 2, 4, 8]
WIDTH = 6


@pytest.fixture(autouse=True)
def _nothing_left_behind(device: torch.device) -> Iterator[None]:
    graphs = graph_device(device)
    stream = graphs.current_stream()
    with torch.no_grad():
        yield
    assert graphs.current_stream() == stream
    assert not graphs.is_capturing()


class Engine:
    """Buffers of the largest size, a model that reads their first rows, and a note of every eager run."""

    def __init__(self, device: torch.device, **settings: Any) -> None:
        settings.setdefault("capture_sizes", SIZES)
        self.device = device
        self.manager = CudaGraphManager(device=device, progress=False, **settings)
        self.model = nn.Linear(WIDTH, WIDTH).to(device).eval()
        self.x = torch.zeros(64, WIDTH, device=device)
        self.runs: list[tuple[CudaGraphMode, BatchDescriptor, bool]] = []

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        self.runs.append((mode, descriptor, self.manager.device.is_capturing()))
        return self.model(self.x[: descriptor.num_tokens]) * 2

    def step(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """One step, checked: the answer is right and padding rows of the last step do not matter."""
        batch = self.manager.dispatch(num_tokens, *args, **kwargs)
        rows = torch.randn(num_tokens, WIDTH, device=self.device)
        self.x.fill_(float("nan"))
        self.x[:num_tokens] = rows
        output = self.manager.run(batch, self.forward)
        assert output.shape[0] == batch.descriptor.num_tokens
        torch.testing.assert_close(output[:num_tokens], self.model(rows) * 2)
        return batch

    @property
    def eager_runs(self) -> int:
        return sum(not capturing for _, _, capturing in self.runs)


@pytest.fixture
def measured() -> None:
    gc.collect()  # graphs of other tests, in cycles of theirs, must not be freed while this one measures


@pytest.fixture
def engine(device: torch.device) -> Engine:
    return Engine(device)


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


def test_dropped_graphs_give_their_memory_back(engine: Engine, measured: None) -> None:
    manager = engine.manager
    if not manager.device.emulated:
        pytest.skip("tests/gpu measures this on a GPU")
    before = manager.device.memory().reserved
    for _ in range(3):
        manager.capture(engine.forward)
        assert manager.device.memory().reserved >= before + 8 * WIDTH * 4
        manager.reset()
        assert manager.device.memory().reserved == before


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
    before = manager.device.memory()
    estimate = manager.memory_estimate(engine.forward)
    assert estimate.graphs == 3
    assert estimate.bytes == estimate.first_bytes + 2 * estimate.next_bytes
    assert manager.needs_capture()
    assert manager.programs == {}
    assert manager.stats.captures == 0
    assert {descriptor.num_tokens for _, descriptor, capturing in engine.runs if capturing} == {64, 32}
    if manager.device.emulated:
        assert manager.device.memory().reserved == before.reserved
        manager.capture(engine.forward)
        graphs = {graph.size: graph.bytes for graph in manager.stats.graphs.values()}
        assert (estimate.first_bytes, estimate.next_bytes) == (graphs[64], graphs[32])
        assert estimate.first_bytes >= 64 * WIDTH * 4
    else:
        manager.capture(engine.forward)
    engine.step(40)
    assert manager.stats.replays == 1


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


# Hooks.


class Notes(GraphHooks):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.seen: list[tuple[str, int, bool]] = []
        self.scale = torch.ones((), device=engine.device)
        self.joined = torch.zeros((), device=engine.device)

    def _note(self, name: str, descriptor: BatchDescriptor) -> None:
        self.seen.append((name, descriptor.num_tokens, self.engine.manager.device.is_capturing()))

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._note("before_capture", descriptor)

    def before_replay(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._note("before_replay", descriptor)
        self.engine.x.mul_(2)  # as attention plans what the graph then reads

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._note("end_of_forward", descriptor)
        self.joined.add_(1)


def test_hooks_run_outside_and_inside_the_graph_as_they_should(device: torch.device) -> None:
    engine = Engine(device, capture_sizes=[2, 4])
    notes = Notes(engine)
    engine.manager.add_hooks(notes)
    engine.manager.capture(engine.forward)
    assert notes.seen == [
        ("before_capture", 4, False),
        ("end_of_forward", 4, True),
        ("before_capture", 2, False),
        ("end_of_forward", 2, True),
    ]
    assert notes.joined.item() == 0, "capturing executes nothing"
    notes.seen.clear()
    engine.x.fill_(1)
    output = engine.manager.replay(engine.manager.dispatch(3))
    torch.testing.assert_close(output, engine.model(torch.full((4, WIDTH), 2.0, device=device)) * 2)
    assert notes.seen == [("before_replay", 4, False)]
    assert notes.joined.item() == 1, "what a hook did at the end of the forward is in the graph"


class Failing(GraphHooks):
    def __init__(self, where: str, size: int) -> None:
        self.where, self.size = where, size

    def before_capture(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._fail("before_capture", descriptor)

    def end_of_forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> None:
        self._fail("end_of_forward", descriptor)

    def _fail(self, where: str, descriptor: BatchDescriptor) -> None:
        if (where, descriptor.num_tokens) == (self.where, self.size):
            raise LookupError(f"{where} of {self.size}")


@pytest.mark.parametrize("where", ["before_capture", "end_of_forward"])
def test_a_hook_that_fails_at_a_capture_costs_that_size_only(engine: Engine, where: str) -> None:
    engine.manager.add_hooks(Failing(where, 4))
    summary = engine.manager.capture(engine.forward)
    assert summary.captured == 3
    assert f"LookupError: {where} of 4" in str(summary.failed["batch size 4"])
    for count in (8, 3, 2, 1):
        engine.step(count)
    assert engine.manager.stats.replays == 3
    assert engine.manager.stats.eager == {Reason.CAPTURE_FAILED: 1}


def test_hooks_that_come_too_late_or_can_do_less_than_the_manager_was_made_for_are_refused(engine: Engine) -> None:
    class Weak(GraphHooks):
        support = AttentionCGSupport.NEVER

    with pytest.raises(ConfigError, match="Weak supports NEVER, the manager was made for ALWAYS"):
        engine.manager.add_hooks(Weak())
    with pytest.raises(ConfigError, match="hooks is str"):
        engine.manager.add_hooks("x")  # type: ignore[arg-type]
    engine.manager.capture(engine.forward)
    with pytest.raises(ConfigError, match="add hooks before capture"):
        engine.manager.add_hooks(GraphHooks())
    assert engine.manager.hooks == []


def test_support_by_name_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="support is 'ALWAYS'"):
        CudaGraphManager(device=device, support="ALWAYS")  # type: ignore[arg-type]


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
    assert engine.manager.stats.eager == {Reason.MODE_NONE: 1}


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
    assert manager.stats.eager == {Reason.LORA_COUNT: 1}
    assert "batch size 4, 1 LoRAs" in {graph.label for graph in manager.stats.graphs.values()}


def test_graphs_keyed_by_requests_are_found_by_batches_of_fewer(device: torch.device) -> None:
    engine = Engine(device, max_num_seqs=4, max_num_tokens=8)
    engine.manager.capture(engine.forward)
    engine.runs.clear()
    for tokens, requests in ((8, 3), (7, 4), (3, 1), (1, 1)):
        assert engine.step(tokens, requests).mode is FULL
    assert engine.runs == []
    assert engine.manager.stats.replays == 4


# Failures.


def test_a_size_that_cannot_be_captured_runs_eagerly_and_the_others_replay(engine: Engine) -> None:
    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        output = engine.forward(mode, descriptor)
        if descriptor.num_tokens == 2:
            output.sum().item()
        return output

    manager = engine.manager
    summary = manager.capture(forward)
    assert summary.captured == 3
    assert "output.sum().item()" in str(summary.failed["batch size 2"])
    assert not manager.needs_capture(), "what failed is not tried for ever"
    for count in (8, 2, 1):
        engine.step(count)
    assert manager.stats.replays == 2
    assert manager.stats.eager == {Reason.CAPTURE_FAILED: 1}


def test_asked_to_raise_the_others_are_captured_all_the_same(device: torch.device) -> None:
    engine = Engine(device, on_capture_failure="raise")

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        if descriptor.num_tokens == 4:
            raise ZeroDivisionError("four")
        return engine.forward(mode, descriptor)

    with pytest.raises(CaptureError, match="ZeroDivisionError: four"):
        engine.manager.capture(forward)
    for count in (8, 2, 1):
        engine.step(count)
    assert engine.manager.stats.replays == 3


def test_an_interrupted_capture_can_be_taken_up_again(engine: Engine) -> None:
    interrupts = [True]

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        if descriptor.num_tokens == 2 and interrupts:
            interrupts.pop()
            raise KeyboardInterrupt
        return engine.forward(mode, descriptor)

    with pytest.raises(KeyboardInterrupt):
        engine.manager.capture(forward)
    assert engine.manager.needs_capture()
    for count in (8, 4, 2, 1):
        engine.step(count)
    engine.manager.capture(forward)
    assert not engine.manager.needs_capture()
    before = engine.manager.stats.replays
    for count in (8, 4, 2, 1):
        engine.step(count)
    assert engine.manager.stats.replays == before + 4


def test_a_largest_size_that_cannot_even_run_costs_itself_only(engine: Engine) -> None:
    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        if descriptor.num_tokens == 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return engine.forward(mode, descriptor)

    summary = engine.manager.capture(forward)
    assert [*summary.failed] == ["batch size 8"]
    assert "max_capture_size" in str(summary.failed["batch size 8"])
    assert summary.captured == 3
    for count in (4, 3, 2, 1):
        engine.step(count)
    assert engine.manager.stats.replays == 4


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_forward_whose_body_would_run_after_the_capture_is_refused(engine: Engine) -> None:
    def generator(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Any:
        yield engine.forward(mode, descriptor)

    async def coroutine(mode: CudaGraphMode, descriptor: BatchDescriptor) -> Any:
        return engine.forward(mode, descriptor)

    for forward, kind in ((generator, "generator"), (coroutine, "coroutine")):
        with pytest.raises(InputError, match=f"returned a {kind}, .* return its values"):
            engine.manager.capture(forward)
    assert engine.manager.capture(engine.forward).captured == 4


def test_capturing_during_another_capture_is_refused_and_that_one_goes_on(engine: Engine) -> None:
    manager, graphs = engine.manager, engine.manager.device
    engine.model(engine.x[:4])
    pool = graphs.new_pool()
    with graphs.on_capture_stream():
        graphs.begin(pool)
        with pytest.raises(CaptureError, match="being captured"):
            manager.capture(engine.forward)
        output = engine.model(engine.x[:4]) * 2
        segment = graphs.end()
    engine.x.fill_(2)
    segment.replay()
    torch.testing.assert_close(output, engine.model(engine.x[:4]) * 2)
    assert manager.capture(engine.forward).captured == 4


def test_run_during_another_capture_is_recorded_there(engine: Engine) -> None:
    manager, graphs = engine.manager, engine.manager.device
    manager.capture(engine.forward)
    pool = graphs.new_pool()
    with graphs.on_capture_stream():
        graphs.begin(pool)
        output = manager.run(manager.dispatch(3), engine.forward)
        segment = graphs.end()
    engine.x.fill_(2)
    segment.replay()
    torch.testing.assert_close(output, engine.model(engine.x[:4]) * 2)
    assert manager.stats.eager == {Reason.CAPTURING_ELSEWHERE: 1}
    engine.step(3)
    assert manager.stats.replays == 1


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"capture_sizes": []}, ConfigError),
        ({"mode": "SOMETIMES"}, ConfigError),
        ({"no_such_setting": 1}, ConfigError),
        ({"lora_cases": ()}, ConfigError),
        ({"device": "meta"}, ConfigError),
    ],
)
def test_bad_settings_are_refused(device: torch.device, settings: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        CudaGraphManager(**{"device": device, **settings})


def test_the_environment_switches_an_engines_graphs_off(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMPLEGRAPH_MODE", "none")
    engine = Engine(device)
    engine.manager.capture(engine.forward)
    engine.step(3)
    assert engine.manager.stats.eager == {Reason.MODE_NONE: 1}


# Shared pools.


@pytest.fixture
def pair(device: torch.device) -> tuple[Engine, Engine]:
    first = Engine(device)
    return first, Engine(device, pool=first.manager.pool)


def test_two_managers_in_one_pool_replay_in_any_order(pair: tuple[Engine, Engine]) -> None:
    for engine in pair:
        engine.manager.capture(engine.forward)
    for turn, count in enumerate((3, 8, 1, 8, 8, 2, 4, 5)):
        pair[turn % 2].step(count)
    assert [engine.manager.stats.replays for engine in pair] == [4, 4]


@pytest.mark.parametrize("which", [0, 1])
def test_resetting_one_of_two_managers_in_a_pool_leaves_the_other_whole(
    pair: tuple[Engine, Engine], which: int
) -> None:
    for engine in pair:
        engine.manager.capture(engine.forward)
    pair[which].manager.reset()
    pair[1 - which].step(5)
    assert pair[1 - which].manager.stats.replays == 1
    pair[which].manager.capture(pair[which].forward)
    for engine in pair:
        engine.step(3)
        engine.step(8)
    assert pair[0].manager.pool is pair[1].manager.pool


def test_resetting_both_managers_frees_the_pool_and_both_can_capture_again(
    pair: tuple[Engine, Engine], measured: None
) -> None:
    graphs = pair[0].manager.device
    before = graphs.memory().reserved
    for _ in range(2):
        for engine in pair:
            engine.manager.capture(engine.forward)
        for engine in pair:
            engine.step(3)
        for engine in pair:
            engine.manager.reset()
        if graphs.emulated:
            assert graphs.memory().reserved == before
    for engine in reversed(pair):
        engine.manager.capture(engine.forward)
        engine.step(7)


def test_a_manager_outlives_the_one_that_made_its_pool(device: torch.device) -> None:
    first = Engine(device)
    second = Engine(device, pool=first.manager.pool)
    for engine in (first, second):
        engine.manager.capture(engine.forward)
    del engine, first
    second.step(3)
    second.manager.reset()
    second.manager.capture(second.forward)
    second.step(8)
    assert second.manager.stats.replays == 2


def test_a_pool_that_an_engine_made_itself_is_the_engines_to_release(device: torch.device) -> None:
    graphs = graph_device(device)
    pool = graphs.new_pool()
    engine = Engine(device, pool=pool)
    for _ in range(2):
        engine.manager.capture(engine.forward)
        engine.step(3)
        engine.manager.reset()
        assert engine.manager.pool is pool
    graphs.release_pool(pool)


def test_a_manager_and_a_wrapper_can_share_a_pool(device: torch.device) -> None:
    engine = Engine(device)
    model = sg.wrap(nn.Linear(4, 4).to(device).eval(), capture_sizes=[4], progress=False, pool=engine.manager.pool)
    engine.manager.capture(engine.forward)
    for _ in range(4):
        x = torch.randn(3, 4, device=device)
        torch.testing.assert_close(model(x), nn.functional.linear(x, model.weight, model.bias))
        engine.step(3)
    model.reset_graphs()
    engine.step(3)
    assert model.graph_stats.replays >= 1
    assert engine.manager.stats.replays == 5


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
