"""Modules that most tests of wrapped modules use, and how their answers are compared."""

from __future__ import annotations

import torch
from run_log import run_log
from torch import nn

import simplegraph as sg
from simplegraph.device.select import graph_device

WIDTH = 8
SIZES = [2, 4, 7]


class Mlp(nn.Module):
    """Rows are independent; a little of everything a decoder has."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class MixinMlp(sg.CudaGraphWrapper, Mlp, capture_sizes=SIZES, verify=0, progress=False):
    pass


@sg.cuda_graph(capture_sizes=SIZES, verify=0, progress=False)
class DecoratedMlp(Mlp):
    pass


class Counting(nn.Module):
    """Counts its calls twice: on the device, and in Python, outside the module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.runs = run_log()

    def forward(self, x):
        self.count += 1
        self.runs(graph_device(x.device).is_capturing())
        return x * 2

    @property
    def python_count(self) -> int:
        """Runs that were no capture."""
        return self.runs().count((False,))


class Attention(nn.Module):
    """A child that is wrapped itself."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.proj(x))


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.inner(x))


def rows(count: int, device: torch.device, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, device=device)


def wrapped_mlp(device, **settings):
    module = Mlp().to(device).eval()
    return sg.wrap(module, **{"capture_sizes": SIZES, "progress": False, **settings})
