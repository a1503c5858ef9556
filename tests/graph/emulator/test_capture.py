"""Capture does not execute, and one that fails costs nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from simplegraph.base.errors import EmulatorError
from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import assert_same, capture, device

# Capture does not execute.


def test_captured_writes_do_not_happen_until_replay(pool: GraphPool) -> None:
    cache, count = torch.zeros(4, 2), torch.zeros((), dtype=torch.long)
    slots, rows = torch.tensor([1, 3]), torch.ones(2, 2)

    def step() -> None:
        cache.index_copy_(0, slots, rows)
        count.add_(1)

    segment, _ = capture(pool, step)
    assert cache.sum() == 0
    assert count == 0
    segment.replay()
    slots.fill_(0)
    segment.replay()
    assert cache[:, 0].tolist() == [1, 1, 0, 1]
    assert count == 2


def test_writes_to_an_earlier_segments_memory_are_undone_too(pool: GraphPool) -> None:
    x = torch.ones(3)
    first, y = capture(pool, lambda: x * 2)
    first.replay()
    second, _ = capture(pool, lambda: y.add_(1), continues=True)
    assert y.tolist() == [2, 2, 2]
    first.replay()
    second.replay()
    assert y.tolist() == [3, 3, 3]


def test_captured_outputs_hold_nothing_that_could_pass_for_an_answer(pool: GraphPool) -> None:
    x = torch.ones(3)
    _, outputs = capture(
        pool, lambda: (x + 1, x.half() + 1, torch.complex(x, x), x.long() + 1, x.to(torch.uint8), x > 5, torch.empty(3))
    )
    floats = [*outputs[:3], outputs[6]]
    assert all(output.isnan().all() for output in floats)
    assert outputs[3].max() < -(2**60)
    assert outputs[4].min() == 192
    assert outputs[5].all()


def test_batch_norm_statistics_move_once_per_replay(pool: GraphPool) -> None:
    norm, x = nn.BatchNorm1d(4), torch.randn(8, 4)
    expected = copy.deepcopy(norm)
    segment, output = capture(pool, lambda: norm(x))
    assert norm.running_mean is not None
    assert norm.running_mean.sum() == 0
    for _ in range(2):
        segment.replay()
        assert_same(output, expected(x).detach())
    assert_same(norm.state_dict(), expected.state_dict())


def test_undefined_indices_of_an_earlier_segment_do_not_fail_the_capture(pool: GraphPool) -> None:
    x, table = torch.tensor([0.0, 1.0, 2.0]), torch.arange(12.0).view(4, 3)
    first, index = capture(pool, lambda: (x + 1).long())
    assert index.max() < 0
    second, row = capture(pool, lambda: table[index], continues=True)
    first.replay()
    second.replay()
    assert_same(row, table[1:])


def test_an_index_out_of_range_is_found_by_the_replay_that_has_it(pool: GraphPool) -> None:
    index, table = torch.tensor([7]), torch.arange(3.0)
    segment, row = capture(pool, lambda: table.index_select(0, index))
    with pytest.raises(IndexError):
        segment.replay()
    index.fill_(2)
    segment.replay()
    assert row.tolist() == [2]


# A capture that fails costs nothing.


def test_an_exception_in_the_forward_leaves_no_trace(pool: GraphPool) -> None:
    state, x = torch.zeros(2), torch.ones(2)
    torch.manual_seed(1)
    random_state = torch.get_rng_state()

    def forward() -> None:
        state.add_(torch.rand(2))
        raise KeyError("the user's own")

    with pytest.raises(KeyError):
        capture(pool, forward)
    assert state.tolist() == [0, 0]
    assert torch.equal(torch.get_rng_state(), random_state)
    segment, output = capture(pool, lambda: x + 1)
    segment.replay()
    assert output.tolist() == [2, 2]


def test_abandon_without_a_capture_is_harmless() -> None:
    device.abandon()
    with pytest.raises(EmulatorError, match="no capture is under way"):
        device.end()


def test_resizing_outside_memory_in_a_capture_is_an_error_and_is_undone(pool: GraphPool) -> None:
    x, out = torch.ones(100), torch.zeros(1)
    with pytest.raises(EmulatorError, match="resized"), pytest.warns(UserWarning, match="resized"):
        capture(pool, lambda: torch.add(x, x, out=out))
    assert out.untyped_storage().nbytes() == 4
