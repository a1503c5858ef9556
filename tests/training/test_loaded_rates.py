"""Learning rates that change cost no graphs, and arrive after an optimizer's groups were loaded, with whatever else."""

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
