"""Calls during somebody else's capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from troubled import SIZES, replayed, right, rows, warm, wrapped

from simplegraph import CaptureError, CudaGraphManager, InputError, Reason
from simplegraph.device.select import graph_device

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def test_a_call_during_another_capture_is_recorded_there_and_counted(device: torch.device) -> None:
    graphs = graph_device(device)
    for calls_before in (0, 1, 4):
        model = wrapped(device)
        x = rows(4, device)
        for _ in range(calls_before):
            right(model, x)
        model.linear(x)
        pool = graphs.new_pool()
        with graphs.on_capture_stream():
            graphs.begin(pool)
            y = model(x)
            segment = graphs.end()
            segment.wait()
        for _ in range(2):
            x.normal_()
            segment.replay()
            torch.testing.assert_close(y, model.linear(x) * 2)
        assert model.graph_stats.eager[Reason.BUSY] == 1
        warm(model, device, sizes=(4,))
        assert model.graph_stats.replays >= 1
        del y
        segment.reset()
        graphs.release_pool(pool)


def test_capture_graphs_during_another_capture_is_refused_and_breaks_neither(device: torch.device) -> None:
    graphs = graph_device(device)
    model, x = wrapped(device), rows(4, device)
    model.linear(x)
    pool = graphs.new_pool()
    with graphs.on_capture_stream():
        graphs.begin(pool)
        with pytest.raises(InputError, match="being captured"):
            model.capture_graphs(x)
        y = model.linear(x) * 2
        segment = graphs.end()
        segment.wait()
    x.normal_()
    segment.replay()
    torch.testing.assert_close(y, model.linear(x) * 2)
    assert model.capture_graphs(x).captured == len(SIZES)
    replayed(model, device)


def test_a_managers_capture_inside_another_ones_is_refused_before_it_touches_a_pool(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, linear = rows(4, device), torch.nn.Linear(4, 4).to(device).requires_grad_(False)
    inner, outer = (CudaGraphManager(capture_sizes=[2, 4], device=device, progress=False) for _ in range(2))
    x = torch.randn(4, 4, device=device)
    refused: list[str] = []
    made: list[bool] = []
    new_pool = inner.device.new_pool
    monkeypatch.setattr(inner.device, "new_pool", lambda: made.append(inner.device.is_capturing()) or new_pool())

    def step(mode: Any, descriptor: Any) -> torch.Tensor:
        return linear(x[: descriptor.num_tokens])

    def around(mode: Any, descriptor: Any) -> torch.Tensor:
        if inner.device.is_capturing():
            for attempt in (inner.capture, inner.memory_estimate):
                with pytest.raises(CaptureError, match="being captured") as error:
                    attempt(step)
                refused.append(str(error.value))
        return linear(x[: descriptor.num_tokens]) * 2

    assert outer.capture(around).captured == 2
    assert len(refused) == 4
    assert inner.capture(step).captured == 2
    assert True not in made
    x.normal_()
    torch.testing.assert_close(outer.run(outer.dispatch(4), around), linear(x) * 2)
    torch.testing.assert_close(inner.run(inner.dispatch(4), step), linear(x))
    outer.reset()
    inner.reset()
