"""What a step reads of its optimizer's learning rates in Python is the user's own number, and right at every call."""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason

CALLS = 16
Group = dict[str, Any]
Changes = Callable[[int], float]


def run(read: Callable[[Any], Any], rate: Changes, device: torch.device, *, graphed: bool) -> tuple[list[Any], Any]:
    """Train a model by steps that return what `read` makes of the optimizer; return that and the step."""
    torch.manual_seed(0)
    model = nn.Linear(6, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate(0), fused=True)

    def step_fn(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), read(optimizer)

    step: Any = sg.train_step(step_fn, optimizers=optimizer) if graphed else step_fn
    found = []
    for call in range(CALLS):
        optimizer.param_groups[0]["lr"] = rate(call)
        loss, value = step(torch.full((4, 6), 1.0 + call, device=device))
        found.append((float(loss), value, model.weight.detach().clone()))
    return found, step


def same(ours: list[Any], theirs: list[Any]) -> list[int]:
    """List the calls whose values or weights differ; in a graph on a GPU a rate has 32 bits, so there it may round."""
    differ = []
    for call, ((loss, value, weight), (other, expected, others)) in enumerate(zip(ours, theirs, strict=True)):
        alike = torch.allclose(weight, others) if weight.is_cuda else loss == other and torch.equal(weight, others)
        differ += [] if alike and value == expected and type(value) is type(expected) else [call]
    return differ


def rate_of(group: Group) -> Any:
    return group["lr"]


# Whose code is not looked into.
LIBRARY: dict[str, Any] = {"__name__": "library"}
exec(compile("def get_lr(opt): return opt.param_groups[0]['lr']", "/site-packages/library.py", "exec"), LIBRARY)
get_lr = LIBRARY["get_lr"]

READS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda opt: opt.param_groups[0]["lr"],
    "its class": lambda opt: type(opt.param_groups[0]["lr"]).__name__,
    "json": lambda opt: json.dumps({"lr": opt.param_groups[0]["lr"]}),
    "round": lambda opt: round(opt.param_groups[0]["lr"], 2),
    "float": lambda opt: [float(group["lr"]) for group in opt.param_groups],
    "isclose": lambda opt: math.isclose(opt.param_groups[0]["lr"], 0.5),
    "a branch": lambda opt: "warm" if opt.param_groups[0]["lr"] > 0.2 else "cold",
    "text": lambda opt: f"lr={opt.param_groups[0]['lr']:.3g}",
    "deepcopy": lambda opt: copy.deepcopy(opt.param_groups[0]["lr"]),
    "numpy": lambda opt: float(np.array([group["lr"] for group in opt.param_groups]).sum()),
    "all numbers": lambda opt: {k: v for k, v in opt.param_groups[0].items() if isinstance(v, float)},
    "a copied group": lambda opt: copy.copy(opt.param_groups[0]).pop("lr"),
    "a function of the user": lambda opt: rate_of(opt.param_groups[0]),
    "the state": lambda opt: opt.state_dict()["param_groups"][0]["lr"],
    "a function of a library": lambda opt: get_lr(opt),
    "get": lambda opt: opt.param_groups[0].get("lr"),
}


@pytest.mark.parametrize("kind", READS)
def test_a_rate_that_is_read_in_python_is_a_number_and_right_at_each_replay(kind: str, device: torch.device) -> None:
    rate: Changes = lambda call: 0.5 if call < CALLS // 2 else 0.125  # noqa: E731
    theirs, _ = run(READS[kind], rate, device, graphed=False)
    ours, step = run(READS[kind], rate, device, graphed=True)
    assert same(ours, theirs) == []
    assert step.graph_stats.replays >= CALLS - 8


@pytest.mark.parametrize("kind", READS)
def test_a_rate_that_is_read_and_changes_at_every_call_runs_eagerly_by_name(kind: str, device: torch.device) -> None:
    rate: Changes = lambda call: 0.5 / (1 + call)  # noqa: E731
    theirs, _ = run(READS[kind], rate, device, graphed=False)
    ours, step = run(READS[kind], rate, device, graphed=True)
    assert same(ours, theirs) == []
    assert step.graph_stats.details[Reason.PYTHON_STATE].startswith("optimizers.0.param_groups.0.lr takes new values")


def test_read_outside_of_the_step_a_rate_that_changes_at_every_call_needs_one_graph(device: torch.device) -> None:
    """The remedy that the message names."""
    rate: Changes = lambda call: 0.5 / (1 + call)  # noqa: E731
    _, step = run(lambda opt: None, rate, device, graphed=True)
    assert (step.graph_stats.captures, step.graph_stats.replays) == (1, CALLS - 2)


def clipped(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        torch.nn.utils.clip_grad_norm_(group["params"], 1.0)


def test_a_step_that_reads_only_the_parameters_of_groups_needs_one_graph_for_all_rates(device: torch.device) -> None:
    rate: Changes = lambda call: 0.5 / (1 + call)  # noqa: E731
    theirs, _ = run(clipped, rate, device, graphed=False)
    ours, step = run(clipped, rate, device, graphed=True)
    assert same(ours, theirs) == []
    assert (step.graph_stats.captures, step.graph_stats.replays) == (1, CALLS - 2)


@pytest.mark.parametrize("held", ["the groups", "a group", "a list of groups", "an attribute"])
def test_a_rate_that_is_read_from_a_group_held_elsewhere_is_right(held: str, device: torch.device) -> None:
    results = []
    step: Any = None
    for graphed in (False, True):
        model = nn.Linear(6, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)

        class Logger:
            def __init__(self, groups: list[Group]) -> None:
                self.groups = groups

            def log(self) -> str:
                return json.dumps(self.groups[0]["lr"])

        group, listed, logger = optimizer.param_groups[0], [optimizer.param_groups[0]], Logger(optimizer.param_groups)
        reads: dict[str, Callable[[Any], Any]] = {
            "the groups": lambda _, groups=optimizer.param_groups: round(groups[0]["lr"], 3),
            "a group": lambda _, group=group: json.dumps(group["lr"]),
            "a list of groups": lambda _, listed=listed: [f"{each['lr']:.4f}" for each in listed],
            "an attribute": lambda _, logger=logger: logger.log(),
        }
        read = reads[held]

        def step_fn(
            x: Tensor,
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            read: Callable[[Any], Any] = read,
        ) -> Any:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            return read(optimizer)

        step = sg.train_step(step_fn, optimizers=optimizer) if graphed else step_fn
        found = []
        for call in range(CALLS):
            optimizer.param_groups[0]["lr"] = 0.5 if call < CALLS // 2 else 0.125
            found.append(step(torch.ones(4, 6, device=device)))
        results.append(found)
    assert results[0] == results[1]
    assert step.graph_stats.replays >= CALLS - 8


@pytest.mark.parametrize("where", ["before", "after", "a pre-hook", "a post-hook", "a closure"])
@pytest.mark.parametrize("raises", [False, True])
def test_user_code_around_an_optimizers_step_sees_the_number(where: str, raises: bool, device: torch.device) -> None:
    """Whatever fails in there: code that catches it sees the number, too."""
    model = nn.Linear(6, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    kinds: set[type] = set()

    def note(*_: Any) -> None:
        kinds.add(type(optimizer.param_groups[0]["lr"]))
        if raises and where != "after":
            raise ValueError(where)

    if where == "a pre-hook":
        optimizer.register_step_pre_hook(note)
    if where == "a post-hook":
        optimizer.register_step_post_hook(note)

    def step_fn(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        try:
            if where == "before":
                note()
            optimizer.step(note if where == "a closure" else None)  # type: ignore[arg-type]
        except ValueError:
            kinds.add(type(optimizer.param_groups[0]["lr"]))
        if where == "after":
            note()

    step = sg.train_step(step_fn, optimizers=optimizer)
    for _ in range(6):
        step(torch.ones(4, 6, device=device))
        assert type(optimizer.param_groups[0]["lr"]) is float
    assert kinds == {float}
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    assert [len(held) for held in hooks] == [int(where == "a pre-hook"), int(where == "a post-hook")]


def test_a_rate_is_the_users_number_after_an_optimizer_whose_step_failed(device: torch.device) -> None:
    """A trainer that catches the error saves a checkpoint, or goes on."""
    model = nn.Linear(6, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)

    def step_fn(x: Tensor, fails: bool) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if fails:
            model.weight.grad = model.weight.grad.to_sparse()  # which a fused kernel takes none of
        optimizer.step()

    step = sg.train_step(step_fn, optimizers=optimizer, modules=[model])
    x = torch.ones(4, 6, device=device)
    for fails in (False, True, True, False, False, True, False):
        if fails:
            with pytest.raises(RuntimeError, match="sparse"):
                step(x, fails)
        else:
            step(x, fails)
        assert type(optimizer.param_groups[0]["lr"]) is float
        assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.5


def test_a_rate_that_the_step_sets_is_used_as_eager_uses_it(device: torch.device) -> None:
    results = []
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)

        def step_fn(x: Tensor, model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            before, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.25
            optimizer.step()
            optimizer.param_groups[0]["lr"] = before
            return loss.detach()

        step: Any = sg.train_step(step_fn, optimizers=optimizer) if graphed else step_fn
        for call in range(CALLS):
            if call >= CALLS // 2:
                optimizer.param_groups[0]["lr"] = 0.125
            step(torch.full((4, 6), 1.0 + call, device=device))
        results.append(model.weight.detach().clone())
    assert torch.equal(*results)


def test_a_rate_that_the_step_writes_in_place_falls_at_every_call_as_in_eager(device: torch.device) -> None:
    """A replay would train at the rate of the capture for good."""
    results = []
    step: Any = None
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), fused=True)
        decays = functools.partial(optimizer.param_groups[0]["lr"].mul_, 0.75)

        def step_fn(
            x: Tensor,
            model: nn.Module = model,
            optimizer: torch.optim.Optimizer = optimizer,
            decays: Callable[[], Any] = decays,
        ) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            decays()
            return loss.detach()

        step = sg.train_step(step_fn, optimizers=optimizer, modules=[model]) if graphed else step_fn
        for call in range(CALLS):
            step(torch.full((4, 6), 1.0 + call, device=device))
        results.append((model.weight.detach().clone(), float(optimizer.param_groups[0]["lr"])))
    (ours, rate), (theirs, expected) = results
    assert rate == expected == pytest.approx(0.5 * 0.75**CALLS)
    assert torch.equal(ours, theirs)
    assert "scheduler.step() outside" in step.graph_stats.details[Reason.UNTRAINABLE]


def test_an_eager_call_is_the_optimizers_own_with_the_users_number(device: torch.device) -> None:
    model = nn.Linear(6, 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def step_fn(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step = sg.train_step(step_fn, optimizers=optimizer)
    passed: set[Any] = set()

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "_fused_sgd" in str(func):
                passed.add(type(kwargs["lr"]))
            return func(*args, **(kwargs or {}))

    with Watching():
        step(torch.ones(4, 6, device=device))
    assert passed == {float}
