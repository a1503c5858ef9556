"""Gradients that are accumulated over steps are the sum of those of each, whichever graph computed them."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device

PARTS, ROUNDS = 2, 8


def _batches(device: torch.device) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(4, 6, device=device), torch.randn(4, 2, device=device)) for _ in range(PARTS * ROUNDS)]


def _model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)


def _alone(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """One batch's gradients, computed beside what the model has accumulated."""
    twin = copy.deepcopy(model)
    return list(torch.autograd.grad(F.mse_loss(twin(x), y), list(twin.parameters())))


def _check_sums(model: nn.Module, backward: Callable[[Tensor, Tensor], object], replays: Callable[[], int]) -> None:
    for index, (x, y) in enumerate(_batches(next(model.parameters()).device)):
        if index % PARTS == 0:
            model.zero_grad(set_to_none=True)
            wanted = [torch.zeros_like(parameter) for parameter in model.parameters()]
        gradients = _alone(model, x, y)
        backward(x, y)
        for total, gradient in zip(wanted, gradients, strict=True):
            total += gradient
        for parameter, total in zip(model.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, total, rtol=1e-6, atol=1e-7)
    assert replays() >= PARTS * ROUNDS // 2


def test_a_step_without_the_optimizer_adds_to_the_gradients(device: torch.device) -> None:
    model = _model(device)

    def accumulate(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    step = sg.train_step(accumulate, optimizers=torch.optim.SGD(model.parameters(), lr=0.5), modules=[model])
    _check_sums(model, step, lambda: step.graph_stats.replays)


def test_a_second_backward_of_one_graph_adds_its_own_gradients(device: torch.device) -> None:
    """`make_graphed_callables` gives the second batch's gradients twice: autograd keeps its static buffer as `grad`."""
    model = _model(device)
    wrapped = sg.wrap(model, training=True)
    _check_sums(model, lambda x, y: F.mse_loss(wrapped(x), y).backward(), lambda: wrapped.graph_stats.replays)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_the_caller_keeps_are_not_overwritten(set_to_none: bool, device: torch.device) -> None:
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125, fused=True)

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = sg.train_step(step_fn, optimizers=optimizer, modules=[model])
    for x, y in _batches(device):
        wanted = _alone(model, x, y)
        step(x, y)
        for parameter, gradient in zip(model.parameters(), wanted, strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-7)
    assert step.graph_stats.replays >= PARTS * ROUNDS // 2


@pytest.mark.proofs
def test_what_a_proof_took_is_given_back_at_the_first_replay(device: torch.device) -> None:
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    counted = graph_device(device)

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = sg.train_step(step_fn, optimizers=optimizer, modules=[model])
    released, ended = [], []
    for x, y in _batches(device)[:6]:
        gradients = [weakref.ref(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
        step(x, y)
        released.append(counted.cache_releases())
        ended.append(sum(gradient() is None for gradient in gradients))
    assert step.graph_stats.replays == 3
    assert ended[3] == 4  # eager's gradients of the proof, as the first replay left its own
    if device.type == "cpu":
        # Before the capture, after the proof, and then no more.
        assert [after - before for before, after in itertools.pairwise(released)] == [0, 1, 1, 0, 0]
