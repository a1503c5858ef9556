"""Forwards that return what no graph can: eager's answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from troubled import SIZES, rows

import simplegraph as sg
from simplegraph import Reason
from simplegraph.base.nested import flatten

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Returns(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.what = what
        self.last = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        return self.what(x)


def test_a_forward_that_returns_none_is_replayed_for_what_it_does(device: torch.device) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros((), device=device))

        def forward(self, x: Tensor) -> None:
            self.total.add_(x.sum())

    module = Counts().eval()
    model = sg.wrap(module, capture_sizes=[4, 8], progress=False)
    for turn in range(1, 8):
        assert model(torch.ones(4, 2, device=device)) is None
        assert module.total.item() == 8 * turn
    assert model.graph_stats.replays >= 4


class Custom:
    def __init__(self, value: Tensor) -> None:
        self.value = value


@pytest.mark.parametrize("upfront", [False, True])
def test_a_generator_or_an_object_of_ones_own_is_returned_by_eager(device: torch.device, upfront: bool) -> None:
    def generator(x: Tensor) -> Any:
        yield x * 2
        yield x * 3

    lazy = sg.wrap(Returns(generator).eval(), capture_sizes=SIZES, progress=False)
    custom = sg.wrap(Returns(lambda x: Custom(x * 2)).eval(), capture_sizes=SIZES, progress=False)
    if upfront:
        lazy.capture_graphs(rows(3, device))
        custom.capture_graphs(rows(3, device))
    for _ in range(4):
        for size in (4, 3):
            x = rows(size, device)
            assert [torch.equal(one, x * factor) for one, factor in zip(lazy(x), (2, 3), strict=True)] == [True, True]
            assert torch.equal(custom(x).value, x * 2)
    for model in (lazy, custom):
        assert model.graph_stats.replays == 0
        assert model.graph_stats.eager[Reason.UNSUPPORTED_OUTPUT] >= 4


@pytest.mark.parametrize(
    "what",
    [
        lambda x: [],
        lambda x: {},
        lambda x: (x * 2, None, 3, "text", x.dtype),
        lambda x: {"hidden": x * 2, "extra": [x + 1, (x - 1, None)]},
        lambda x: (x * 2, x.shape[0]),
        lambda x: (x * 2, x.shape),
        lambda x: x.sum(),
        lambda x: x[:1] * 2,
        lambda x: (x, x),
        lambda x: x.t() * 2,
        lambda x: x[:, :0],
    ],
)
def test_odd_outputs_are_eagers(device: torch.device, what: Callable[[Tensor], Any]) -> None:
    module = Returns(what).eval()
    model = sg.wrap(module, capture_sizes=SIZES, padding=False, progress=False)
    for _ in range(4):
        for size in (4, 2, 3):
            x = rows(size, device)
            actual, expected = model(x), module(x)
            assert type(actual) is type(expected)
            actual, expected = flatten(actual), flatten(expected)
            assert actual[1] == expected[1]
            for one, other in zip(actual[0], expected[0], strict=True):
                assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def test_outputs_that_follow_the_batch_in_no_simple_way_are_never_cut_wrong(device: torch.device) -> None:
    for what in (lambda x: (x * 2, x.shape[0]), lambda x: x[: (x.shape[0] + 1) // 2], lambda x: (x * 2, x.shape)):
        module = Returns(what).eval()
        model = sg.wrap(module, capture_sizes=SIZES, progress=False)
        for _ in range(4):
            for size in (8, 3, 4, 5, 1):
                x = rows(size, device)
                torch.testing.assert_close(model(x), module(x), rtol=0, atol=0)
