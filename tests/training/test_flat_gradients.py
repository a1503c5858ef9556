"""Gradients of the user's own stay where they are: a step adds to them there, or runs eagerly by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason

CALLS = 14


class Trained:
    """A model whose gradients are views of one buffer, or tensors of their own."""

    def __init__(self, device: torch.device, *, flat: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(device)
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.125, fused=True)
        if flat:
            self.use(torch.zeros(sum(each.numel() for each in self.parameters), device=device))
        else:
            self.use(*(torch.zeros_like(each) for each in self.parameters))

    def use(self, *buffers: Tensor) -> None:
        """Let gradients lie in one buffer, or each in its own."""
        self.buffers = buffers
        sizes = [each.numel() for each in self.parameters]
        parts = buffers[0].split(sizes) if len(buffers) == 1 else buffers
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter) if len(buffers) == 1 else part
        self.own = [each.grad for each in self.parameters]

    @property
    def sum(self) -> float:
        return float(sum(buffer.double().square().sum() for buffer in self.buffers))


Step = Callable[[Trained, Tensor], Any]


def zero_buffers(trained: Trained, x: Tensor) -> Tensor:
    for buffer in trained.buffers:
        buffer.zero_()
    loss = trained.model(x).square().mean()
    loss.backward()
    for buffer in trained.buffers:
        buffer.mul_(0.5)
    trained.optimizer.step()
    return loss.detach()


def zero_gradients(trained: Trained, x: Tensor) -> Tensor:
    trained.optimizer.zero_grad(set_to_none=False)
    loss = trained.model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(trained.parameters, 0.25)
    trained.optimizer.step()
    return loss.detach()


def accumulate(trained: Trained, x: Tensor) -> Tensor:
    loss = trained.model(x).square().mean()
    loss.backward()
    trained.optimizer.step()
    return loss.detach()


STEPS: dict[str, Step] = {each.__name__: each for each in (zero_buffers, zero_gradients, accumulate)}


def run(
    step: Step, device: torch.device, *, graphed: bool, flat: bool, between: Callable[[Trained, int], object]
) -> tuple[list[Any], Any]:
    trained = Trained(device, flat=flat)

    def step_fn(x: Tensor) -> Tensor:
        return step(trained, x)

    called: Any = step_fn
    if graphed:
        called = sg.train_step(step_fn, optimizers=trained.optimizer, modules=[trained.model])
    found = []
    for call in range(CALLS):
        between(trained, call)
        torch.manual_seed(call)
        loss = called(torch.randn(4, 6, device=device))
        kept = [each.grad is own for each, own in zip(trained.parameters, trained.own, strict=True)]
        found.append((float(loss), trained.sum, kept, [float(each.detach().sum()) for each in trained.parameters]))
    return found, called


def nothing(*_: Any) -> None: ...


def same(one: Any, other: Any) -> bool:
    (loss, total, kept, sums), (loss_, total_, kept_, sums_) = one, other
    return kept == kept_ and torch.allclose(torch.tensor([loss, total, *sums]), torch.tensor([loss_, total_, *sums_]))


@pytest.mark.parametrize("flat", [True, False], ids=["one buffer", "a tensor each"])
@pytest.mark.parametrize("name", STEPS)
def test_the_users_own_gradients_are_written_where_they_are(name: str, flat: bool, device: torch.device) -> None:
    expected, _ = run(STEPS[name], device, graphed=False, flat=flat, between=nothing)
    found, step = run(STEPS[name], device, graphed=True, flat=flat, between=nothing)
    assert [call for call, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)] == []
    assert all(all(kept) for _, _, kept, _ in found)
    assert step.graph_stats.captures == 1
    assert step.graph_stats.replays >= CALLS - 2


@pytest.mark.parametrize("flat", [True, False], ids=["one buffer", "a tensor each"])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_that_the_user_replaces_once_are_written_where_they_are_then(
    name: str, flat: bool, device: torch.device
) -> None:
    """Nothing is written to the old ones either."""
    old: list[tuple[Tensor, Tensor]] = []

    def replace(trained: Trained, call: int) -> None:
        if call == 6:
            old.extend((buffer, buffer.clone()) for buffer in trained.buffers)
            trained.use(*map(torch.zeros_like, trained.buffers))

    expected, _ = run(STEPS[name], device, graphed=False, flat=flat, between=replace)
    found, step = run(STEPS[name], device, graphed=True, flat=flat, between=replace)
    assert all(torch.equal(*pair) for pair in old)
    assert step.graph_stats.replays >= 6
    assert [call for call, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)] == []


@pytest.mark.parametrize("flat", [True, False], ids=["one buffer", "a tensor each"])
@pytest.mark.parametrize("name", STEPS)
def test_gradients_that_are_new_at_every_call_and_held_elsewhere_are_refused_by_name(
    name: str, flat: bool, device: torch.device
) -> None:
    replaced: list[Tensor] = []  # kept, so that no new one gets the address of an old one

    def replace(trained: Trained, _: int) -> None:
        replaced.extend(trained.buffers)
        trained.use(*map(torch.zeros_like, trained.buffers))

    expected, _ = run(STEPS[name], device, graphed=False, flat=flat, between=replace)
    found, step = run(STEPS[name], device, graphed=True, flat=flat, between=replace)
    assert [call for call, pair in enumerate(zip(found, expected, strict=True)) if not same(*pair)] == []
    refused = step.graph_stats.details[Reason.UNTRAINABLE]
    assert "the buffer that they are views of, once, before the first step" in refused


def test_rates_that_a_step_returns_stay_numbers_in_a_history(device: torch.device) -> None:
    model = nn.Linear(6, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, fused=True)

    @sg.train_step(optimizers=optimizer)
    def step(x: Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        return {"lr": optimizer.param_groups[0]["lr"]}

    history, rates = [], [0.5, 0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 0.125]
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        history.append(step(torch.ones(4, 6, device=device))["lr"])
        assert round(optimizer.param_groups[0]["lr"], 3) == rate
    assert json.loads(json.dumps(history)) == rates
