"""A good forward with trouble in the middle of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device

SIZES = [1, 2, 4, 8]
WIDTH = 6


def capturing(x: Tensor) -> bool:
    return graph_device(x.device).is_capturing()


class Net(nn.Module):
    """A good forward, with whatever `trouble` does in the middle of it."""

    def __init__(self, trouble: Callable[[Tensor], Any] = lambda x: None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.trouble = trouble

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.trouble(x)
        return y * 2


def wrapped(device: torch.device, trouble: Callable[[Tensor], Any] = lambda x: None, **settings: Any) -> Any:
    settings.setdefault("capture_sizes", SIZES)
    return sg.wrap(Net(trouble).to(device).eval(), progress=False, **settings)


def right(model: Any, x: Tensor) -> None:
    """A call gives what the layers alone compute, and random numbers still work."""
    torch.testing.assert_close(model(x), model.linear(x) * 2)
    torch.manual_seed(4)
    first = torch.rand(3, device=x.device)
    torch.manual_seed(4)
    assert torch.equal(torch.rand(3, device=x.device), first)


def rows(count: int, device: torch.device) -> Tensor:
    return torch.randn(count, WIDTH, device=device)


def warm(model: Any, device: torch.device, sizes: tuple[int, ...] = (8, 4, 3, 2, 1), times: int = 3) -> None:
    """Enough calls to capture every size."""
    for _ in range(times):
        for size in sizes:
            right(model, rows(size, device))


def replayed(model: Any, device: torch.device) -> None:
    """The next good calls are replays, and right."""
    before = model.graph_stats.replays
    for size in (3, 8, 1):
        right(model, rows(size, device))
    assert model.graph_stats.replays == before + 3
