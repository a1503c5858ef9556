"""Work of autograd that the CPU shows otherwise than a GPU: forward mode, and a backward that fills by a mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import simplegraph as sg

NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def pushed(x: Tensor) -> tuple[Tensor, ...]:
    primal, tangent = torch.func.jvp(NET.to(x.device), (x,), (x + 1,))
    return primal, tangent


def curved(x: Tensor) -> Tensor:
    net = NET.to(x.device)
    bent: Tensor = torch.vmap(torch.func.hessian(lambda row: net(row).sum()))(x)
    return bent


def dual(x: Tensor) -> tuple[Tensor, ...]:
    with forward_ad.dual_level():
        return tuple(forward_ad.unpack_dual(NET.to(x.device)(forward_ad.make_dual(x, x + 1))))


@pytest.mark.parametrize("function", [pushed, curved, dual])
def test_forward_mode_is_captured(function: Callable[[Tensor], Any], device: torch.device) -> None:
    served: Any = sg.wrap(torch.no_grad()(function), exact_shapes=True)
    for _ in range(5):
        x = torch.randn(2, 3, device=device)
        with torch.no_grad():
            torch.testing.assert_close(served(x), function(x))
    assert served.graph_stats.replays >= 3


def test_a_step_through_a_number_put_by_a_mask_is_captured(device: torch.device) -> None:
    """As in the divergence of two categorical distributions."""
    model = nn.Linear(3, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        y = model(x) * 2
        y[y > 1] = 0.0
        loss = y.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    graphed: Any = sg.train_step(step, optimizers=optimizer)
    for _ in range(6):
        graphed(torch.randn(4, 3, device=device))
    assert graphed.graph_stats.replays >= 2, graphed.graph_report()


def test_a_backward_through_a_value_on_the_device_put_by_a_mask_is_refused(device: torch.device) -> None:
    model = nn.Linear(3, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        y = model(x) * 2
        y[y > 1] = x.mean()
        loss = y.square().sum()
        loss.backward()
        optimizer.step()
        return loss

    graphed: Any = sg.train_step(step, optimizers=optimizer)
    for _ in range(4):
        graphed(torch.randn(4, 3, device=device))
    assert graphed.graph_stats.replays == 0
    assert "a boolean mask" in str(graphed.graph_report())
