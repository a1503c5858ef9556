"""Training steps that leave tensors in attributes of modules: an auxiliary loss, the state of a recurrent layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import simplegraph as sg

STEPS = 12


class Gated(nn.Module):
    """Leaves its auxiliary loss, with its history."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(4, 3), nn.Linear(3, 4)
        self.aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate(x).softmax(-1)
        self.aux = gate.square().mean()
        return self.out(gate)


class Recurrent(nn.Module):
    """Leaves its state, detached, and reads it in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 4), nn.Linear(4, 4)
        self.aux: Any = torch.zeros(())
        self.state: Any = None

    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x, self.state)
        self.state = h.detach(), c.detach()
        return self.out(h)


def normed() -> nn.Module:
    model = Gated()
    nn.utils.weight_norm(model.gate)
    return model


def averaging(keep: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    class Averaging(Gated):
        def __init__(self) -> None:
            super().__init__()
            self.mean: Any = torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            self.mean = 0.9 * self.mean + keep(self.aux)
            return out

    return Averaging


def train(make: Callable[[], nn.Module], device: torch.device, *, graphed: bool) -> tuple[list[Any], nn.Module, Any]:
    torch.manual_seed(0)
    model: Any = make().to(device)
    if model.aux is not None:
        model.aux = model.aux.to(device)
    if "mean" in vars(model):
        model.mean = model.mean.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y) + 0.1 * model.aux
        loss.backward()
        optimizer.step()
        return loss

    called: Any = sg.train_step(step, optimizers=optimizer) if graphed else step
    seen = []
    for at in range(STEPS):
        if at == STEPS - 3 and "state" in vars(model):
            model.state = None
        loss = called(torch.randn(2, 4, device=device), torch.randn(2, 4, device=device))
        left = [model.aux, *(vars(model).get("state") or ()), vars(model).get("mean")]
        seen.append([loss.detach().clone(), *(tensor.detach().clone() for tensor in left if tensor is not None)])
    return seen, model, called


@pytest.mark.proofs
@pytest.mark.parametrize("make", [Gated, Recurrent, normed, averaging(Tensor.detach)])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_what_a_step_leaves_is_eagers_after_each_replay(make: Callable[[], nn.Module], device: torch.device) -> None:
    expected, eager, _ = train(make, device, graphed=False)
    found, model, step = train(make, device, graphed=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(dict(model.state_dict()), dict(eager.state_dict()))
    assert step.graph_stats.replays >= STEPS // 2, step.graph_report()
    kept = copy.deepcopy(found[-1])
    step(torch.randn(2, 4, device=device), torch.randn(2, 4, device=device))
    torch.testing.assert_close(found[-1], kept)


def test_a_step_that_reads_what_the_last_one_left_with_its_history_runs_eagerly(device: torch.device) -> None:
    found, _, step = train(averaging(lambda aux: aux), device, graphed=True)
    expected, *_ = train(averaging(lambda aux: aux), device, graphed=False)
    torch.testing.assert_close(found, expected)
    assert step.graph_stats.replays == 0
    assert "self.model.mean" in step.graph_stats.explained(sg.Reason.GRAD)
    assert "detach" in step.graph_stats.explained(sg.Reason.GRAD)
