"""A function of torch or of another library is replaced after a capture, as drop-in kernels are: never stale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("no_grad")


class Calling(nn.Module):
    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


class Case(NamedTuple):
    make: Callable[[], nn.Module]
    owner: Any
    name: str
    by: Callable[..., Any]


def _doubled(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * 2


CASES = {
    "of torch.nn.functional": Case(lambda: Calling(lambda x: functional.gelu(x)), functional, "gelu", _doubled),
    "by its full name": Case(lambda: Calling(lambda x: torch.nn.functional.gelu(x)), functional, "gelu", _doubled),
    "in a layer of torch": Case(nn.GELU, functional, "gelu", _doubled),
    "attention": Case(
        lambda: Calling(lambda x: functional.scaled_dot_product_attention(x, x, x)),
        functional,
        "scaled_dot_product_attention",
        _doubled,
    ),
    "of torch": Case(lambda: Calling(lambda x: torch.tanh(x)), torch, "tanh", _doubled),
    "of torch.special": Case(lambda: Calling(lambda x: torch.special.expit(x)), torch.special, "expit", _doubled),
    "a method of tensors": Case(lambda: Calling(lambda x: x.tanh()), Tensor, "tanh", _doubled),
    "an operator of tensors": Case(lambda: Calling(lambda x: x + 1), Tensor, "__add__", _doubled),
    "of math": Case(lambda: Calling(lambda x: x * math.exp(1.0)), math, "exp", lambda _: 2.0),
    "of NumPy": Case(lambda: Calling(lambda x: x * float(np.exp(1.0))), np, "exp", lambda _: 2.0),
}


@pytest.mark.usefixtures("with_versions")
@pytest.mark.parametrize("way", CASES)
def test_a_replaced_function(way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[way]
    model = case.make().eval()
    graphed: Any = sg.wrap(model, capture_sizes=[2], progress=False)
    for is_replaced in (False, True):
        if is_replaced:
            monkeypatch.setattr(case.owner, case.name, case.by)
        replays = graphed.graph_stats.replays
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(graphed(x), sg.unwrap(model).forward(x))
        assert graphed.graph_stats.replays > replays


NUMBER = 2.0


def _scaled(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x * NUMBER


@pytest.mark.parametrize("way", CASES)
def test_the_code_of_a_function_in_the_place_of_a_librarys(
    way: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[way]
    of_numbers = case.owner in (math, np)
    monkeypatch.setattr(case.owner, case.name, (lambda _: NUMBER) if of_numbers else _scaled)
    graphed: Any = sg.wrap(case.make().eval(), capture_sizes=[2], progress=False)
    for number in (2.0, 3.0):
        monkeypatch.setitem(globals(), "NUMBER", number)
        replays = graphed.graph_stats.replays
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(graphed(x), torch.mul(x, number))
        assert graphed.graph_stats.replays > replays
