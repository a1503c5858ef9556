"""Modules around a function, compared with eager at every size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons

WIDTH = 6


class Batch(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Opaque:
    """Compares by identity and may change inside."""

    def __init__(self, value):
        self.value = value


class Function(nn.Module):
    """A module around a function, which gets the module first."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def graphed(device, function, **settings):
    module = Function(function).to(device).eval()
    return sg.wrap(module, **{"capture_sizes": [4, 8], "progress": False, **settings})


def rows(count, device, *shape):
    return torch.randn(count, *(shape or (WIDTH,)), device=device)


def check_sizes(model, make, sizes=(4, 4, 4, 8, 8, 8, 3, 3, 5, 1, 6, 4, 7), *, replays=None):
    """Call the model with fresh arguments of every size; compare with eager; return how many calls replayed."""
    eager = sg.unwrap(model)
    before = model.graph_stats.replays
    for size in sizes:
        args, kwargs = make(size)
        close(model(*args, **kwargs), eager(*args, **kwargs))
    served = model.graph_stats.replays - before
    if replays is not None:
        assert served >= replays, reasons(model)
    return served
