"""The emulator obeys CUDA's rules: what passes on it for the right reason passes on a GPU."""

from __future__ import annotations

import copy
import functools
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from simplegraph.errors import EmulatorError, ReplayError
from simplegraph.graph.device import GraphPool
from simplegraph.graph.emulator import CAPTURE_STREAM, DEFAULT_STREAM, EmulatorSegment, emulator

GRAD_MODES = [torch.no_grad, torch.inference_mode]
READ_BACK = "a tensor was read back to Python while its value does not exist yet"

device = emulator()


@pytest.fixture
def pool() -> GraphPool:
    return device.new_pool()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    capturing = device.is_capturing()
    device.abandon()
    assert not capturing
    assert device.current_stream() == DEFAULT_STREAM
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0


def capture(
    pool: GraphPool, run: Callable[[], Any], *, continues: bool = False, generators: tuple[torch.Generator, ...] = ()
) -> tuple[EmulatorSegment, Any]:
    with device.on_capture_stream(), torch.no_grad():
        try:
            device.begin(pool, generators, continues=continues)
            output = run()
            return device.end(), output
        except BaseException:
            device.abandon()
            raise


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    torch.utils._pytree.tree_map_only(Tensor, found.append, tree)
    return found


def assert_same(actual: Any, expected: Any) -> None:
    """Equal bit for bit, NaN for NaN."""
    assert len(leaves(actual)) == len(leaves(expected)) > 0
    for one, other in zip(leaves(actual), leaves(expected), strict=True):
        torch.testing.assert_close(one.resolve_conj(), other.resolve_conj(), rtol=0, atol=0, equal_nan=True)


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


# Replay reads the addresses seen at capture; Python does not run again.


@pytest.mark.parametrize("grad_mode", [*GRAD_MODES, torch.enable_grad])
def test_replay_computes_from_what_the_static_input_holds_now(pool: GraphPool, grad_mode: Any) -> None:
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    with grad_mode(), device.on_capture_stream():
        device.begin(pool)
        output = model(x)
        segment = device.end()
    for _ in range(2):
        x.copy_(torch.randn(4, 3))
        segment.replay()
        assert_same(output.detach(), model(x).detach())


def test_replay_does_not_see_a_parameter_that_was_replaced(pool: GraphPool) -> None:
    weight, x = nn.Parameter(torch.ones(3)), torch.ones(3)
    segment, output = capture(pool, lambda: x * weight)
    at_capture = weight.data
    weight.data = torch.full((3,), 5.0)
    segment.replay()
    assert output.tolist() == [1, 1, 1]
    at_capture.fill_(2)
    segment.replay()
    assert output.tolist() == [2, 2, 2]


def test_python_does_not_run_again(pool: GraphPool) -> None:
    x, calls = torch.ones(2), []
    segment, output = capture(pool, lambda: calls.append(1) or x * len(calls))  # type: ignore[func-returns-value]
    segment.replay()
    segment.replay()
    assert calls == [1]
    assert output.tolist() == [1, 1]


def test_the_python_of_a_custom_operator_does_not_run_again(pool: GraphPool) -> None:
    calls = []

    @torch.library.custom_op("simplegraph_tests::scale_into", mutates_args=("out",))
    def scale_into(x: Tensor, out: Tensor) -> Tensor:
        calls.append(1)
        out.copy_(x * 2)
        return x + len(calls)

    x, out = torch.ones(2), torch.zeros(2)
    segment, result = capture(pool, lambda: torch.ops.simplegraph_tests.scale_into(x, out))
    assert out.sum() == 0
    x.fill_(3)
    segment.replay()
    assert (calls, out.tolist(), result.tolist()) == ([1], [6, 6], [4, 4])


def test_a_read_back_inside_a_custom_operator_is_found(pool: GraphPool) -> None:
    @torch.library.custom_op("simplegraph_tests::longest", mutates_args=())
    def longest(lengths: Tensor) -> Tensor:
        return torch.zeros(max(lengths.tolist()))

    with pytest.raises(EmulatorError, match=READ_BACK):
        capture(pool, lambda: torch.ops.simplegraph_tests.longest(torch.ones(2, dtype=torch.long)))


def test_replay_is_not_changed_by_the_callers_autocast(pool: GraphPool) -> None:
    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    segment, output = capture(pool, lambda: model(x))
    with torch.autocast("cpu", torch.bfloat16):
        segment.replay()
    assert_same(output, model(x).detach())


# Memory: a graph owns nothing outside its pool, and every replay takes the whole pool.


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
    borrowed = device.borrow(dropped)
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
    second, output = capture(pool, functools.partial(torch.mul, device.borrow(hidden), 2), continues=True)
    first.replay()
    second.replay()
    assert output.shape == (3, 2)
    assert output.unique().tolist() == [4]


def test_borrowing_memory_that_is_no_pools_gives_it_back_as_it_is() -> None:
    x = torch.ones(2)
    assert device.borrow(x) is x


def test_only_captured_memory_is_in_its_pool(pool: GraphPool) -> None:
    x = torch.ones(4)
    before = device.memory()
    segment, output = capture(pool, lambda: x.view(2, 2) * 2)
    assert device.in_pool(pool, output[1])
    assert device.in_pool(pool, device.borrow(output))
    assert not device.in_pool(pool, x)
    assert not device.in_pool(pool, x.to_sparse())
    assert not device.in_pool(device.new_pool(), output)
    after = device.memory()
    assert after.reserved - before.reserved == before.free - after.free == 16
    segment.reset()
    device.release_pool(pool)
    assert device.memory() == before


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


# Reading back to Python.

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x.sum().item(),
    "if": lambda x: bool(x.any()),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "format": lambda x: f"{x[0]:.2f}",
    "equal": lambda x: torch.equal(x, x + 0),
    "allclose": lambda x: torch.allclose(x, x),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask_set": lambda x: x.clone().index_put_((x > 0,), x[:1]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "bincount": lambda x: x.long().bincount(),
    "one_hot": lambda x: F.one_hot(x.long()),
    "repeat": lambda x: x.repeat_interleave(x.long()),
    "inverse": lambda x: torch.linalg.inv(torch.diag(x)),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "array": lambda x: np.asarray(x),
    "print": lambda x: print(x),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "to_device": lambda x: x.to(device="cpu"),
}


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("name", READS)
def test_a_read_back_fails_at_the_line_that_does_it(pool: GraphPool, name: str, grad_mode: Any) -> None:
    x = torch.ones(3)
    with pytest.raises(EmulatorError, match=READ_BACK) as caught, grad_mode():
        capture(pool, lambda: READS[name](x + 1))
    lines = [frame.line or "" for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert any(f'"{name}": lambda' in line for line in lines)


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
def test_what_needs_no_value_is_captured(pool: GraphPool, grad_mode: Any) -> None:
    x, index = torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0, 1, 1])

    def forward() -> list[Tensor]:
        filled = x.clone()
        filled[x < 0] = 0.0
        repeated = x.repeat_interleave(index, output_size=2)
        return [filled, repeated, F.one_hot(index, 3), x.to(index.device), x[index], x[0], x[None, ::2], x.argsort()]

    with grad_mode():
        segment, outputs = capture(pool, forward)
        x.add_(1)
        index.copy_(torch.tensor([1, 0, 1]))
        segment.replay()
        assert_same(outputs, forward())


HOST_DATA: dict[str, Callable[[Tensor], object]] = {
    "list": lambda x: x + torch.tensor([1.0, 2.0]),
    "list_index": lambda x: x[[0, 1]],
    "new_tensor": lambda x: x.new_tensor([1.0, 2.0]),
    "array": lambda x: x + torch.from_numpy(np.ones(2)),
    "scalar_to_device": lambda x: torch.tensor(1.0, device=x.device),
    "pin": lambda x: torch.empty(2, pin_memory=True),
}


@pytest.mark.parametrize("name", HOST_DATA)
def test_data_from_the_host_cannot_be_captured(pool: GraphPool, name: str) -> None:
    x = torch.ones(2)
    with pytest.raises(EmulatorError, match="pinned"):
        capture(pool, lambda: HOST_DATA[name](x))


def test_a_swallowed_read_back_still_breaks_the_capture(pool: GraphPool) -> None:
    x = torch.ones(2)

    def forward() -> Tensor:
        try:
            return x * x.sum().item()
        except RuntimeError:
            return x * 2

    with pytest.raises(EmulatorError, match=r"broken earlier: a tensor was read back .*aten\.item"):
        capture(pool, forward)


# Random numbers.


def test_capture_draws_nothing_and_every_replay_draws_as_eager_would(pool: GraphPool) -> None:
    x = torch.ones(64)
    torch.manual_seed(3)
    segment, output = capture(pool, lambda: F.dropout(x, 0.5) + torch.rand(64))
    for _ in range(3):
        state = torch.get_rng_state()
        segment.replay()
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        assert_same(output, F.dropout(x, 0.5) + torch.rand(64))
        assert torch.equal(after, torch.get_rng_state())
    torch.manual_seed(3)
    first = F.dropout(x, 0.5) + torch.rand(64)
    torch.manual_seed(3)
    segment.replay()
    assert_same(output, first)


def test_a_generator_is_captured_where_the_capture_was_told_of_it(pool: GraphPool) -> None:
    generator, twin = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    segment, output = capture(pool, lambda: torch.rand(4, generator=generator), generators=(generator,))
    for _ in range(2):
        segment.replay()
        assert_same(output, torch.rand(4, generator=twin))
    with pytest.raises(EmulatorError, match="generator that the capture was not told of"):
        capture(pool, lambda: torch.rand(4, generator=generator))


@pytest.mark.parametrize("seed", [5, 6])
@pytest.mark.parametrize("draw", [lambda: torch.rand(2), lambda: None])
def test_reseeding_in_a_capture_is_an_error_and_is_undone(pool: GraphPool, seed: int, draw: Any) -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    with pytest.raises(EmulatorError, match="reseeded"):
        capture(pool, lambda: (torch.manual_seed(seed), draw()))
    assert torch.initial_seed() == 5
    assert torch.equal(torch.get_rng_state(), state)


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


# One capture per thread and pool, on a stream of its own.


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
    before = (device.synchronizations, device.cache_releases)
    device.synchronize()
    device.release_cached_memory()
    assert (device.synchronizations, device.cache_releases) == (before[0] + 1, before[1] + 1)


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


# Replay equals eager, bit for bit.


class Stateful(nn.Module):
    """Writes to its own memory in every way a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        slots = (x[:, 0].argsort() + self.count) % 8
        self.cache.index_copy_(0, slots, x)
        self.cache[slots] = self.cache[slots] * 2
        self.cache.scatter_add_(0, slots[:, None].expand(-1, 6), x)
        self.cache[0] = self.count
        self.count += 1
        torch._foreach_add_([self.cache[1], self.cache[2]], 1.0)
        torch._foreach_copy_([self.cache[3]], [x[0]])
        return self.cache.clone(), x + self.count


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(*self.parts, x)


def _sequence(x: Tensor) -> Tensor:
    return x.view(2, 2, 6)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(6)),
    "batch_norm": lambda: nn.BatchNorm1d(6),
    "state": Stateful,
    "lstm": lambda: Function(lambda m, x: m(_sequence(x)), nn.LSTM(6, 5, 2, dropout=0.2)),
    "gru": lambda: Function(lambda m, x: m(_sequence(x)), nn.GRU(6, 5)),
    "attention": lambda: Function(
        lambda m, x: m(_sequence(x), _sequence(x), _sequence(x)), nn.MultiheadAttention(6, 2)
    ),
    "encoder": lambda: Function(lambda m, x: m(_sequence(x)), nn.TransformerEncoderLayer(6, 2, 8)),
    "sdpa": lambda: Function(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)),
    "conv": lambda: Function(
        lambda m, x: m(x.view(1, 1, 4, 6)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
    ),
    "embedding": lambda: Function(lambda m, x: m(x.abs().long()), nn.Embedding(9, 4, padding_idx=0)),
    "several_outputs": lambda: Function(lambda x: [x.topk(2), x.sort(-1), x.max(0), x.unbind(1), x.split(4, 1), None]),
    "overlapping": lambda: Function(lambda x: [x[:1].expand(4, 6), x.as_strided((3, 3), (1, 1)), x.t() @ x]),
    "random": lambda: Function(lambda x: [torch.rand_like(x), torch.randperm(5), x.softmax(1).multinomial(2)]),
    "complex": lambda: Function(lambda x: [torch.fft.rfft(x).conj() * 2, torch.fft.rfft(x).conj().imag]),
    "out": lambda: Function(lambda x: [torch.add(x, x, out=torch.empty(0)), torch.mul(x, 2, out=torch.empty_like(x))]),
    "autocast": lambda: Function(lambda m, x: torch.autocast("cpu", torch.bfloat16)(m)(x), nn.Linear(6, 6)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "vmap": lambda: Function(lambda x: torch.vmap(lambda row: row.cumsum(0) * 2)(x)),
}


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("name", MODELS)
def test_replay_equals_eager(pool: GraphPool, name: str, grad_mode: Any) -> None:
    model = MODELS[name]()
    eager, x = copy.deepcopy(model), torch.randn(4, 6)
    with grad_mode(), device.on_capture_stream():
        device.begin(pool)
        output = model(x)
        segment = device.end()
        for seed in range(3):
            x.copy_(torch.randn(4, 6))
            torch.manual_seed(seed)
            segment.replay()
            torch.manual_seed(seed)
            assert_same(output, eager(x))
    if eager.state_dict():
        assert_same(model.state_dict(), eager.state_dict())


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_collectives_are_recorded_like_other_operators(pool: GraphPool) -> None:
    x, gathered = torch.ones(3), [torch.zeros(3)]

    def forward() -> Tensor:
        dist.all_gather(gathered, x * 2)
        return all_reduce(gathered[0], "sum", dist.group.WORLD) + 1

    segment, output = capture(pool, forward)
    assert gathered[0].tolist() == [0, 0, 0]
    x.fill_(4)
    segment.replay()
    assert gathered[0].tolist() == [8, 8, 8]
    assert output.tolist() == [9, 9, 9]


Step = Callable[[list[Tensor]], None]


def _random_step(choose: random.Random) -> Step:
    """One operator on a list of (4, 4) tensors, the first four of which come from outside."""
    a, b = choose.randrange(100), choose.randrange(100)
    row = choose.randrange(3)

    def pick(values: list[Tensor], place: int) -> Tensor:
        return values[place % len(values)]

    def out_of_place(values: list[Tensor]) -> None:
        values.append(torch.tanh(pick(values, a) @ pick(values, b)) + 0.5)

    def view(values: list[Tensor]) -> None:
        values.append(pick(values, a).t() if a % 2 else pick(values, a).unfold(0, 4, 1)[0])

    def in_place(values: list[Tensor]) -> None:
        pick(values, a).mul_(0.5).add_(pick(values, b).clone())

    def write_rows(values: list[Tensor]) -> None:
        pick(values, a)[row : row + 2] = pick(values, b)[row : row + 2].clone() * 0.3

    def scatter(values: list[Tensor]) -> None:
        pick(values, a).scatter_(1, pick(values, b).argsort(1), pick(values, b).clone())

    def random_numbers(values: list[Tensor]) -> None:
        values.append(F.dropout(pick(values, a), 0.4) + torch.rand_like(pick(values, b)))

    def several(values: list[Tensor]) -> None:
        values.extend(pick(values, a).sort(1)[:1])
        values.extend(torch._foreach_add([pick(values, a), pick(values, b)], 1.5))

    def overwrite(values: list[Tensor]) -> None:
        torch.add(pick(values, a).clone(), torch.tensor(0.25), out=pick(values, b))

    kinds: list[Step] = [out_of_place, view, in_place, write_rows, scatter, random_numbers, several, overwrite]
    return choose.choice(kinds)


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("seed", range(40))
def test_a_random_program_replays_as_it_runs_eagerly(pool: GraphPool, seed: int, grad_mode: Any) -> None:
    choose = random.Random(seed)
    steps = [_random_step(choose) for _ in range(choose.randrange(1, 25))]
    outside = [torch.randn(4, 4) for _ in range(4)]
    twins = [tensor.clone() for tensor in outside]

    def run(values: list[Tensor]) -> list[Tensor]:
        for step in steps:
            step(values)
        return values

    with grad_mode():
        segment, outputs = capture(pool, lambda: run(list(outside)))
        assert_same(outside, twins)
        for replay in range(3):
            fresh = torch.randn(4, 4)
            outside[0].copy_(fresh)
            twins[0].copy_(fresh)
            torch.manual_seed(replay)
            segment.replay()
            torch.manual_seed(replay)
            assert_same(outputs, run(list(twins)))
            assert_same(outside, twins)
