"""Eager breaks on a real GPU: streams, memory, random numbers, collectives and failures between segments."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.cuda import device as cuda

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    with torch.no_grad():
        yield
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(3, device="cuda")
    torch.cuda.synchronize()


@sg.eager_break
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_a_pool_made_in_inference_mode_serves_outside_of_it_too() -> None:
    graphs = cuda.CudaDevice(0)
    with torch.inference_mode():
        graphs.release_pool(graphs.new_pool())
    graphs.release_pool(graphs.new_pool())
    with torch.enable_grad():
        graphs.release_pool(graphs.new_pool())


class Function(nn.Module):
    """A module of one function, and a stream of its own."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.side = torch.cuda.Stream()

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def piecewise(module: nn.Module, **settings: Any) -> Any:
    settings = {"mode": "PIECEWISE", "capture_sizes": [4], "progress": False} | settings
    return sg.wrap(module.cuda().eval(), **settings)


def check_equal(model: Any, module: nn.Module, calls: int = 6, rows: int = 4, width: int = 8) -> None:
    for _ in range(calls):
        x = torch.randn(rows, width, device="cuda")
        torch.testing.assert_close(model(x), module(x))


def forked_by_stream(module: Any, x: Tensor) -> Tensor:
    hidden = x + 1
    module.side.wait_stream(torch.cuda.current_stream())  # forks
    with torch.cuda.stream(module.side):
        hidden.mul(2)
    return doubled(hidden)


def forked_by_event(module: Any, x: Tensor) -> Tensor:
    hidden = x + 1
    event = torch.cuda.Event()
    event.record()
    module.side.wait_event(event)  # forks
    with torch.cuda.stream(module.side):
        hidden.mul(2)
    return doubled(hidden)


def forked_at_the_end(module: Any, x: Tensor) -> Tensor:
    hidden = doubled(x + 1) * 1
    torch.cuda.current_stream().record_event().wait(module.side)  # forks
    with torch.cuda.stream(module.side):
        hidden.mul(2)
    return hidden


@pytest.mark.parametrize("function", [forked_by_stream, forked_by_event, forked_at_the_end])
def test_a_stream_forked_and_not_joined_before_a_break_is_an_error_with_the_forking_line(function: Any) -> None:
    module = Function(function)
    model = piecewise(module)
    check_equal(model, module)
    (error,) = model.graph_manager.failures.values()
    assert "# forks" in str(error)
    assert "before every eager break" in str(error)
    assert model.graph_stats.captures == 0
    check_equal(piecewise(Function(lambda m, x: doubled(x + 1))), Function(lambda m, x: doubled(x + 1)))


def test_a_stream_joined_before_the_break_is_part_of_the_segment() -> None:
    def joined(module: Any, x: Tensor) -> Tensor:
        hidden = x + 1
        module.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(module.side):
            other = hidden.mul(3)
        torch.cuda.current_stream().wait_stream(module.side)
        return doubled(hidden + other) - 1

    module = Function(joined)
    model = piecewise(module)
    check_equal(model, module)
    assert model.graph_stats.replays > 0
    assert next(iter(model.graph_stats.graphs.values())).breaks == 1


def test_a_break_on_another_stream_than_the_forwards_is_refused() -> None:
    def elsewhere(module: Any, x: Tensor) -> Tensor:
        hidden = x + 1
        module.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(module.side):
            hidden = doubled(hidden)
        torch.cuda.current_stream().wait_stream(module.side)
        return hidden + 1

    module = Function(elsewhere)
    model = piecewise(module)
    check_equal(model, module)
    (error,) = model.graph_manager.failures.values()
    assert "another stream" in str(error)


class Deep(nn.Module):
    """Layers with a break each, whose results and residuals would add up if anything were owned."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(x)
            x = x + doubled(hidden.relu()).tanh()
        return x


def bytes_of(module: nn.Module, mode: str) -> int:
    model = piecewise(module, mode=mode, capture_sizes=[1024, 2048, 4096])
    model.capture_graphs(torch.randn(4096, 1024, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    taken = sum(graph.bytes for graph in model.graph_stats.graphs.values())
    model.reset_graphs()
    return taken


@pytest.mark.alone
def test_breaks_take_hardly_more_memory_than_one_full_graph() -> None:
    module = Deep(20, 1024).cuda().eval()
    full, pieces = bytes_of(module, "FULL"), bytes_of(module, "PIECEWISE")
    assert full >= 3 * 16 * MIB, "activations of 4096 x 1024 float32 are 16 MiB each"
    assert pieces <= 1.5 * full


@pytest.mark.parametrize("borrows", [True, False])
def test_held_and_borrowed_arguments_bear_allocator_churn(borrows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_CAN_BORROW", borrows)
    module = Deep(10, 64).cuda().eval()
    model = piecewise(module, capture_sizes=[4, 16, 64], capture="upfront")
    model.capture_graphs(torch.randn(64, 64, device="cuda"))
    kept: list[Tensor] = []
    for step in range(60):
        x = torch.randn(1 + step * 7 % 64, 64, device="cuda")
        expected = module(x)
        kept = kept[-5:] + [torch.full((size,), float("nan"), device="cuda") for size in (64, 4096, 1 << 16, 1 << 20)]
        if step % 10 == 0:
            torch.cuda.empty_cache()
        torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays == 60


def test_nothing_is_launched_for_segments_that_are_empty() -> None:
    def adjacent(module: Any, x: Tensor) -> Tensor:
        return doubled(doubled(doubled(x)))

    module = Function(adjacent)
    model = piecewise(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_equal(model, module)
    (graph,) = model.graph_stats.graphs.values()
    assert (graph.segments, graph.breaks) == (0, 3)


def test_nodes_are_counted() -> None:
    model = piecewise(Function(lambda m, x: doubled(x + 1).relu().exp()))
    for _ in range(3):
        model(torch.randn(4, 8, device="cuda"))
    (graph,) = model.graph_report().to_dict()["graphs"]
    assert [step["nodes"] for step in graph["steps"]] == [1, None, 2]
    assert all(step["ms"] >= 0 for step in graph["steps"])


def test_random_numbers_advance_as_eagers_in_segments_and_breaks() -> None:
    noisy = sg.eager_break(lambda x: x + torch.rand_like(x))
    module = Function(lambda m, x: noisy(x + torch.rand_like(x)) * torch.rand_like(x))
    model = piecewise(module)
    x = torch.zeros(4, 8, device="cuda")
    torch.manual_seed(3)
    expected = [module(x) for _ in range(8)]
    torch.manual_seed(3)
    for step, values in enumerate(expected):
        torch.testing.assert_close(model(x), values, msg=f"call {step}")
    assert model.graph_stats.replays > 0


def test_a_capture_that_breaks_in_a_later_segment_leaves_nothing_behind() -> None:
    def reads_back(module: Any, x: Tensor) -> Tensor:
        hidden = doubled(doubled(x + 1) + 1) + 1
        return hidden * hidden.sum().item()

    module = Function(reads_back)
    model = piecewise(module)
    pool = piecewise(Function(lambda m, x: doubled(x + 1) + 1))
    for _ in range(3):
        check_equal(model, module)
        x = torch.randn(4, 8, device="cuda")
        torch.testing.assert_close(pool(x), (x + 1) * 2 + 1)
    assert model.graph_stats.captures == 0
    assert "hidden.sum().item()" in next(iter(model.graph_stats.failures.values()))
    assert pool.graph_stats.replays > 0


@pytest.mark.alone
def test_many_breaks_are_captured_and_dropped_again_and_again() -> None:
    module = Deep(30, 16).cuda().eval()
    model = piecewise(module, capture_sizes=[1, 2, 4, 8])
    free: list[int] = []
    for _ in range(8):
        model.capture_graphs(torch.randn(8, 16, device="cuda"))
        check_equal(model, module, calls=3, width=16)
        model.reset_graphs()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[-1] >= free[2] - 4 * MIB


@pytest.fixture
def group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("handed_on", [False, True])
def test_collectives_run_inside_breaks(*, handed_on: bool) -> None:
    start = sg.eager_break(lambda x: dist.all_reduce(x, async_op=handed_on))
    wait = sg.eager_break(lambda work: work.wait() if work is not None else None)

    def reducing(module: Any, x: Tensor) -> Tensor:
        hidden = x + 1
        work = start(hidden)
        other = x * 3
        wait(work)
        return hidden + other

    module = Function(reducing)
    model = piecewise(module)
    check_equal(model, module)
    assert model.graph_stats.replays > 0
    assert next(iter(model.graph_stats.graphs.values())).breaks == 2


@pytest.mark.proofs
@pytest.mark.parametrize("writes", [False, True])
def test_a_break_that_returns_another_shape_is_finished_eagerly_where_nothing_was_written(writes: bool) -> None:
    total = torch.zeros((), device="cuda")
    count = [0]

    def choose(x: Tensor) -> Tensor:
        count[0] += 1
        return x[x.sum(1) > 0]

    chosen = sg.eager_break(choose)

    def forward(module: Any, x: Tensor) -> Tensor:
        hidden = x * 2
        if writes:
            total.add_(1)
        return chosen(hidden).sum() + hidden

    module = Function(forward)
    model = piecewise(module)
    for _ in range(4):
        model(torch.tensor([[1.0] * 8, [1.0] * 8, [-1.0] * 8, [-1.0] * 8], device="cuda"))
    assert model.graph_stats.replays > 0
    x = torch.ones(4, 8, device="cuda")
    before = count[0]
    if writes:
        with pytest.raises(sg.BreakError, match=r"cannot be finished eagerly: .* was written by then"):
            model(x)
        assert total.item() == 5
    else:
        torch.testing.assert_close(model(x), x * 2 + 64)
    assert count[0] == before + 1
    assert model.graph_stats.eager[sg.Reason.CAPTURE_FAILED] == (not writes)
    torch.testing.assert_close(model(x), x * 2 + 64)
    torch.cuda.synchronize()
