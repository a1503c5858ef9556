"""Calls during somebody else's capture."""

from __future__ import annotations

import pytest
import torch
from troubled import SIZES, replayed, right, rows, warm, wrapped

from simplegraph import InputError, Reason
from simplegraph.graph.select import graph_device

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
        assert model.graph_stats.eager[Reason.CAPTURING_ELSEWHERE] == 1
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
