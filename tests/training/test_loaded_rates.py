"""Learning rates that change cost no graphs, are those of each group, and arrive after groups were loaded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.support.training_cells import capturable_on_cpu

CALLS, LOADED, CHANGED = 16, 6, 10


@pytest.mark.parametrize("momentum", [0.0, 0.5])  # without one there is no state that would lie elsewhere
def test_a_rate_that_is_set_after_groups_were_loaded_is_used(momentum: float, device: torch.device) -> None:
    results: list[list[Tensor]] = []
    step: Any = None
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.125, momentum=momentum, fused=True)

        def step_fn(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = sg.train_step(step_fn, optimizers=optimizer, modules=[model]) if graphed else step_fn
        found = []
        for call in range(CALLS):
            if call == LOADED:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            if call >= CHANGED:
                optimizer.param_groups[0]["lr"] = 2.0**-call
            step(torch.randn(4, 6, device=device))
            found.append(model.weight.detach().clone())
        results.append(found)
    assert [call for call, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)] == []
    assert step.graph_stats.replays >= CALLS - CHANGED


def test_a_schedule_of_a_rate_that_is_read_once_needs_one_graph(device: torch.device) -> None:
    steps, results = 24, list[Tensor]()
    with capturable_on_cpu():
        for graphed in (False, True):
            torch.manual_seed(0)
            model = nn.Linear(6, 2).to(device)
            optimizer = torch.optim.Rprop(model.parameters(), lr=0.125, capturable=True)

            def step_fn(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            step: Any = sg.train_step(step_fn, optimizers=optimizer, modules=[model]) if graphed else step_fn
            for call in range(steps):
                optimizer.param_groups[0]["lr"] = 0.125 / (1 + call)
                step(torch.randn(4, 6, device=device))
            results.append(model.weight.detach().clone())
    assert torch.equal(*results)
    assert (step.graph_stats.captures, step.graph_stats.replays) == (1, steps - 2)


# Of two groups, such as a backbone and a head: one changes without the other, in both directions.
RATES = [(0.5, 0.25), (0.5, 0.125), (0.5, 0.75), (0.125, 0.75), (0.25, 0.75), (0.25, 0.5), (0.75, 0.125)]


@pytest.mark.parametrize("several", [False, True], ids=["groups of one optimizer", "two optimizers"])
@pytest.mark.parametrize("tensors", [False, True], ids=["numbers", "tensors"])
def test_each_group_is_trained_at_its_own_rate_whichever_of_them_changes(
    several: bool, tensors: bool, device: torch.device
) -> None:
    results: list[list[Tensor]] = []
    step: Any = None
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(device)
        groups = [{"params": list(layer.parameters()), "lr": torch.tensor(0.5) if tensors else 0.5} for layer in model]
        made = [groups[:1], groups[1:]] if several else [groups]
        optimizers = [torch.optim.SGD(each, fused=True) for each in made]

        def step_fn(x: Tensor, model: nn.Module = model, optimizers: list[Any] = optimizers) -> Tensor:
            for each in optimizers:
                each.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            for each in optimizers:
                each.step()
            return loss.detach()

        step = sg.train_step(step_fn, optimizers=optimizers, modules=[model]) if graphed else step_fn
        found = []
        for rates in [RATES[0]] * 4 + RATES:
            for group, rate in zip([group for each in optimizers for group in each.param_groups], rates, strict=True):
                if tensors:
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            step(torch.randn(4, 6, device=device))
            found.append(torch.cat([layer.weight.detach().flatten() for layer in model]))
        results.append(found)
    assert [call for call, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)] == []
    assert step.graph_stats.captures == 1
    assert step.graph_stats.replays >= len(RATES)
