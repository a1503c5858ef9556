"""Folded weights follow training: steps of fused optimizers and replays write weights without a new version."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn, optim
from torch.optim import optimizer as torch_optimizer

import simplegraph as sg
from tests.optimizing.models import SHAPE, stack

OPTIMIZERS = {
    "fused SGD": lambda parameters: optim.SGD(parameters, lr=0.5, fused=True),
    "fused AdamW": lambda parameters: optim.AdamW(parameters, lr=0.5, fused=True),
    "SGD": lambda parameters: optim.SGD(parameters, lr=0.5),
}


def answer(module, x):
    with torch.no_grad():
        return module(x)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_with_frozen_statistics_is_folded_at_the_next_call(name, wrapped, device):
    module, x = stack().to(device), torch.randn(SHAPE, device=device)
    original = copy.deepcopy(module)
    sg.optimize(module)
    model = sg.wrap(module, capture_sizes=[2], progress=False) if wrapped else module
    for _ in range(4):
        close(answer(model, x), answer(original, x))
    steps = [OPTIMIZERS[name](list(each.parameters())) for each in (module, original)]
    for _ in range(2):
        for each, step in zip((module, original), steps, strict=True):
            each(x).square().mean().backward()
            step.step()
            step.zero_grad()
        for _ in range(2):
            close(answer(model, x), answer(original, x))
    if wrapped:
        assert model.graph_stats.replays


def test_replays_of_a_training_step_are_folded_at_the_next_call(device):
    module, x = stack().to(device), torch.randn(SHAPE, device=device)
    original = copy.deepcopy(module)
    sg.optimize(module)
    first = answer(module, x)

    def trained(each):
        optimizer = optim.SGD(list(each.parameters()), lr=0.5)

        def step(x):
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step, optimizer

    plain, _ = trained(original)
    step, optimizer = trained(module)
    graphed = sg.train_step(step, optimizers=optimizer, progress=False)
    for _ in range(6):
        plain(x)
        graphed(x)
        close(answer(module, x), answer(original, x))
    assert graphed.graph_stats.replays >= 2
    assert (answer(module, x) - first).abs().max() > 0.1


def test_a_training_step_that_asks_the_folded_module_gets_the_answer_of_the_new_weights(device):
    """The capture finds weights that the step just wrote, folds nothing, and runs convolution and norm."""
    module, x = stack().to(device), torch.randn(SHAPE, device=device)
    original = copy.deepcopy(module)
    sg.optimize(module)
    answer(module, x)

    def trained(each):
        optimizer = optim.SGD(list(each.parameters()), lr=0.5)

        def step(x):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            return answer(each, x)

        return step, optimizer

    plain, _ = trained(original)
    step, optimizer = trained(module)
    graphed = sg.train_step(step, optimizers=optimizer, progress=False)
    answers = [(graphed(x), plain(x)) for _ in range(6)]
    for found, expected in answers:
        close(found, expected)
    assert graphed.graph_stats.replays >= 2
    assert (answers[-1][0] - answers[0][0]).abs().max() > 0.1


def test_a_norm_alone_in_training_mode_is_not_folded(device):
    module, x = stack().to(device), torch.randn(SHAPE, device=device)
    original = copy.deepcopy(module)
    sg.optimize(module)
    close(answer(module, x), answer(original, x))
    for each in (module, original):
        each[1].train()
    close(answer(module, x), answer(original, x))
    torch.testing.assert_close(module[1].running_mean, original[1].running_mean)
    assert module[1].num_batches_tracked == original[1].num_batches_tracked


def test_steps_of_another_model_fold_nothing_again(device, monkeypatch):
    module, other = stack().to(device), nn.Linear(4, 4, device=device)
    handle = sg.optimize(module)
    x = torch.randn(SHAPE, device=device)
    before = answer(module, x)
    folded = []
    memory = handle._memory
    monkeypatch.setattr(type(memory), "_fold", lambda self, stale: folded.append(stale))
    optimizer = optim.SGD(other.parameters(), lr=0.5, fused=True)
    other(torch.ones(2, 4, device=device)).sum().backward()
    optimizer.step()
    assert torch.equal(answer(module, x), before)
    assert folded == []


def test_the_hook_on_optimizers_goes_with_the_last_folded_module():
    hooks = torch_optimizer._global_optimizer_post_hooks
    gc.collect()
    before = len(hooks)
    modules = [stack(), stack()]
    handles = [sg.optimize(module) for module in modules]
    assert len(hooks) == before + len(modules)
    seen = weakref.ref(handles[0]._memory)
    handles[0].remove()
    del handles[0], modules[0]
    gc.collect()
    assert seen() is None
    assert len(hooks) == before + len(modules)
    handles[0].remove()
    handles.clear()
    gc.collect()
    assert len(hooks) == before
