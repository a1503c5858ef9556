"""Small models with one break, captured in pieces and compared with eager."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.manager.stats import GraphCounters

SIZES = [2, 4]


class Counts(ctypes.Structure):
    """Counts, so that a test can tell what ran, in memory of C: a number of Python would be a reason to run eagerly."""

    _fields_ = (("breaks", ctypes.c_long), ("forwards", ctypes.c_long))


Calls = Counts()


@sg.eager_break
def doubled(x: Tensor) -> Tensor:
    Calls.breaks += 1
    return x * 2


class Model(nn.Module):
    """Linear, a break, Linear; `middle` is the break."""

    def __init__(self, middle: Callable[..., Any] = doubled) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.middle = middle

    def forward(self, x: Tensor) -> Any:
        Calls.forwards += 1
        hidden = self.first(x)
        return self.last(self.middle(hidden)) + hidden


def piecewise(module: nn.Module, device: torch.device, **settings: Any) -> Any:
    settings = {"mode": "PIECEWISE", "capture_sizes": SIZES, "progress": False} | settings
    return sg.wrap(module.to(device).eval(), **settings)


def graphs(model: Any) -> list[GraphCounters]:
    return list(model.graph_stats.graphs.values())


def check_equal(model: Any, module: nn.Module, device: torch.device, calls: int = 8, width: int = 4) -> None:
    """Some calls of each size, padded ones too, with garbage left in freed memory between them."""
    for index in range(calls):
        x = torch.randn(1 + index % 4, width, device=device)
        expected = module(x)
        _ = [torch.full((size, 8), float("nan"), device=device) for size in (1, 4, 64, 256)]
        torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays > 0


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.proj(x).softmax(-1), None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.mlp = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x + self.attn(x)[0]).relu()


def stack(blocks: int = 3) -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(blocks)])


@dataclasses.dataclass
class Pair:
    left: Tensor
    right: Tensor


def total(result: Any) -> Any:
    """Everything in a result, in one number per call."""
    if isinstance(result, Tensor):
        return result.double().sum() if result.numel() else 0
    if isinstance(result, Pair):
        return total(result.left) * total(result.right)
    if isinstance(result, dict):
        return sum(total(value) for value in result.values())
    if isinstance(result, (list, tuple)):
        return sum(total(value) for value in result)
    return 0 if result is None else result


class Returning(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = sg.eager_break(function)

    def forward(self, x: Tensor) -> Any:
        hidden = x * 2
        result = self.function(hidden)
        return hidden + total(result), result if isinstance(result, Tensor) else hidden
