"""Captures that fail, are interrupted or come at the wrong time leave the other sizes whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import (
    BatchDescriptor,
    CaptureError,
    ConfigError,
    CudaGraphManager,
    CudaGraphMode,
    InputError,
    Reason,
)
from simplegraph.program.program import Program
from tests.manager.engines import Engine

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


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


def test_a_graph_that_the_driver_cannot_instantiate_is_dropped_and_the_others_replay(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = Program.wait

    def without_memory(program: Program) -> None:
        wait(program)
        if program.outputs[0].shape[0] == 2:
            raise torch.OutOfMemoryError("no room for the nodes")

    monkeypatch.setattr(Program, "wait", without_memory)
    summary = engine.manager.capture(engine.forward)
    assert summary.captured == 3
    assert "no room for the nodes" in str(summary.failed["batch size 2"])
    for count in (8, 2, 1):
        engine.step(count)
    assert engine.manager.stats.replays == 2
    assert engine.manager.stats.eager == {Reason.CAPTURE_FAILED: 1}


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
    assert "(capture_sizes)" in str(summary.failed["batch size 8"])
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
        segment.wait()
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
        segment.wait()
    engine.x.fill_(2)
    segment.replay()
    torch.testing.assert_close(output, engine.model(engine.x[:4]) * 2)
    assert manager.stats.eager == {Reason.BUSY: 1}
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
    assert str(engine.manager.capture(engine.forward)).endswith(": graphs are switched off")
    engine.step(3)
    assert engine.manager.stats.eager == {Reason.SWITCHED_OFF: 1}
