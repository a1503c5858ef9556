"""One capture per thread and pool, on a stream of its own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph.base.errors import EmulatorError
from simplegraph.device.emulator.arena import DEFAULT_STREAM
from simplegraph.device.emulator.device import CAPTURE_STREAM
from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import capture, device


@pytest.mark.parametrize(
    ("illegal", "message"),
    [
        (lambda segment, pool: segment.replay(), "replayed in a capture"),
        (lambda segment, pool: device.begin(pool), "inside another"),
        (lambda segment, pool: device.synchronize(), "synchronised"),
        (lambda segment, pool: device.wait_for(DEFAULT_STREAM), "waited for work that is not captured"),
    ],
)
def test_what_a_capture_does_not_permit(pool: GraphPool, illegal: Any, message: str) -> None:
    x = torch.ones(2)
    segment, output = capture(pool, lambda: x + 1)
    with pytest.raises(EmulatorError, match=message):
        capture(pool, lambda: illegal(segment, pool))
    segment.replay()
    assert output.tolist() == [2, 2]


def test_the_default_stream_cannot_be_captured(pool: GraphPool) -> None:
    with pytest.raises(EmulatorError, match="default stream"):
        device.begin(pool)


def test_a_capture_ends_on_the_stream_it_began_on(pool: GraphPool) -> None:
    with device.stream(7):
        device.begin(pool)
    with pytest.raises(EmulatorError, match="began on"):
        device.end()
    device.abandon()


def test_other_threads_run_eagerly_while_one_captures(pool: GraphPool) -> None:
    x, seen = torch.ones(2), []

    def elsewhere() -> None:
        seen.extend([device.is_capturing(), x.sum().item(), device.current_stream()])
        with device.on_capture_stream(), pytest.raises(EmulatorError, match="recording another"):
            device.begin(pool)

    def forward() -> Tensor:
        assert device.is_capturing()
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return x * 2

    segment, output = capture(pool, forward)
    segment.replay()
    assert seen == [False, 2.0, DEFAULT_STREAM]
    assert (segment.num_nodes, output.tolist()) == (1, [2, 2])


def test_the_capture_stream_is_ordered_after_and_before_the_callers() -> None:
    device.waits.clear()
    with device.stream(5):
        with device.on_capture_stream():
            assert device.current_stream() == CAPTURE_STREAM
            with device.on_capture_stream():
                pass
        assert device.current_stream() == 5
    assert list(device.waits) == [(CAPTURE_STREAM, 5), (5, CAPTURE_STREAM)]


def test_a_replay_that_races_with_one_on_another_stream_is_found(pool: GraphPool) -> None:
    x = torch.ones(2)
    segment, _ = capture(pool, lambda: x * 2)
    with device.stream(2):
        segment.replay()
    with device.stream(3):
        with pytest.raises(EmulatorError, match="stream 2 may still be using"):
            segment.replay()
        device.wait_for(2)
        segment.replay()
    with device.stream(4):
        device.synchronize()
        segment.replay()
    device.wait_for(4)
    segment.replay()


def test_synchronisations_and_cache_releases_can_be_counted() -> None:
    before = (device.synchronizations, device.cache_releases())
    device.synchronize()
    device.release_cached_memory()
    assert (device.synchronizations, device.cache_releases()) == (before[0] + 1, before[1] + 1)


def test_a_break_inside_the_users_own_modes_leaves_them_as_they_were(pool: GraphPool) -> None:
    x = torch.ones(2)
    with device.on_capture_stream(), torch.no_grad():
        device.begin(pool)
        with torch.device("cpu"):
            hidden = x + torch.zeros(2)
            first = device.end()
            device.begin(pool, continues=True)
            output = hidden * 3
        after = output + 1
        second = device.end()
    first.replay()
    second.replay()
    assert (output.tolist(), after.tolist()) == ([3, 3], [4, 4])
