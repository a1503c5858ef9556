"""A module holds an object in two places, and one of them gets another object that it holds: never stale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH = 4


class Holding(nn.Module):
    """Has three layers, and what `add` adds; `read` uses some of it."""

    def __init__(
        self, add: Callable[[Any], object], read: Callable[[Any, Tensor], Tensor], device: torch.device
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, device=device) for _ in range(3))
        self.first, self.second = torch.ones(WIDTH, device=device), torch.full((WIDTH,), 2.0, device=device)
        add(self)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


class Held:
    def __init__(self, value: Any) -> None:
        self.value = value


def put(**values: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Set attributes, one after the other."""

    def add(module: Any) -> None:
        for name, make in values.items():
            setattr(module, name, make(module))

    return add


CASES: dict[str, tuple[Callable[[Any], object], Callable[[Any, Tensor], Tensor], Callable[[Any], object]]] = {
    "a child": (
        put(active=lambda m: m.layers[0]),
        lambda m, x: m.active(x),
        put(active=lambda m: m.layers[1]),
    ),
    "a child of a child": (
        put(parts=lambda m: nn.ModuleDict({"x": m.layers[0]})),
        lambda m, x: m.parts["x"](x),
        lambda m: m.parts.update({"x": m.layers[2]}),
    ),
    "a module in a list": (
        put(active=lambda m: [m.layers[0]]),
        lambda m, x: m.active[0](x),
        lambda m: m.active.__setitem__(0, m.layers[1]),
    ),
    "a module in a dict": (
        put(active=lambda m: {"a": m.layers[0]}),
        lambda m, x: m.active["a"](x),
        lambda m: m.active.update(a=m.layers[1]),
    ),
    "a module in an object": (
        put(active=lambda m: Held(m.layers[0])),
        lambda m, x: m.active.value(x),
        lambda m: setattr(m.active, "value", m.layers[2]),
    ),
    "modules in another order": (
        put(active=lambda m: list(m.layers)),
        lambda m, x: m.active[0](x),
        lambda m: m.active.reverse(),
    ),
    "children in another order": (
        put(),
        lambda m, x: m.layers[0](x),
        lambda m: m.layers._modules.update({"0": m.layers[1], "1": m.layers[0]}),
    ),
    "an object": (
        put(one=lambda m: Held(m.first), two=lambda m: Held(m.second), active=lambda m: m.one),
        lambda m, x: x * m.active.value,
        put(active=lambda m: m.two),
    ),
    "a list": (
        put(one=lambda m: [m.first], two=lambda m: [m.second], active=lambda m: m.one),
        lambda m, x: x * m.active[0],
        put(active=lambda m: m.two),
    ),
    "a list of modules": (
        put(one=lambda m: [m.layers[0]], two=lambda m: [m.layers[1]], active=lambda m: m.one),
        lambda m, x: m.active[0](x),
        put(active=lambda m: m.two),
    ),
    "a list in a dict": (
        put(one=lambda m: {"a": [m.first]}, two=lambda m: {"a": [m.second]}, active=lambda m: m.one),
        lambda m, x: x * m.active["a"][0],
        put(active=lambda m: m.two),
    ),
    "a tensor": (
        put(active=lambda m: m.first),
        lambda m, x: x * m.active,
        put(active=lambda m: m.second),
    ),
    "a function": (
        put(active=lambda m: functools.partial(m.layers[0])),
        lambda m, x: m.active(x),
        put(active=lambda m: functools.partial(m.layers[1])),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_another_object_in_a_second_place_is_noticed(case: str, device: torch.device) -> None:
    add, read, change = CASES[case]
    module = Holding(add, read, device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    x = torch.randn(3, WIDTH, device=device)
    for _ in range(6):
        model(x)
    assert model.graph_stats.replays
    before = model.forward(x)
    change(model)
    expected = model.forward(x)
    assert not torch.allclose(before, expected)
    for _ in range(6):
        torch.testing.assert_close(model(x), expected)


def test_an_object_in_two_places_keeps_its_graphs_while_nothing_changes(device: torch.device) -> None:
    add, read, _ = CASES["an object"]
    module = Holding(add, read, device).eval()
    model: Any = sg.wrap(module, capture_sizes=[3], progress=False)
    x = torch.randn(3, WIDTH, device=device)
    for _ in range(6):
        model(x)
    captures = model.graph_stats.captures
    module.name = "unread"
    for _ in range(6):
        model(x)
    assert model.graph_stats.recaptures == 0
    assert model.graph_stats.captures == captures + 1  # of the other plain value
