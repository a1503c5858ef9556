"""The `self` of a wrapped module's forward is the module that was wrapped: code that goes by identity finds it."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg

SCALES: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


class Child(nn.Module):
    def __init__(self, root: nn.Module) -> None:
        super().__init__()
        self.__dict__["root"] = root

    def forward(self, x: Tensor, root: nn.Module) -> Tensor:
        return x + 1 if root is self.root else x


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.child = Child(self)
        SCALES[self] = 3.0

    def forward(self, x: Tensor) -> Tensor:
        return self.child(self.l(x), self) * SCALES[self]


def test_a_registry_and_a_child_that_know_the_module_find_it_in_eager_runs_and_in_graphs(device: torch.device) -> None:
    net = Root().to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    assert sg.unwrap(model) is net
    with torch.no_grad():
        for step in range(4):
            x = torch.full((2, 4), float(step), device=device)
            torch.testing.assert_close(model(x), net(x))
    assert model.graph_stats.replays >= 2


def test_hooks_are_passed_the_module_that_was_wrapped(device: torch.device) -> None:
    net = Root().to(device).eval()
    passed: list[Any] = []
    net.register_forward_hook(lambda module, args, output: passed.append(module))
    with torch.no_grad():
        sg.wrap(net, mode="NONE")(torch.ones(2, 4, device=device))
    assert passed == [net]
    assert passed[0] is net


def test_a_parametrization_by_way_of_the_wrapper_is_run(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 4)).to(device).eval()
    layer = sg.wrap(net[0], capture_sizes=[2], progress=False)

    class Twice(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * 2

    x, weight, bias = torch.ones(2, 4, device=device), net[0].weight.detach(), net[0].bias.detach()
    nn.utils.parametrize.register_parametrization(layer, "weight", Twice())
    with torch.no_grad():
        for _ in range(4):
            torch.testing.assert_close(layer(x), nn.functional.linear(x, weight * 2, bias))
