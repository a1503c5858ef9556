"""What changes between steps beside tensors, such as settings of layers and hooks: steps go on as those of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import simplegraph as sg

CALLS, CHANGED = 12, 6
Change = Callable[[nn.Module, optim.Optimizer], object]


def net() -> nn.Module:
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Dropout(0.25), nn.Linear(8, 2)]
    return nn.Sequential(*layers)


def trained(change: Change, device: torch.device, *, graphs: str = "") -> tuple[list[Tensor], Any]:
    """Train with a change on the way; return the parameters and buffers after each step, and what counts replays."""
    torch.manual_seed(0)
    model = net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.125, momentum=0.5, fused=True)
    called: Any = sg.wrap(model, training=True, exact_shapes=True, progress=False) if graphs == "pairs" else model

    def step_fn(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = called(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step: Any = sg.train_step(step_fn, optimizers=optimizer, modules=[model]) if graphs == "steps" else step_fn
    torch.manual_seed(1)
    found = []
    for call in range(CALLS):
        if call == CHANGED:
            change(model, optimizer)
        loss = step(torch.randn(4, 6, device=device))
        everything = [loss.reshape(1), *(tensor.flatten().float() for tensor in model.state_dict().values())]
        found.append(torch.cat(everything).clone())
    return found, called if graphs == "pairs" else step


def assert_trains_as_eager(change: Change, device: torch.device, graphs: str, *, replays: int) -> None:
    expected, _ = trained(change, device)
    found, graphed = trained(change, device, graphs=graphs)
    wrong = [call for call, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)]
    assert wrong == []
    assert graphed.graph_stats.replays >= replays


SETTINGS: dict[str, Change] = {
    "Dropout.p": lambda model, _: setattr(model[3], "p", 0.75),
    "BatchNorm.momentum": lambda model, _: setattr(model[1], "momentum", 0.5),
    "LayerNorm.eps": lambda model, _: setattr(model[2], "eps", 0.5),
}


@pytest.mark.parametrize("graphs", ["steps", "pairs"])
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_layers_are_used_from_the_next_step_on(name: str, graphs: str, device: torch.device) -> None:
    assert_trains_as_eager(SETTINGS[name], device, graphs, replays=6)
