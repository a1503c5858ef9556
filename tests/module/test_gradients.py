"""A gradient is a place like any other: what a call reads of `.grad` is never stale, and what it sets there stays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import close, reasons

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]

WIDTH = 4


class Reading(nn.Module):
    """Reads the gradient of its weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        gradient = self.weight.grad
        return x @ self.weight if gradient is None else x @ (self.weight - 0.1 * gradient)


class Trainer:
    """Keeps what it updates."""

    def __init__(self, parameter: Tensor) -> None:
        self.model = nn.ParameterList([parameter])

    def run(self, x: Tensor) -> Tensor:
        return x @ torch.stack([each - 0.1 * each.grad for each in self.model])[0]


def by_closure(parameter: Tensor) -> Callable[..., Any]:
    return lambda x: x @ (parameter - 0.1 * parameter.grad)


def by_list(parameter: Tensor) -> Callable[..., Any]:
    parameters = [parameter]  # whose own values nothing reads
    return lambda x: x @ torch.stack([each.grad for each in parameters])[0]


def by_dict(parameter: Tensor) -> Callable[..., Any]:
    parameters = {"weight": parameter}
    return lambda x: x @ parameters["weight"].grad.data


def by_computed_name(parameter: Tensor) -> Callable[..., Any]:
    return lambda x: x @ getattr(parameter, "".join(["gr", "ad"]))


def by_norm(parameter: Tensor) -> Callable[..., Any]:
    return lambda x: x / torch.nn.utils.get_total_norm([each.grad for each in [parameter]])


def by_optimizer(parameter: Tensor) -> Callable[..., Any]:
    optimizer = torch.optim.SGD([parameter])
    return lambda x: x @ torch.stack([each.grad for group in optimizer.param_groups for each in group["params"]])[0]


def by_module(parameter: Tensor) -> nn.Module:
    module = Reading(torch.empty(0))
    module.weight = parameter
    return module.eval()


READERS = {
    "closure": by_closure,
    "list": by_list,
    "dict": by_dict,
    "computed name": by_computed_name,
    "norm": by_norm,
    "optimizer": by_optimizer,
    "method": lambda parameter: Trainer(parameter).run,
    "module": by_module,
}


def set_another(parameter: Tensor) -> None:
    parameter.grad = torch.randn_like(parameter)


def run_backward(parameter: Tensor) -> None:
    parameter.grad = None
    with torch.enable_grad():
        (torch.randn(3, WIDTH, device=parameter.device) @ parameter).square().sum().backward()


def set_data(parameter: Tensor) -> None:
    parameter.grad.data = torch.randn_like(parameter)  # type: ignore[union-attr]


def write_in_place(parameter: Tensor) -> None:
    parameter.grad.normal_()  # type: ignore[union-attr]


CHANGES = {"another": set_another, "backward": run_backward, "data": set_data, "in place": write_in_place}


def parameter_on(device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device))
    set_another(parameter)
    return parameter


def served(run: Any, device: torch.device) -> Any:
    """Wrap what reads a gradient, and call it until it is replayed."""
    expected = copy.copy(run) if isinstance(run, nn.Module) else run
    wrapped = sg.wrap(run, capture_sizes=[2])
    for _ in range(4):
        x = torch.randn(2, WIDTH, device=device)
        close(wrapped(x), expected(x))
    assert wrapped.graph_stats.replays >= 1
    return wrapped, expected


@pytest.mark.parametrize("keeps", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reader", READERS)
def test_a_gradient_that_is_read_is_todays(device: torch.device, reader: str, change: str, keeps: bool) -> None:
    parameter = parameter_on(device)
    wrapped, expected = served(READERS[reader](parameter), device)
    before = parameter.grad if keeps else None
    for _ in range(3):
        CHANGES[change](parameter)
        for _ in range(3):
            x = torch.randn(2, WIDTH, device=device)
            close(wrapped(x), expected(x))
    replays = wrapped.graph_stats.replays
    x = torch.randn(2, WIDTH, device=device)
    close(wrapped(x), expected(x))
    assert wrapped.graph_stats.replays == replays + 1
    del before


@pytest.mark.parametrize("as_module", [False, True], ids=["function", "module"])
def test_a_gradient_that_comes_or_goes_takes_the_other_branch(device: torch.device, as_module: bool) -> None:
    module = Reading(torch.randn(WIDTH, WIDTH, device=device)).eval()
    plain = copy.copy(module)
    wrapped = sg.wrap(module if as_module else lambda x: plain(x), capture_sizes=[2])
    for round_ in range(6):
        module.weight.grad = torch.randn_like(module.weight) if round_ % 2 else None
        for _ in range(4):
            x = torch.randn(2, WIDTH, device=device)
            close(wrapped(x), plain(x))
    assert wrapped.graph_stats.replays >= 6


def test_a_model_that_reads_no_gradient_keeps_its_graphs(device: torch.device) -> None:
    model = nn.Linear(WIDTH, WIDTH, device=device).eval()
    wrapped, expected = served(model, device)
    replays = wrapped.graph_stats.replays
    for _ in range(4):
        run_backward(model.weight)
        x = torch.randn(2, WIDTH, device=device)
        close(wrapped(x), expected(x))
        model.zero_grad()
    assert wrapped.graph_stats.replays == replays + 4
    assert wrapped.graph_stats.recaptures == 0


@pytest.mark.parametrize("place", ["attribute", "parameter"])
def test_a_tensor_that_is_set_on_a_tensor_is_todays(device: torch.device, place: str) -> None:
    module = Reading(torch.randn(WIDTH, WIDTH, device=device)).eval()
    module.table = torch.randn(WIDTH, WIDTH, device=device)
    holder: Any = module.table if place == "attribute" else module.weight
    holder.mask = torch.randn_like(module.weight)
    module.forward = lambda x: x @ (holder * holder.mask)  # type: ignore[method-assign]
    wrapped, expected = served(module, device)
    kept = []
    for _ in range(3):
        kept.append(holder.mask)
        holder.mask = torch.randn_like(module.weight)
        for _ in range(3):
            x = torch.randn(2, WIDTH, device=device)
            close(wrapped(x), expected(x))


# Updates by hand, which read gradients, and what some of them do to these.


def descend(parameters: list[Tensor]) -> None:
    for each in parameters:
        each -= 0.1 * each.grad  # type: ignore[operator]


def descend_and_zero(parameters: list[Tensor]) -> None:
    descend(parameters)
    for each in parameters:
        each.grad.zero_()  # type: ignore[union-attr]


def clip_and_descend(parameters: list[Tensor]) -> None:
    total = torch.stack([each.grad.norm() for each in parameters]).norm()  # type: ignore[union-attr]
    for each in parameters:
        each.grad.mul_((0.1 / total).clamp(max=1.0))  # type: ignore[union-attr]
    descend(parameters)


def descend_and_drop(parameters: list[Tensor]) -> None:
    for each in parameters:
        if each.grad is not None:
            each -= 0.1 * each.grad
            each.grad = None


def replace_and_descend(parameters: list[Tensor]) -> None:
    for each in parameters:
        each.grad = 0.5 * each.grad  # type: ignore[operator]
    descend(parameters)


READING = {"descend": descend, "zero": descend_and_zero, "clip": clip_and_descend}
SETTING = {"drop": descend_and_drop, "replace": replace_and_descend}


def losses(
    update: Callable[[list[Tensor]], None], device: torch.device, between: str, *, graphed: bool
) -> tuple[list[Tensor], Any]:
    """Train a model by a function, wrapped or not, and return its weights after each call."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    run: Any = lambda: (update(list(model.parameters())), next(model.parameters()).sum())[1]  # noqa: E731
    if graphed:
        run = sg.wrap(run, exact_shapes=True)
    seen = []
    for _ in range(10):
        with torch.enable_grad():
            model(torch.randn(5, WIDTH, device=device)).square().mean().backward()
        seen.append(run().clone())
        if between != "keep":
            model.zero_grad(set_to_none=between == "none")
    return seen, run


@pytest.mark.parametrize("between", ["none", "zero", "keep"])
@pytest.mark.parametrize("update", READING)
def test_an_update_by_hand_trains_as_eager(device: torch.device, update: str, between: str) -> None:
    expected, _ = losses(READING[update], device, between, graphed=False)
    found, run = losses(READING[update], device, between, graphed=True)
    close(torch.stack(found), torch.stack(expected))
    if between != "none":  # the gradients stay where they are
        assert run.graph_stats.replays >= 7


def stepped(
    device: torch.device, kind: Callable[..., torch.optim.Optimizer], *, zeroes: bool, graphed: bool
) -> tuple[list[Tensor], Any]:
    """Train by a function that calls an optimizer, whose rate falls; nothing else leads it to the weights."""
    torch.manual_seed(1)
    model = nn.Linear(WIDTH, 2, device=device)
    optimizer = kind(model.parameters(), lr=0.1)

    def update() -> Tensor:
        optimizer.step()
        if zeroes:
            optimizer.zero_grad()
        return optimizer.param_groups[0]["params"][0].sum()

    run: Any = sg.wrap(update, exact_shapes=True) if graphed else update
    seen = []
    for at in range(12):
        with torch.enable_grad():
            model(torch.randn(5, WIDTH, device=device)).square().mean().backward()
        seen.append(run().clone())
        if not zeroes:
            optimizer.zero_grad(set_to_none=at % 3 == 2)
        optimizer.param_groups[0]["lr"] = 0.1 if at < 6 else 0.01
    return seen, run


@pytest.mark.parametrize("zeroes", [False, True], ids=["steps", "steps and zeroes"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_an_optimizer_that_a_function_calls_trains_as_eager(device: torch.device, kind: Any, zeroes: bool) -> None:
    expected, _ = stepped(device, kind, zeroes=zeroes, graphed=False)
    found, _ = stepped(device, kind, zeroes=zeroes, graphed=True)
    close(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("between", ["none", "zero", "keep"])
@pytest.mark.parametrize("update", SETTING)
def test_an_update_that_sets_gradients_runs_eagerly_by_name(device: torch.device, update: str, between: str) -> None:
    expected, _ = losses(SETTING[update], device, between, graphed=False)
    found, run = losses(SETTING[update], device, between, graphed=True)
    close(torch.stack(found), torch.stack(expected))
    assert run.graph_stats.replays == 0
    assert "the gradient of" in str(run.graph_report())


def test_a_gradient_that_only_a_recording_sets_is_put_back(device: torch.device) -> None:
    """The first call finds none, so the second, which captures, is the first that drops one."""
    parameter = nn.Parameter(torch.randn(WIDTH, device=device))

    def update() -> Tensor:
        if parameter.grad is not None:
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None
        return parameter * 1

    run = sg.wrap(update, exact_shapes=True, verify=0)
    close(run(), parameter)
    for _ in range(4):
        parameter.grad = torch.ones_like(parameter)
        expected = parameter - 0.1
        close(run(), expected)
        close(parameter.detach(), expected)
        assert parameter.grad is None


def test_the_remedy_of_a_whole_step_works(device: torch.device) -> None:
    def trained(*, graphed: bool) -> tuple[Tensor, Any]:
        torch.manual_seed(2)
        model = nn.Linear(WIDTH, 2, device=device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def whole(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step: Any = sg.train_step(whole, optimizers=optimizer) if graphed else whole
        with torch.enable_grad():
            for _ in range(8):
                step(torch.randn(5, WIDTH, device=device))
        return model.weight.detach(), step

    (found, step), (expected, _) = trained(graphed=True), trained(graphed=False)
    close(found, expected)
    assert step.graph_stats.replays >= 4


def test_the_remedies_of_a_function_that_sets_gradients_work(device: torch.device) -> None:
    """Written in place, and set outside of the call."""
    parameter = parameter_on(device)

    def halve(x: Tensor) -> Tensor:
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        return x @ parameter.grad  # type: ignore[return-value]

    run = sg.wrap(halve, capture_sizes=[2])
    for _ in range(5):
        set_another(parameter) if run.graph_stats.replays == 1 else None
        assert parameter.grad is not None
        expected = 0.5 * parameter.grad
        x = torch.randn(2, WIDTH, device=device)
        close(run(x), x @ expected)
        close(parameter.grad, expected)
    assert run.graph_stats.replays >= 1
    assert "python_state" not in reasons(run)
