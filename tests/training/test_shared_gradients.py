"""Gradients that share memory, as cuDNN makes those of a recurrent layer: views of one buffer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.training.twins import Twins


class Flat(torch.autograd.Function):
    """A linear layer whose backward makes both gradients in one buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        rows, columns = grad.shape[1], x.shape[1]
        flat = torch.cat([(grad.t() @ x).flatten(), grad.sum(0)])
        return None, flat[: rows * columns].view(rows, columns), flat[rows * columns :]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(3, 6)), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return Flat.apply(x, self.weight, self.bias)


@pytest.mark.proofs
def test_gradients_of_one_buffer_are_accumulated_each() -> None:
    def make() -> Any:
        trained = Recurrent()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.125, momentum=0.5, fused=True)

        def step_fn(x: Tensor, last: bool) -> Tensor:
            loss = trained(x).square().mean()
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return step_fn, trained, optimizer

    twins = Twins(make)
    for number in range(16):
        torch.manual_seed(number)
        twins.run(torch.randn(4, 6), number % 2 == 1)
    shared = {gradient.untyped_storage().data_ptr() for gradient in _gradients_of_one_call()}
    assert len(shared) == 1
    assert twins.stats.replays >= 8


def _gradients_of_one_call() -> list[Tensor]:
    model = Recurrent()
    model(torch.randn(4, 6)).sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_gradients_that_another_step_made_are_added_to(device: torch.device) -> None:
    """As in TD3 and DDPG: the actor's backward adds to the critic's gradients, which the critic's step drops."""
    trained: list[list[Tensor]] = []
    for graphed in (False, True):
        torch.manual_seed(0)
        actor, critic = nn.Linear(4, 2).to(device), nn.Linear(6, 1).to(device)
        of_actor, of_critic = (torch.optim.SGD(m.parameters(), 0.1, fused=True) for m in (actor, critic))

        def learn(x: Tensor, a: Tensor, critic: Any = critic, optimizer: Any = of_critic) -> Tensor:
            loss = critic(torch.cat([x, a], 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        def act(x: Tensor, actor: Any = actor, critic: Any = critic, optimizer: Any = of_actor) -> Tensor:
            loss = -critic(torch.cat([x, actor(x)], 1)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss

        steps: list[Any] = [learn, act]
        if graphed:
            steps = [sg.train_step(learn, optimizers=of_critic), sg.train_step(act, optimizers=of_actor)]
        for _ in range(12):
            x, a = torch.randn(4, 4, device=device), torch.randn(4, 2, device=device)
            steps[0](x, a)
            steps[1](x)
        trained.append([p.detach() for m in (actor, critic) for p in m.parameters()])
        trained[-1] += [p.grad.detach() for p in critic.parameters() if p.grad is not None]
        if graphed:
            assert [step.graph_stats.replays >= 6 for step in steps] == [True, True], steps[1].graph_report()
    torch.testing.assert_close(*trained)
