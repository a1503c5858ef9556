"""A graph owns nothing outside its pool, and every replay takes the whole pool."""

from __future__ import annotations

import functools
import gc

import numpy as np
import pytest
import torch
from torch import Tensor

from simplegraph.base.errors import EmulatorError, ReplayError
from simplegraph.device.emulator.arena import Memory
from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import capture, device


def test_reading_memory_that_was_freed_is_an_error_not_a_wrong_answer(pool: GraphPool) -> None:
    weight, x = torch.ones(3), torch.ones(3)
    holder = [weight]
    segment, output = capture(pool, lambda: x * holder[0])
    del weight
    segment.replay()
    assert output.tolist() == [1, 1, 1]
    holder.clear()
    with pytest.raises(EmulatorError, match=r"replay reads memory that was freed: aten\.mul.*\(3,\)"):
        segment.replay()


def test_memory_of_another_device_is_left_alone(pool: GraphPool) -> None:
    storage = torch.empty(3, device="meta").untyped_storage()  # its address means nothing to the CPU, as a GPU's does
    memory = Memory(storage, "aten.to", pool.handle, 0xFF)
    assert memory.reusable()
    del memory  # which would end the process


def test_a_moved_input_is_an_error_not_a_wrong_answer(pool: GraphPool) -> None:
    x = torch.ones(3)
    segment, _ = capture(pool, lambda: x * 2)
    x.resize_(1000)
    with pytest.raises(EmulatorError, match="freed"):
        segment.replay()


def test_numbers_written_in_the_forward_live_as_long_as_the_graph(pool: GraphPool) -> None:
    x = torch.tensor([-1.0, 2.0])

    def forward() -> Tensor:
        offset = torch.tensor(3.0)
        offset += 1
        return torch.where(x > 0, x * 2, 0.5) + offset + np.float64(1)

    segment, output = capture(pool, forward)
    for _ in range(2):
        segment.replay()
        assert output.tolist() == [5.5, 9]


def test_a_number_cached_during_capture_still_works_eagerly(pool: GraphPool) -> None:
    cached, x = [], torch.ones(2)
    segment, output = capture(pool, lambda: x * (cached.append(torch.tensor(3.0)) or cached[0]))  # type: ignore[func-returns-value]
    assert cached[0] == 3
    cached[0].fill_(9)
    segment.replay()
    assert output.tolist() == [3, 3]
    assert cached[0] == 9


def test_another_graphs_replay_overwrites_outputs_of_the_same_pool(pool: GraphPool) -> None:
    x = torch.ones(2)
    small, small_output = capture(pool, lambda: x + 1)
    large, large_output = capture(pool, lambda: x + 2)
    other, other_output = capture(device.new_pool(), lambda: x + 3)
    small.replay()
    other.replay()
    assert small_output.tolist() == [2, 2]
    large.replay()
    assert small_output.isnan().all()
    assert large_output.tolist() == [3, 3]
    assert other_output.tolist() == [4, 4]
    small.replay()
    assert large_output.isnan().all()


def test_segments_of_one_program_see_each_others_results(pool: GraphPool) -> None:
    x, bridge = torch.ones(2), torch.zeros(2)
    first, hidden = capture(pool, lambda: x + 1)
    second, output = capture(pool, lambda: hidden * 2 + bridge, continues=True)
    for value in (1, 5):
        x.fill_(value)
        first.replay()
        bridge.copy_(hidden * 10)
        second.replay()
        assert output.tolist() == [12 * (value + 1)] * 2
        assert hidden.tolist() == [value + 1] * 2


def test_memory_that_died_before_a_segment_is_undefined_after_it(pool: GraphPool) -> None:
    x = torch.ones(2)
    first, (kept, dropped) = capture(pool, lambda: (x + 1, x + 2))
    borrowed = device.borrow(pool, dropped)
    del dropped
    second, output = capture(pool, lambda: x + 3, continues=True)
    first.replay()
    assert borrowed.tolist() == [3, 3]
    second.replay()
    assert borrowed.isnan().all()
    assert kept.tolist() == [2, 2]
    assert output.tolist() == [4, 4]


def test_a_borrowed_tensor_is_the_same_memory_in_a_later_segment(pool: GraphPool) -> None:
    x = torch.ones(2, 3)
    first, hidden = capture(pool, lambda: (x + 1).t())
    second, output = capture(pool, functools.partial(torch.mul, device.borrow(pool, hidden), 2), continues=True)
    first.replay()
    second.replay()
    assert output.shape == (3, 2)
    assert output.unique().tolist() == [4]


def test_borrowing_memory_that_is_no_pools_gives_it_back_as_it_is(pool: GraphPool) -> None:
    x = torch.ones(2)
    assert device.borrow(pool, x) is x


def test_only_captured_memory_is_in_its_pool(pool: GraphPool) -> None:
    x = torch.ones(4)
    gc.collect()  # memory of graphs that tests before this one dropped
    before = device.free_memory()
    segment, output = capture(pool, lambda: x.view(2, 2) * 2)
    assert device.in_pool(pool, output[1])
    assert device.in_pool(pool, device.borrow(pool, output))
    assert not device.in_pool(pool, x)
    assert not device.in_pool(pool, x.to_sparse())
    assert not device.in_pool(device.new_pool(), output)
    assert before - device.free_memory() == 16
    segment.reset()
    device.release_pool(pool)
    assert device.free_memory() == before


def test_a_dropped_graph_says_so(pool: GraphPool) -> None:
    x = torch.ones(2)
    segment, output = capture(pool, lambda: x * 2)
    assert segment.num_nodes == 1
    with pytest.raises(EmulatorError, match="1 graphs"):
        device.release_pool(pool)
    segment.replay()
    segment.reset()
    segment.reset()
    assert output.tolist() == [2, 2]
    with pytest.raises(ReplayError, match="capture it again"):
        segment.replay()
    device.release_pool(pool)
    with pytest.raises(EmulatorError, match="was released"):
        capture(pool, lambda: x * 2)


def test_resizing_a_captured_output_is_an_error(pool: GraphPool) -> None:
    x = torch.ones(2)
    segment, output = capture(pool, lambda: x * 2)
    output.resize_(1000)
    with pytest.raises(EmulatorError, match="was resized"):
        segment.replay()
