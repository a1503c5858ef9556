"""A capture session: what holds while graphs are captured, and is put back whatever happened."""

from __future__ import annotations

import gc
import json
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from run_log import run_log
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import CaptureError
from simplegraph.base.failures import user_location
from simplegraph.device.emulator.arena import DEFAULT_STREAM
from simplegraph.device.emulator.device import CAPTURE_STREAM, emulator
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.device.select import graph_device
from simplegraph.manager.capture import capture_bar
from simplegraph.program.session import CaptureSession
from tests.support.sessions import record

SIZES = [1, 2, 4, 8]


@pytest.fixture
def graphs(device: torch.device) -> GraphDevice:
    return graph_device(device)


@pytest.fixture
def pool(graphs: GraphDevice) -> GraphPool:
    return graphs.new_pool()


@pytest.fixture(autouse=True)
def _nothing_left_behind(graphs: GraphDevice) -> Iterator[None]:
    enabled, stream, cache = gc.isenabled(), graphs.current_stream(), torch.is_autocast_cache_enabled()
    with torch.no_grad():
        yield
    assert gc.isenabled() == enabled
    assert graphs.current_stream() == stream
    assert not graphs.is_capturing()
    assert torch.is_autocast_cache_enabled() == cache


class Trouble(Exception):
    pass


@pytest.mark.parametrize("thorough", [True, False])
def test_collection_is_off_during_the_session_and_back_afterwards(
    graphs: GraphDevice, pool: GraphPool, thorough: bool
) -> None:
    with CaptureSession(graphs, pool, thorough=thorough):
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("thorough", [True, False])
@pytest.mark.parametrize("error", [Trouble, KeyboardInterrupt, SystemExit])
def test_collection_is_back_after_an_error(
    graphs: GraphDevice, pool: GraphPool, thorough: bool, error: type[BaseException]
) -> None:
    with pytest.raises(error), CaptureSession(graphs, pool, thorough=thorough):
        raise error
    assert gc.isenabled()


def test_collection_that_the_user_had_switched_off_stays_off(graphs: GraphDevice, pool: GraphPool) -> None:
    gc.disable()
    try:
        with CaptureSession(graphs, pool, thorough=True):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_the_user_had_frozen_stays_frozen(graphs: GraphDevice, pool: GraphPool) -> None:
    before = gc.get_freeze_count()
    assert before > 10_000  # all libraries, by conftest.py, as servers do once they are up
    with CaptureSession(graphs, pool, thorough=True) as session:
        record(session, lambda: torch.zeros(3, device=graphs.torch_device), label="batch size 1")
    assert gc.get_freeze_count() > before / 2  # some are freed by their last reference


def test_a_thorough_session_collects_what_would_be_destroyed_during_a_capture(
    graphs: GraphDevice, pool: GraphPool
) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    gone = weakref.ref(Cycle())
    with CaptureSession(graphs, pool, thorough=True):
        assert gone() is None
        inside = weakref.ref(Cycle())
    assert inside() is None, "what the session itself left is collected at its end"


def test_objects_in_cycles_are_not_destroyed_while_a_capture_runs(graphs: GraphDevice, pool: GraphPool) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.me = self

    alive = []

    def run() -> Tensor:
        gone = weakref.ref(Cycle())
        junk = [[index] for index in range(5000)]  # enough to start a collection where it is on
        alive.append(gone() is not None and len(junk) == 5000)
        return torch.zeros(2, device=graphs.torch_device)

    with CaptureSession(graphs, pool, thorough=True) as session:
        record(session, run, label="batch size 2")
    assert alive == [True]


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts on the emulator")
def test_one_synchronise_and_one_cache_flush_serve_all_sizes() -> None:
    counted = emulator()
    model = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=[*range(1, 31)], progress=False)
    before = counted.synchronizations, counted.cache_releases()
    assert model.capture_graphs(torch.zeros(3, 4)).captured == 30
    assert (counted.synchronizations - before[0], counted.cache_releases() - before[1]) == (1, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts on the emulator")
def test_a_lazy_capture_and_a_replay_synchronise_nothing() -> None:
    counted = emulator()
    model = sg.wrap(nn.Linear(4, 4).eval(), capture_sizes=SIZES, progress=False)
    before = counted.synchronizations, counted.cache_releases()
    for _ in range(4):
        for rows in (8, 3):
            model(torch.zeros(rows, 4))
    assert model.graph_stats.replays >= 4
    assert (counted.synchronizations, counted.cache_releases()) == before


class Records(nn.Module):
    """Notes where each of its runs happens."""

    def __init__(self, graphs: GraphDevice) -> None:
        super().__init__()
        self.graphs = graphs
        self.log = run_log()

    @property
    def runs(self) -> list[tuple[int, bool, int]]:
        return self.log()

    def forward(self, x: Tensor) -> Tensor:
        self.log(x.shape[0], self.graphs.is_capturing(), self.graphs.current_stream())
        return x * 2


def test_sizes_are_captured_largest_first_after_one_warmup_of_the_largest(graphs: GraphDevice) -> None:
    module = Records(graphs).eval()
    model = sg.wrap(module, capture_sizes=[4, 1, 16, 2], progress=False)
    model.capture_graphs(torch.zeros(3, 4, device=graphs.torch_device))
    assert [run[:2] for run in module.runs] == [
        (16, False),
        (8, False),  # other rows, so that no batch dimension is a guess
        (16, True),
        (4, True),
        (2, True),
        (1, True),
    ]


def test_captures_run_on_one_stream_for_all_and_calls_that_are_warmups_on_the_callers(graphs: GraphDevice) -> None:
    modules = [Records(graphs).eval() for _ in range(2)]
    x = torch.zeros(4, 4, device=graphs.torch_device)
    models = [sg.wrap(module, capture_sizes=SIZES, progress=False) for module in modules]
    models[0].capture_graphs(x)
    for _ in range(4):
        models[1](x)
    called = {captures: {run[2] for run in modules[1].runs if run[1] is captures} for captures in (False, True)}
    assert called[False] == {graphs.current_stream()}

    def elsewhere() -> None:
        with torch.no_grad():
            models[0].reset_graphs()
            models[0].capture_graphs(x)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    streams = {run[2] for run in modules[0].runs} | called[True]
    assert len(streams) == 1
    assert graphs.current_stream() not in streams
    if graphs.emulated:
        assert streams == {CAPTURE_STREAM}
        assert graphs.current_stream() == DEFAULT_STREAM


def test_a_capture_executes_nothing_and_its_replay_everything(graphs: GraphDevice, pool: GraphPool) -> None:
    total = torch.zeros(3, device=graphs.torch_device)
    with CaptureSession(graphs, pool, thorough=False) as session:
        program = record(session, lambda: total.add_(1), label="batch size 3")
    assert total.tolist() == [0, 0, 0]
    program.replay()
    program.replay()
    assert total.tolist() == [2, 2, 2]
    assert program.result() is program.outputs[0]
    program.drop()


def test_a_failed_capture_in_a_session_leaves_the_earlier_and_later_ones(graphs: GraphDevice, pool: GraphPool) -> None:
    x = torch.ones(3, device=graphs.torch_device)

    def trouble() -> Tensor:
        y = x * 2
        raise Trouble(f"no {y.shape[0]}")

    with CaptureSession(graphs, pool, thorough=True) as session:
        first = record(session, lambda: x * 2, label="batch size 4")
        with pytest.raises(CaptureError, match=r"batch size 2 failed(.|\n)*Trouble: no 3") as caught:
            record(session, trouble, label="batch size 2")
        second = record(session, lambda: x * 3, label="batch size 1")
    assert isinstance(caught.value.__cause__, Trouble)
    assert 'raise Trouble(f"no {y.shape[0]}")' in caught.value.location
    for value in (1.0, 5.0):
        x.fill_(value)
        for program, factor in ((first, 2), (second, 3)):
            program.replay()
            assert program.outputs[0].tolist() == [value * factor] * 3


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, StopIteration])
def test_what_is_no_ordinary_error_is_not_dressed_up_as_one(
    graphs: GraphDevice, pool: GraphPool, error: type[BaseException]
) -> None:
    def run() -> None:
        raise error

    expected = CaptureError if issubclass(error, Exception) else error
    with pytest.raises(expected), CaptureSession(graphs, pool, thorough=True) as session:
        record(session, run, label="batch size 2")
    with CaptureSession(graphs, pool, thorough=True) as session:
        program = record(session, lambda: torch.ones(2, device=graphs.torch_device), label="batch size 2")
    program.replay()
    assert program.outputs[0].tolist() == [1, 1]


def test_a_session_during_another_capture_is_refused_and_that_one_goes_on(graphs: GraphDevice, pool: GraphPool) -> None:
    x = torch.ones(3, device=graphs.torch_device)
    other = graphs.new_pool()
    with graphs.on_capture_stream():
        graphs.begin(pool)
        with pytest.raises(CaptureError, match="being captured"), CaptureSession(graphs, other, thorough=True):
            pass
        y = x * 2
        segment = graphs.end()
        segment.wait()
    segment.replay()
    assert y.tolist() == [2, 2, 2]


def test_a_session_waits_for_the_stream_that_used_the_pool_last(graphs: GraphDevice, pool: GraphPool) -> None:
    if not graphs.emulated:
        pytest.skip("the order is seen on the emulator")
    with emulator().stream(7), CaptureSession(graphs, pool, thorough=False) as session:
        program = record(session, lambda: torch.ones(2), label="batch size 2")
    with emulator().stream(9):
        graphs.wait_for(pool.stream)
        pool.stream = 9
        program.replay()
    before = len(emulator().waits)
    with CaptureSession(graphs, pool, thorough=False):
        assert (CAPTURE_STREAM, 9) in [*emulator().waits][min(before, 900) :]
        assert pool.stream == CAPTURE_STREAM


def test_after_a_session_the_callers_stream_is_the_one_to_wait_for(graphs: GraphDevice, pool: GraphPool) -> None:
    """The capture stream may be capturing for another thread by then, and waiting for it would break that."""
    if not graphs.emulated:
        pytest.skip("the order is seen on the emulator")
    with emulator().stream(7):
        with CaptureSession(graphs, pool, thorough=False) as session:
            record(session, lambda: torch.ones(2), label="batch size 2")
        assert pool.stream == 7


def test_autocasts_cache_neither_enters_a_graph_nor_leaves_it(graphs: GraphDevice, device: torch.device) -> None:
    module = nn.Linear(8, 8).to(device).eval().requires_grad_(True)
    model = sg.wrap(module, capture_sizes=SIZES, progress=False)
    x = torch.randn(4, 8, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        first = module(x)  # casts the weight, and would keep it until the block ends
        model.capture_graphs(x)
        assert torch.equal(model(x), first)
        with torch.no_grad():
            module.weight.mul_(3)
        torch.clear_autocast_cache()
        expected = module(x)
        assert torch.equal(model(x), expected), "the replay casts the weights of now"
        assert not torch.equal(expected, first)
    assert model.graph_stats.replays == 2


# The progress bar.


@pytest.mark.parametrize(("rank", "shown"), [(None, True), ("0", True), ("", True), ("1", False), ("7", False)])
def test_only_the_first_rank_shows_progress(
    graphs: GraphDevice,
    rank: str | None,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model = sg.wrap(nn.Linear(4, 4).to(graphs.torch_device).eval(), capture_sizes=SIZES)
    model.capture_graphs(torch.zeros(3, 4, device=graphs.torch_device))
    bar = capsys.readouterr().err
    assert ("Capturing CUDA graphs" in bar) == shown
    if shown:
        assert "4/4" in bar
        assert "free=" in bar
        assert "size=" in bar


def test_progress_can_be_switched_off_and_lazy_captures_have_none(
    graphs: GraphDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    x = torch.zeros(4, 4, device=graphs.torch_device)
    module = nn.Linear(4, 4).to(graphs.torch_device).eval()
    sg.wrap(module, capture_sizes=SIZES, progress=False).capture_graphs(x)
    lazy = sg.wrap(module, capture_sizes=SIZES)
    for _ in range(4):
        lazy(x)
    assert lazy.graph_stats.captures == 1
    assert capsys.readouterr().err == ""


def test_no_bar_is_written_to_a_log(
    graphs: GraphDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, x = nn.Linear(4, 4).to(graphs.torch_device).eval(), torch.zeros(4, 4, device=graphs.torch_device)
    for stream in (sys.stderr, None):  # a file or a pipe, or no stream at all, as in a program without a console
        monkeypatch.setattr(sys, "stderr", stream)
        model = sg.wrap(module, capture_sizes=SIZES)
        assert model.capture_graphs(x).captured == 4
    assert capsys.readouterr().err == ""


def test_the_bar_is_closed_when_a_capture_is_interrupted(
    graphs: GraphDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(KeyboardInterrupt), capture_bar(3, graphs, show=True):
        raise KeyboardInterrupt
    assert capsys.readouterr().err.endswith("\n")
    with capture_bar(2, graphs, show=True) as bar:
        bar.update()
        bar.update()
    assert "2/2" in capsys.readouterr().err


# Where an error came from.


def test_the_users_line_is_the_innermost_of_theirs() -> None:
    def inner(x: Any) -> Any:
        return torch.nn.functional.linear(x, x, x, x)  # type: ignore[call-arg]

    def outer(x: Any) -> Any:
        return inner(x)

    with pytest.raises(TypeError) as caught:
        outer(torch.ones(2))
    location = user_location(caught.value)
    assert location is not None
    assert "test_session.py:" in location
    assert "torch.nn.functional.linear(x, x, x, x)" in location


def test_an_error_below_the_users_line_in_the_standard_library_names_the_users_line() -> None:
    with pytest.raises(json.JSONDecodeError) as caught:
        json.loads("{")
    location = user_location(caught.value)
    assert location is not None
    assert 'json.loads("{")' in location


class ReadsBack(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x


def test_the_bar_counts_what_was_captured_and_says_where(
    graphs: GraphDevice, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model = sg.wrap(ReadsBack().to(graphs.torch_device).eval(), capture_sizes=SIZES)
    model.capture_graphs(torch.ones(4, 4, device=graphs.torch_device))
    bar = capsys.readouterr().err
    assert f"failed={len(SIZES)}" in bar
    assert f"{len(SIZES)}/{len(SIZES)}" not in bar
    assert "100%" not in bar
    assert ("(emulated)" in bar) == graphs.emulated
