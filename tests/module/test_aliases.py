"""Which arguments are one tensor, or lie in one memory: each pattern is as in eager, and has graphs of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.functions import WIDTH, graphed, rows

pytestmark = pytest.mark.usefixtures("no_grad")


def which_are_one(m, q, k, v):
    return q + 2 * k + 4 * v + (10 if q is k else 0) + (20 if k is v else 0) + (40 if q is v else 0)


def where_they_begin(m, q, k, v):
    starts = [each.data_ptr() for each in (q, k, v)]
    return q + 2 * k + 4 * v + 10 * (len({*starts}) == 1) + 20 * (starts[0] == starts[1])


PATTERNS = {
    "three": lambda size, device: (rows(size, device), rows(size, device), rows(size, device)),
    "one": lambda size, device: (x := rows(size, device), x, x),
    "first two": lambda size, device: (x := rows(size, device), x, rows(size, device)),
    "last two": lambda size, device: (rows(size, device), x := rows(size, device), x),
    "ends": lambda size, device: (x := rows(size, device), rows(size, device), x),
}


@pytest.mark.parametrize("asks", [which_are_one, where_they_begin])
@pytest.mark.parametrize("other", PATTERNS)
@pytest.mark.parametrize("one", ["three", "one"])
def test_arguments_that_are_one_tensor_have_graphs_of_their_own(device, one, other, asks):
    model = graphed(device, asks, capture_sizes=[4])
    for name in (one, other, one, other):
        for size in (4, 4, 4, 3, 3, 4):
            args = PATTERNS[name](size, device)
            close(model(*args), asks(None, *args))
    assert model.graph_stats.replays >= 6


class Named(nn.Module):
    def forward(self, *, q, k):
        return q - 3 * k + (q is k)


def test_one_tensor_by_any_keywords_is_one_pattern(device):
    model = sg.wrap(Named().eval(), capture_sizes=[4], progress=False)
    for _ in range(4):
        x, y = rows(4, device), rows(4, device)
        close(model(q=x, k=x), -2 * x + 1)
        close(model(k=x, q=x), -2 * x + 1)
        close(model(k=y, q=x), x - 3 * y)
    assert model.graph_stats.captures == 2


def test_a_static_input_for_two_arguments_is_one_tensor(device):
    model = graphed(device, lambda m, x, y: x - 3 * y + (10 if x is y else 0), capture_sizes=[4])
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(4)["args.0"]
    for _ in range(3):
        y = rows(4, device)
        close(model(static, y), static - 3 * y)
        static.copy_(rows(4, device))
        expected = static - 3 * static + 10
        close(model(static, static), expected)


def test_tensors_without_elements_are_no_aliases(device):
    model = graphed(device, lambda m, x, y, z: x + y.sum() + z.sum() + (y is z), capture_sizes=[4])
    for _ in range(4):
        x = rows(4, device)
        close(model(x, torch.empty(0, device=device), torch.empty(0, 2, device=device)), x)
    assert model.graph_stats.replays >= 1


VIEWS = {
    "apart": lambda x: x.clone(),
    "itself": lambda x: x,
    "another view": lambda x: x.view_as(x),
    "detached": lambda x: x.detach(),
    "a parameter": lambda x: nn.Parameter(x, requires_grad=False),
    "its first column": lambda x: x[:, :1].expand_as(x),
    "the same backwards": lambda x: x.flip(0),
    "the columns beside": lambda x: x.as_strided(x.shape, x.stride(), x.storage_offset() + 2),
}


def asks_and_adds(m, x, y):
    return x + 2 * y * (3 if x.data_ptr() == y.data_ptr() else 5) + (x is y)


def writes_the_first(m, x, y):
    x.add_(1)
    return x + 2 * y


def writes_the_second(m, x, y):
    y.add_(1)
    return x + 2 * y, y


def returns_both(m, x, y):
    return x, y, x * y


@pytest.mark.proofs  # static inputs of views do not overlap
@pytest.mark.parametrize("keywords", [False, True])
@pytest.mark.parametrize("step", [asks_and_adds, writes_the_first, writes_the_second, returns_both])
def test_arguments_in_one_memory_are_eagers(device, step, keywords):
    model = graphed(device, lambda m, x, y: step(m, x, y), capture_sizes=[4], batch_dims={"x": 0, "y": 0})
    for _ in range(3):
        for name, view in VIEWS.items():
            if step is writes_the_second and name == "its first column":
                continue  # nor does eager
            for size in (4, 4, 3, 4):
                base = rows(size, device, 2 * WIDTH)
                x, other = base[:, :WIDTH], base.clone()[:, :WIDTH]
                expected = step(None, other, view(other))
                actual = model(y=view(x), x=x) if keywords else model(x, view(x))
                close(actual, expected)
                close(x, other)
                if step is returns_both:
                    assert actual[0] is x
                    assert (actual[1] is x) == (name == "itself")
    assert model.graph_stats.replays >= 8


@pytest.mark.parametrize("first", ["one", "two"])
def test_one_tensor_under_two_rules_is_served_in_both_patterns(device, first):
    """Their padding differs, so that they need two static inputs."""
    model = graphed(device, lambda m, *, x, y: x - 3 * y, capture_sizes=[4], pad_values={"y": 1})
    for name in (first, "one", "two", "one", "two"):
        for size in (4, 4, 4, 3, 3, 4):
            x = rows(size, device)
            y = x if name == "one" else rows(size, device)
            close(model(x=x, y=y), x - 3 * y)
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 12


@pytest.mark.proofs  # what is taken by address is not what is copied
def test_a_tensor_taken_by_address_is_told_from_the_same_one_passed_twice(device):
    model = graphed(device, lambda m, *, x, table: x @ table + (x is table), batch_dims={"x": 0, "table": "reference"})
    table = rows(WIDTH, device)
    for _ in range(3):
        for x in (rows(WIDTH, device), table):
            for _ in range(4):
                close(model(x=x, table=table), x @ table + (x is table))
    assert model.graph_stats.replays >= 4


def test_a_tensor_of_the_module_as_an_argument_is_read_as_it_is_then(device):
    model = graphed(device, lambda m, x, w: x @ w + m.weight.sum(), capture_sizes=[4], batch_dims={"x": 0, "w": None})
    model.requires_grad_(False)
    for turn in range(12):
        x = rows(4, device)
        w = (model.weight, model.weight.data, rows(WIDTH, device))[turn % 3]
        close(model(x, w), x @ w + model.weight.sum())
        model.weight.add_(0.1)
    assert model.graph_stats.replays >= 6


def test_a_static_output_as_both_arguments_is_what_it_holds(device):
    model = graphed(device, which_two_are_one, capture_sizes=[4], outputs="static")
    output = rows(4, device)
    for turn in range(12):
        args = (output, output) if turn % 3 else (output, rows(4, device))
        expected = which_two_are_one(None, *(arg.clone() for arg in args)) + (10 if turn % 3 else 0)
        output = model(*args)
        close(output, expected)
        output.mul_(0.3)
    assert model.graph_stats.replays >= 4


def which_two_are_one(m, x, y):
    return x - 3 * y + (10 if x is y else 0)


def test_a_refused_call_is_transformed_as_its_module_is(device):
    """Inside `vmap` tensors have no address, by which calls with such arguments are told apart."""
    model = graphed(device, lambda m, x, y: (x + y, object), capture_sizes=[4])
    for _ in range(4):
        model(rows(4, device), rows(4, device))
    assert reasons(model)["unsupported_output"] >= 2
    x, y = rows(2, device, 4, WIDTH), rows(2, device, 4, WIDTH)
    close(torch.vmap(lambda *args: model(*args)[0])(x, y), x + y)
