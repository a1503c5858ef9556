"""Callers may write a graph's inputs in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close
from tests.module.models import WIDTH, rows, wrapped_mlp

pytestmark = pytest.mark.usefixtures("no_grad")


class TwoInputs(nn.Module):
    def forward(self, a, b):
        return a - 2 * b


def two_inputs(device, **settings):
    return sg.wrap(TwoInputs().eval(), capture_sizes=[4, 6], progress=False, **settings)


def test_static_inputs_written_in_place_are_not_copied(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(4)
    assert {name: tuple(view.shape) for name, view in static.items()} == {"a": (4, WIDTH), "b": (4, WIDTH)}
    for _ in range(3):
        a, b = rows(4, device), rows(4, device)
        static["a"].copy_(a)
        static["b"].copy_(b)
        close(model(static["a"], static["b"]), a - 2 * b)
    assert model.graph_stats.replays == 3


def test_static_inputs_mix_with_tensors_of_the_caller_and_with_padding(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    for size in (6, 3, 5, 1, 6):
        static = model.static_inputs(size)
        a, b = rows(size, device), rows(size, device)
        static["a"].copy_(a)
        close(model(static["a"], b), a - 2 * b)
        close(model(a=a, b=b), a - 2 * b)
    assert model.graph_stats.replays >= 8


def test_swapped_static_inputs_are_swapped_and_not_mixed_up(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(4)
    a, b = rows(4, device), rows(4, device)
    static["a"].copy_(a)
    static["b"].copy_(b)
    close(model(static["b"], static["a"]), b - 2 * a)


def test_one_static_input_passed_twice_is_read_twice(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(4)
    a = rows(4, device)
    static["a"].copy_(a)
    close(model(static["a"], static["a"]), -a)


def test_rows_of_a_static_input_in_another_order_are_read_right(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    static = model.static_inputs(6)
    a = rows(6, device)
    static["a"].copy_(a)
    b = rows(4, device)
    close(model(static["a"][2:], b), a[2:] - 2 * b)
    static["a"].copy_(a)
    close(model(static["a"][1:5], static["a"][2:6]), a[1:5] - 2 * a[2:6])


def test_static_inputs_of_a_call_by_keywords_have_the_same_names(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    for _ in range(3):
        model(b=rows(4, device), a=rows(4, device))
    assert set(model.static_inputs(4)) == {"a", "b"}


def test_padding_rows_of_static_inputs_written_by_the_caller_are_reset(device):
    class Spread(nn.Module):
        """A mixer, so that padding rows show."""

        def forward(self, x):
            return x + x.sum(0)

    model = sg.wrap(Spread().eval(), capture_sizes=[4], progress=False)
    model.capture_graphs(rows(4, device))
    for _ in range(3):
        model.static_inputs(4)["x"].fill_(7.0)
        x = rows(2, device)
        close(model(x), x + x.sum(0))


def test_static_inputs_before_any_capture_say_what_to_call(device):
    with pytest.raises(sg.ReplayError, match="capture_graphs"):
        two_inputs(device).static_inputs()


def test_static_inputs_above_every_size_are_refused(device):
    model = two_inputs(device)
    model.capture_graphs(rows(4, device), rows(4, device))
    with pytest.raises(sg.CaptureSizeError, match="7"):
        model.static_inputs(7)


def test_static_inputs_survive_a_recapture(device):
    model = wrapped_mlp(device)
    model.capture_graphs(rows(4, device))
    static = model.static_inputs(4)["x"]
    model.up.weight = nn.Parameter(torch.randn_like(model.up.weight))
    for _ in range(4):
        x = rows(4, device)
        static.copy_(x)
        close(model(static), sg.unwrap(model)(x))


class Doubles(nn.Module):
    def forward(self, x):
        return x * 2


def test_a_static_input_that_comes_back_transposed_is_read_before_it_is_overwritten(device, no_grad):
    model = sg.wrap(Doubles().eval(), capture_sizes=[6], batch_dims={"x": 0}, progress=False)
    for _ in range(4):
        model(torch.randn(6, 6, device=device))
    static = model.static_inputs(6)["x"]
    replays, expected = model.graph_stats.replays, static.t() * 2
    for _ in range(3):  # another layout has graphs of its own
        assert torch.equal(model(static.t()), expected)
    assert model.graph_stats.replays == replays + 2


class Shares(nn.Module):
    """Writes to its input, or returns a part of it, as told."""

    def __init__(self, kind="reads", dim=0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 1).squeeze(1 - dim))
        self.kind = kind

    def forward(self, a, b):
        if self.kind == "writes":
            a.add_(b)
        h = a * self.weight - 2 * b
        return (h, a.flatten()[:WIDTH], a) if self.kind == "returns" else h


PLACES = [(0, 8), (0, 4), (2, 6), (0, 3), (1, 4), (5, 8)]


@pytest.mark.parametrize("passed", ["ab", "ba", "aa", "ax", "xb"])
@pytest.mark.parametrize("dim", [0, 1])
def test_any_rows_of_static_inputs_are_read_right_by_the_call_that_captures(device, dim, passed):
    model = sg.wrap(
        Shares(dim=dim).to(device).eval(),
        capture_sizes=[4, 8],
        batch_dims={"a": dim, "b": dim},
        pad_values={"b": "repeat-last"},
        progress=False,
    )
    for count in (8, 3, 8, 3):
        model(*(rows(count, device).movedim(0, dim).contiguous() for _ in range(2)))
    static = model.static_inputs(8)
    for start, end in PLACES:
        model.weight = nn.Parameter(torch.randn_like(model.weight))  # so that sizes are captured again
        for _ in range(3):
            values = {name: torch.randn_like(view) for name, view in static.items()}
            torch._foreach_copy_([*static.values()], [*values.values()])
            other = torch.randn_like(static["a"])
            mine, theirs = ({**held, "x": other} for held in (static, values))
            args, expected = (
                [held[name].narrow(dim, start, end - start) for name in passed] for held in (mine, theirs)
            )
            close(model(*args), sg.unwrap(model)(*expected))
    assert model.graph_stats.replays


@pytest.mark.parametrize("passed", ["ab", "ba", "aa", "ax", "xb"])
@pytest.mark.parametrize("kind", ["writes", "returns"])
def test_any_rows_of_static_inputs_are_written_and_returned_as_by_eager(device, kind, passed):
    model = sg.wrap(Shares(kind).to(device).eval(), capture_sizes=[4, 8], batch_dims={"a": 0, "b": 0}, progress=False)
    for count in (8, 3, 8, 3):
        model(rows(count, device), rows(count, device))
    static = model.static_inputs(8)
    for start, end in PLACES:
        for _ in range(2):
            values = {name: torch.randn_like(view) for name, view in static.items()}
            torch._foreach_copy_([*static.values()], [*values.values()])
            args, expected = (
                [{"x": other, **held}[name][start:end] for name in passed]
                for held, other in zip((static, values), rows(8, device).expand(2, -1, -1).clone(), strict=True)
            )
            result, wanted = model(*args), sg.unwrap(model)(*expected)
            close((result, *args), (wanted, *expected))
    assert model.graph_stats.replays


def test_a_static_input_passed_as_an_example_keeps_its_rows(device):
    model = wrapped_mlp(device)
    model.capture_graphs(rows(4, device))
    static, x = model.static_inputs(4)["x"], rows(4, device)
    static.copy_(x)
    model.up.weight = nn.Parameter(torch.randn_like(model.up.weight))
    model.capture_graphs(static)
    assert torch.equal(static, x)
