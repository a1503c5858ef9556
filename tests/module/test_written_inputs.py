"""Writes of a forward to its inputs reach the caller."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")


@pytest.mark.parametrize("sizes", [(4,) * 6, (3,) * 8, (4, 3, 4, 3, 8, 8, 8, 5, 3, 4)])
def test_what_a_forward_writes_to_its_input_reaches_the_caller(device, sizes):
    def step(m, x, counter):
        counter.add_(1)
        return x + counter

    model = graphed(device, step, batch_dims={"args": 0})
    for size in sizes:
        x, counter = rows(size, device), torch.arange(float(size), device=device).unsqueeze(1)
        expected = counter + 1
        close(model(x, counter), x + expected)
        close(counter, expected)
    assert model.graph_stats.replays > 0


def test_an_input_written_and_passed_again_and_again_advances_each_time(device):
    def step(m, x, state):
        state.copy_(torch.tanh(state + x))
        return state * 2

    model = graphed(device, step, capture_sizes=[4])
    state, expected = torch.zeros(4, WIDTH, device=device), torch.zeros(4, WIDTH, device=device)
    for _ in range(8):
        x = rows(4, device)
        expected = torch.tanh(expected + x)
        close(model(x, state), expected * 2)
        close(state, expected)
    assert model.graph_stats.replays >= 5


def test_a_written_input_without_batch_dimension_reaches_the_caller(device):
    def step(m, x, total):
        total.add_(x[0])
        return x * 2

    model = graphed(device, step, capture_sizes=[4])
    total, expected = torch.zeros(WIDTH, device=device), torch.zeros(WIDTH, device=device)
    for _ in range(6):
        x = rows(4, device)
        expected = expected + x[0]
        model(x, total)
        close(total, expected)
    assert model.graph_stats.replays > 0


def test_an_input_that_only_larger_batches_write_to_reaches_the_caller(device):
    def step(m, x):
        if x.shape[0] > 2:
            x.add_(1)
        return x * 2

    model = graphed(device, step, capture_sizes=[2, 4, 8])
    for size in (2, 2, 2, 4, 4, 4, 4, 3, 8, 8, 8, 7):
        x = rows(size, device)
        expected = x + 1 if size > 2 else x.clone()
        close(model(x), expected * 2)
        close(x, expected)
    assert model.graph_stats.replays > 0


@pytest.mark.parametrize("aliases", [lambda base: (base[:4],) * 2, lambda base: (base[:4], base[1:])])
def test_a_forward_that_writes_to_one_of_two_aliases_is_as_in_eager(device, aliases):
    def step(m, x, y):
        x.add_(1)
        return x + y

    model = graphed(device, step, capture_sizes=[4])
    eager = sg.unwrap(model)
    for turn in range(8):
        shared = rows(5, device)
        twin = shared.clone()
        args = aliases if turn % 2 else (lambda base: (base[:4], rows(4, device).zero_()))
        expected = eager(*args(twin))
        close(model(*args(shared)), expected)
        close(shared, twin)
    assert model.graph_stats.replays > 0


def test_a_strided_view_written_by_the_forward_is_written_in_place(device):
    model = graphed(device, lambda m, x: x.mul_(2), capture_sizes=[4])
    for _ in range(5):
        whole = rows(4, device, 2 * WIDTH)
        expected = whole.clone()
        expected[:, ::2] *= 2
        close(model(whole[:, ::2]), expected[:, ::2])
        close(whole, expected)


def test_a_cache_passed_by_reference_is_written_where_it_is(device):
    class Step(nn.Module):
        def forward(self, x, slots, cache):
            cache.index_copy_(0, slots, x)
            return cache.sum(0) + x

    model = sg.wrap(Step().eval(), capture_sizes=[4], batch_dims={"cache": "reference"}, progress=False)
    eager = sg.unwrap(model)
    caches = [torch.zeros(16, WIDTH, device=device) for _ in range(2)]
    twins = [cache.clone() for cache in caches]
    for turn in range(10):
        x, slots = rows(4, device), torch.randperm(16, device=device)[:4]
        cache, twin = caches[turn % 2], twins[turn % 2]
        close(model(x, slots, cache), eager(x, slots, twin))
        close(cache, twin)
    assert model.graph_stats.replays >= 5
    assert len(model.graph_stats.graphs) == 2


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("norm", ["batch_norm", "instance_norm"])
def test_running_statistics_passed_as_arguments_advance_at_every_call(device, norm, inference):
    def step(m, x, mean, var):
        if norm == "batch_norm":
            return torch.nn.functional.batch_norm(x, mean, var, training=True)
        return torch.nn.functional.instance_norm(x.unsqueeze(-1).expand(-1, -1, 3), mean, var, use_input_stats=True)

    model = graphed(device, step, capture_sizes=[4], padding=False)
    eager = sg.unwrap(model)
    with torch.inference_mode() if inference else torch.no_grad():
        mean, var = torch.zeros(WIDTH, device=device), torch.ones(WIDTH, device=device)
        expected = mean.clone(), var.clone()
        for _ in range(6):
            x = rows(4, device)
            close(model(x, mean, var), eager(x, *expected))
            close(mean, expected[0])
            close(var, expected[1])
    assert model.graph_stats.replays >= 4


class SumsAndWrites(nn.Module):
    """Mixes rows, so that padding shows, and then writes to all of them; a break may raise after that."""

    def __init__(self):
        super().__init__()
        self.trouble = None

    def forward(self, x):
        result = x + x.sum(0)
        x.add_(1)
        self.meet(x)
        return result

    @sg.eager_break
    def meet(self, x):
        if self.trouble is not None:
            raise self.trouble


def right(model, x):
    result, written = x + x.sum(0), x + 1
    torch.testing.assert_close(model(x), result)
    torch.testing.assert_close(x, written)


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_padding_rows_that_a_forward_wrote_are_set_again(device, mode):
    model = sg.wrap(SumsAndWrites().eval(), capture_sizes=[4], mode=mode, batch_dims={"x": 0}, progress=False)
    for size in (4, 4, 2, 2, 2, 3, 2, 4, 2):
        right(model, torch.randn(size, 3, device=device))
    assert model.graph_stats.replays >= 5


def test_padding_rows_written_by_a_replay_that_raised_are_set_again(device):
    model = sg.wrap(SumsAndWrites().eval(), capture_sizes=[4], mode="PIECEWISE", batch_dims={"x": 0}, progress=False)
    for size in (4, 4, 2, 2, 2):
        right(model, torch.randn(size, 3, device=device))
    for _ in range(3):
        model.trouble = LookupError("in a break")
        with pytest.raises(LookupError):
            model(torch.randn(2, 3, device=device))
        model.trouble = None
        right(model, torch.randn(2, 3, device=device))
    assert model.graph_stats.replays >= 5


@pytest.mark.parametrize("first", [0, 4])
def test_an_expanded_input_that_is_written_is_eagers_with_a_reason(device: torch.device, first: int) -> None:
    def write_column(m: Any, x: torch.Tensor) -> torch.Tensor:
        x[:, 1] = torch.tanh(x)[:, 0]
        return x * 2

    model = graphed(device, write_column, capture_sizes=[4])
    for turn in range(10):
        base = rows(4, device)
        twin, expanded = base.clone(), turn >= first and turn % 2 == 0
        x, other = (t[:, :1].expand(-1, WIDTH) if expanded else t for t in (base, twin))
        close(model(x), write_column(model, other))
        close(base, twin)
    assert reasons(model)["aliased"] >= 2
    assert model.graph_stats.replays > 0


def test_a_static_output_that_is_passed_and_written_is_eagers(device: torch.device) -> None:
    def step(m: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x) + 1
        x.mul_(2)
        return y

    model = graphed(device, step, capture_sizes=[4], outputs="static")
    for _ in range(4):
        x = rows(4, device)
        expected = torch.tanh(x) + 1
        y = model(x)
        close(y, expected)
        close(model(y), torch.tanh(expected) + 1)
    assert reasons(model)["aliased"] >= 2


def test_one_row_may_be_an_expanded_number(device):
    """Its stride is 0, which views as bytes refuse."""
    model = graphed(device, lambda m, x, number: x + number[:, None], batch_dims={"args": 0})
    for size in (1, 2) * 4:
        x, number = rows(size, device), torch.tensor(3, device=device)
        close(model(x, number.expand(size)), x + 3)
    assert model.graph_stats.replays > 0
