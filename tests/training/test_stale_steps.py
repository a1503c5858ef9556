"""Steps go on as those of eager after changes beside tensors, such as to settings of layers and to hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook

import simplegraph as sg
from simplegraph.base.reasons import Reason
from tests.training.models import square_step

CALLS, CHANGED = 12, 6
Change = Callable[[nn.Module, optim.Optimizer], object]


def net() -> nn.Module:
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Dropout(0.25), nn.Linear(8, 2)]
    return nn.Sequential(*layers)


def nothing(*_: Any) -> None: ...


def trained(
    change: Change, device: torch.device, *, graphs: str = "", begin: Change = nothing
) -> tuple[list[Tensor], Any]:
    """Train with a change on the way; return the parameters and buffers after each step, and what counts replays."""
    torch.manual_seed(0)
    model = net().to(device)
    optimizer = optim.SGD(model.parameters(), lr=0.125, momentum=0.5, fused=True)
    begin(model, optimizer)
    step, counted = square_step(model, optimizer, graphs)
    torch.manual_seed(1)
    found = []
    for call in range(CALLS):
        if call == CHANGED:
            change(model, optimizer)
        loss = step(torch.randn(4, 6, device=device))
        everything = [loss.reshape(1), *(tensor.flatten().float() for tensor in model.state_dict().values())]
        found.append(torch.cat(everything).clone())
    return found, counted


def assert_trains_as_eager(
    change: Change, device: torch.device, graphs: str, *, replays: int, begin: Change = nothing
) -> None:
    expected, _ = trained(change, device, begin=begin)
    found, graphed = trained(change, device, graphs=graphs, begin=begin)
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


def scale_gradients(optimizer: optim.Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.5)


def double(gradient: Tensor) -> None:
    gradient.mul_(2)


def decay(optimizer: optim.Optimizer, *_: Any) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.data.mul_(0.5)


HOOKS: dict[str, Change] = {
    "a gradient's": lambda model, _: model[0].weight.register_hook(lambda gradient: gradient * 2),
    "an accumulated gradient's": lambda model, _: model[0].weight.register_post_accumulate_grad_hook(
        lambda parameter: double(parameter.grad)
    ),
    "before the optimizer's step": lambda _, optimizer: optimizer.register_step_pre_hook(scale_gradients),
    "after the optimizer's step": lambda _, optimizer: optimizer.register_step_post_hook(decay),
    "instead of the optimizer's step": lambda _, optimizer: setattr(optimizer, "step", lambda: decay(optimizer)),
}


@pytest.mark.parametrize("graphs", ["steps", "pairs"])
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_are_added_run_from_the_next_step_on(name: str, graphs: str, device: torch.device) -> None:
    assert_trains_as_eager(HOOKS[name], device, graphs, replays=6)


@pytest.mark.parametrize("name", [name for name in HOOKS if "instead" not in name])
def test_hooks_that_are_removed_run_no_more(name: str, device: torch.device) -> None:
    handles: dict[int, Any] = {}

    def change(model: nn.Module, optimizer: optim.Optimizer) -> None:
        handles.pop(id(model)).remove()

    def begin(model: nn.Module, optimizer: optim.Optimizer) -> None:
        handles[id(model)] = HOOKS[name](model, optimizer)

    assert_trains_as_eager(change, device, "steps", replays=6, begin=begin)
    assert not handles


def test_the_optimizers_own_step_is_used_again(device: torch.device) -> None:
    def begin(_: nn.Module, optimizer: optim.Optimizer) -> None:
        vars(optimizer)["step"] = lambda: decay(optimizer)

    assert_trains_as_eager(lambda _, optimizer: delattr(optimizer, "step"), device, "steps", replays=6, begin=begin)


COUNTED = {"calls": 0}


def count(*_: Any) -> None:
    COUNTED["calls"] += 1


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("added", ["Tensor.register_hook", "Optimizer.register_step_post_hook"])
def test_a_hook_that_counts_in_python_counts_every_step(added: str, when: str, device: torch.device) -> None:
    def add(model: nn.Module, optimizer: optim.Optimizer) -> None:
        COUNTED["calls"] = 0
        method = model[0].weight.register_hook if "Tensor" in added else optimizer.register_step_post_hook
        method(count)

    changes = {"begin": add, "change": nothing} if when == "before" else {"change": add}
    for graphs in ("", "steps"):
        _, step = trained(device=device, graphs=graphs, **changes)
        assert COUNTED["calls"] == (CALLS if when == "before" else CALLS - CHANGED)
    assert "COUNTED['calls']" in str(step.graph_report()), "what counts is named"


def test_a_hook_that_moves_to_another_parameter_runs_there(device: torch.device) -> None:
    handles: dict[int, Any] = {}

    def double_all(gradient: Tensor) -> Tensor:
        return gradient * 2

    def begin(model: nn.Module, _: optim.Optimizer) -> None:
        handles[id(model)] = model[0].weight.register_hook(double_all)

    def change(model: nn.Module, _: optim.Optimizer) -> None:
        handles.pop(id(model)).remove()
        model[4].weight.register_hook(double_all)

    assert_trains_as_eager(change, device, "steps", replays=6, begin=begin)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("graphs", ["steps", "pairs"])
def test_hooks_on_everything_run(graphs: str, device: torch.device) -> None:
    handles: list[Any] = []

    def change(*_: Any) -> None:
        handles.append(nn.modules.module.register_module_full_backward_hook(double_inputs))
        if graphs == "steps":
            handles.append(register_optimizer_step_post_hook(decay))

    def end() -> None:
        for handle in handles:
            handle.remove()
        handles.clear()

    try:
        expected, _ = trained(change, device)
        end()
        found, graphed = trained(change, device, graphs=graphs)
    finally:
        end()
    assert [call for call, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)] == []
    assert graphed.graph_stats.eager[Reason.HOOKS] == CALLS - CHANGED


def double_inputs(_: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if each is None else each * 2 for each in inputs)


def node_of(model: nn.Module) -> Any:
    return torch.autograd.graph.get_gradient_edge(model[0].weight).node


SEEN: list[int] = []
REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "a node's": (lambda model: node_of(model).register_hook(lambda *_: SEEN.append(1)), "AccumulateGrad"),
    "before a node": (lambda model: node_of(model).register_prehook(lambda grads: (grads[0] * 2,)), "AccumulateGrad"),
    "all of several": (
        lambda model: torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), lambda _: SEEN.append(1)),
        "register_multi_grad_hook",
    ),
    "any of several": (
        lambda model: torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda _: SEEN.append(1), mode="any"
        ),
        "register_multi_grad_hook",
    ),
}


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("graphs", ["steps", "pairs"])
@pytest.mark.parametrize("name", REFUSED)
def test_hooks_on_nodes_and_on_several_gradients_run_every_time(
    name: str, graphs: str, when: str, device: torch.device
) -> None:
    register, reason = REFUSED[name]
    kept: list[Any] = []

    def add(model: nn.Module, _: optim.Optimizer) -> None:
        kept.extend((node_of(model), register(model)))  # a hook lives as long as its node

    changes: dict[str, Any] = {"begin": add, "change": nothing} if when == "before" else {"change": add}
    SEEN.clear()
    expected, _ = trained(device=device, **changes)
    seen = len(SEEN)
    SEEN.clear()
    found, graphed = trained(device=device, graphs=graphs, **changes)
    assert [call for call, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)] == []
    assert len(SEEN) == seen
    if graphs == "steps":
        assert reason in graphed.graph_stats.details[Reason.HOOKS]
        assert graphed.graph_stats.eager[Reason.HOOKS] == (CALLS if when == "before" else CALLS - CHANGED)
    else:
        assert graphed.graph_stats.replays >= 6


def test_steps_are_served_again_once_a_nodes_hook_is_removed(device: torch.device) -> None:
    kept: list[Any] = []

    def begin(model: nn.Module, _: optim.Optimizer) -> None:
        kept.append((node_of(model), node_of(model).register_hook(nothing)))

    assert_trains_as_eager(lambda *_: kept.pop()[1].remove(), device, "steps", replays=3, begin=begin)


def test_a_mode_that_changes_is_named_and_told_to_be_set_before(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step(x: Tensor) -> Tensor:
        model.train()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    graphed = sg.train_step(step, optimizers=optimizer)
    for number in range(24):
        if number > 4 and number % 2:
            model.eval()
        graphed(torch.randn(2, 4, device=device))
    assert "0 (train() or eval())" in graphed.graph_stats.explained(Reason.STALE_TOO_OFTEN)
    always = sg.train_step(step, optimizers=optimizer)
    for _ in range(4):
        model.eval()
        always(torch.randn(2, 4, device=device))
    assert "Call train() and eval() outside, before the call" in str(always.graph_report())
