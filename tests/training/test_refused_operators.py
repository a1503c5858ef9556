"""Operators that would break a capture, and what comes after it: an eager run shows them, and no capture begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 9)

    def forward(self, x: Tensor) -> Tensor:
        square = self.layer(x).view(-1, 3, 3)
        return torch.linalg.eigvalsh(square + square.mT)


def _wrapped(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    wrapped: Any = sg.wrap(model, training=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = wrapped(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, wrapped


def _whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    def step_fn(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = sg.train_step(step_fn, optimizers=optimizer, modules=[model])
    return step, step


@pytest.mark.parametrize("make", [_wrapped, _whole])
def test_no_capture_begins_after_an_eager_run_showed_that_it_would_break(make: Any, device: torch.device) -> None:
    model = Spectrum().to(device)
    step, graphed = make(model, torch.optim.SGD(model.parameters(), lr=0.125, fused=True))
    for _ in range(4):
        assert step(torch.randn(4, 3, device=device)).isfinite()
    stats = graphed.graph_stats
    assert (stats.captures, stats.replays) == (0, 0)
    assert stats.eager[Reason.CAPTURE_FAILED] >= 2
    (failure,) = stats.failures.values()
    assert "it is called at" in failure  # which a run tells that is no capture
    assert "torch.linalg.eigvalsh(square + square.mT)" in failure
