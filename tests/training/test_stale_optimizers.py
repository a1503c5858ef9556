"""What optimizers and gradient scalers hold may change between two steps: the next one computes as eager does."""

from __future__ import annotations

import copy
import decimal
import functools
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import simplegraph as sg
from simplegraph.base.reasons import Reason
from tests.support.training_cells import capturable_on_cpu
from tests.training.models import square_step

CALLS, CHANGED = 12, 6
Groups = list[dict[str, Any]]
Change = Callable[[Any], object]


def nothing(*_: Any) -> None: ...


def trained(
    make: Callable[[Groups], Any], change: Change, device: torch.device, *, graphed: bool, back: Change = nothing
) -> tuple[list[Tensor], Any]:
    """Train two layers, each a group, with a change on the way; return the weights after each step, and the step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Linear(5, 2, bias=False)).to(device)
    optimizer = make([{"params": list(layer.parameters())} for layer in model])
    step, _ = square_step(model, optimizer, "steps" if graphed else "")
    torch.manual_seed(1)
    found = []
    for call in range(CALLS):
        if call == CHANGED:
            change(optimizer)
        if call == CHANGED + 4:
            back(optimizer)
        step(torch.randn(4, 6, device=device))
        found.append(torch.cat([layer.weight.detach().flatten() for layer in model]).clone())
    return found, step


def assert_trains_as_eager(
    make: Callable[[Groups], Any], change: Change, device: torch.device, *, replays: int = 7, changes: bool = True
) -> Any:
    """Compare with eager, to rounding where a graph's kernels take a tensor for the rate; return the step."""
    expected, _ = trained(make, change, device, graphed=False)
    unchanged, _ = trained(make, nothing, device, graphed=False)
    assert not torch.allclose(expected[-1], unchanged[-1], rtol=1e-4) or not changes
    found, step = trained(make, change, device, graphed=True)
    wrong = [
        call for call, (a, b) in enumerate(zip(expected, found, strict=True)) if not torch.allclose(a, b, atol=1e-6)
    ]
    assert wrong == []
    assert step.graph_stats.replays >= replays
    return step


CAPTURABLE = {"lr": 0.125, "capturable": True, "weight_decay": 0.125}
OPTIMIZERS: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "SGD, fused": (optim.SGD, {"lr": 0.125, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125, "fused": True}),
    "SGD": (optim.SGD, {"lr": 0.125, "momentum": 0.5, "dampening": 0.25, "weight_decay": 0.125}),
    "Adam, fused": (optim.Adam, {"lr": 0.125, "weight_decay": 0.125, "fused": True}),
    "AdamW, fused": (optim.AdamW, {"lr": 0.125, "fused": True}),
    "Adagrad, fused": (optim.Adagrad, {"lr": 0.125, "lr_decay": 0.25, "fused": True}),
    "Adam": (optim.Adam, CAPTURABLE),
    "AdamW": (optim.AdamW, CAPTURABLE),
    "NAdam": (optim.NAdam, CAPTURABLE),
    "RAdam": (optim.RAdam, CAPTURABLE),
    "Adamax": (optim.Adamax, CAPTURABLE),
    "ASGD": (optim.ASGD, {**CAPTURABLE, "t0": 2}),
    "Rprop": (optim.Rprop, {"lr": 0.125, "capturable": True}),
}
# What decides how a step is computed, not what it is; and flags whose states only the first step makes.
NO_NUMBERS = {"params", "fused", "foreach", "differentiable", "capturable", "amsgrad", "initial_lr"}
NUMBERS = [
    (name, key)
    for name, (kind, settings) in OPTIMIZERS.items()
    for key in kind([nn.Parameter(torch.ones(1))], **settings).param_groups[0]
    if key not in NO_NUMBERS
]


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple):
        return tuple(0.5 * each for each in value)
    return value * 0.5 if value else 0.375


@pytest.mark.parametrize(("name", "key"), NUMBERS, ids=[f"{name}: {key}" for name, key in NUMBERS])
def test_a_number_of_the_second_group_alone_is_used_from_the_next_step_on(
    name: str, key: str, device: torch.device
) -> None:
    kind, settings = OPTIMIZERS[name]
    if name == "Adagrad, fused" and device.type == "cuda":
        pytest.skip("some releases of torch have that on a CPU alone")

    def change(optimizer: Any) -> None:
        group = optimizer.param_groups[1]
        group[key] = another(group[key])

    with capturable_on_cpu():
        assert_trains_as_eager(functools.partial(kind, **settings), change, device, changes=False)


def adam(groups: Groups) -> optim.Optimizer:
    return optim.AdamW(groups, lr=0.125, fused=True)


def sgd(groups: Groups) -> optim.Optimizer:
    return optim.SGD(groups, lr=0.125, fused=True)


def scaled(groups: Groups) -> optim.Optimizer:
    optimizer: Any = sgd(groups)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    return optimizer


def load(optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][1].update(lr=0.5, weight_decay=0.5)
    for entries in state["state"].values():
        entries["exp_avg"].mul_(3)
    optimizer.load_state_dict(state)


def move_parameters(optimizer: Any) -> None:
    first, second = optimizer.param_groups
    first["lr"] = 0.5
    first["params"].append(second["params"].pop())


OF_TORCH: dict[str, tuple[Callable[[Groups], Any], Change]] = {
    "a group is replaced": (
        adam,
        lambda opt: opt.param_groups.__setitem__(1, {**opt.param_groups[1], "lr": 0.5, "weight_decay": 0.5}),
    ),
    "all groups are replaced": (
        adam,
        lambda opt: setattr(opt, "param_groups", [{**group, "weight_decay": 0.5} for group in opt.param_groups]),
    ),
    "a group is removed": (adam, lambda opt: opt.param_groups.pop()),
    "parameters move to another group": (adam, move_parameters),
    "load_state_dict": (adam, load),
    "the states are cleared": (adam, lambda opt: opt.state.clear()),
    "a scale of gradients is set": (
        sgd,
        lambda opt: vars(opt).update(grad_scale=torch.tensor(2.0), found_inf=torch.tensor(0.0)),
    ),
    "steps are skipped": (sgd, lambda opt: setattr(opt, "found_inf", torch.tensor(1.0))),
    "a scale of gradients is replaced": (scaled, lambda opt: setattr(opt, "grad_scale", torch.tensor(4.0))),
    "a scale of gradients is removed": (scaled, lambda opt: delattr(opt, "grad_scale")),
}


@pytest.mark.parametrize("kind", OF_TORCH)
def test_what_changes_in_an_optimizer_of_torch_is_used_from_the_next_step_on(kind: str, device: torch.device) -> None:
    assert_trains_as_eager(*OF_TORCH[kind], device)


def test_a_group_that_is_added_is_trained(device: torch.device) -> None:
    extra: list[Tensor] = []

    def change(optimizer: Any) -> None:
        held = optimizer.param_groups.pop()
        optimizer.step()
        optimizer.add_param_group({"params": held["params"], "lr": 0.5})
        extra.append(held["params"][0])

    assert_trains_as_eager(adam, change, device)
    assert len(extra) == 2


# Optimizers of users.


class Scale:
    def __init__(self, value: float) -> None:
        self.value = value


class SlottedScale:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Scaled(optim.SGD):
    """Scales gradients by what `read` makes of it."""

    scale_of_class = 1.0

    def __init__(self, groups: Groups, read: Callable[[Any], Any]) -> None:
        super().__init__(groups, lr=0.125)
        self.defaults["scale"] = 1.0
        self.param_groups[1]["nested"] = {"scales": [{"value": 1.0}]}
        self.read, self.scale, self.scales = read, 1.0, [1.0]
        self.config: dict[Any, Any] = {"scale": 1.0, 0: 1.0, "deep": [{"scale": 1.0}]}
        self.held, self.slotted, self.flags = Scale(1.0), SlottedScale(1.0), set[str]()
        self.array, self.decimal = np.ones(2), decimal.Decimal(1)
        self.many = dict.fromkeys(range(400), 1.0)
        self.function: Callable[[], float] = lambda: 1.0

    @property
    def computed(self) -> float:
        return self.scale

    def method(self) -> float:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        scale = float(self.read(self))
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad * scale, alpha=-group["lr"])


NAME = "scale"[:3] + "le"  # which no code has
READS: dict[str, tuple[Callable[[Any], Any], Change, Change]] = {
    "an attribute": (
        lambda opt: opt.scale,
        lambda opt: setattr(opt, "scale", 0.5),
        lambda opt: setattr(opt, "scale", 1.0),
    ),
    "a name that is computed": (
        lambda opt: getattr(opt, NAME),
        lambda opt: setattr(opt, "scale", 0.5),
        lambda opt: setattr(opt, "scale", 1.0),
    ),
    "a property": (
        lambda opt: opt.computed,
        lambda opt: setattr(opt, "scale", 0.5),
        lambda opt: setattr(opt, "scale", 1.0),
    ),
    "an attribute that is added": (
        lambda opt: getattr(opt, "added", 1.0),
        lambda opt: setattr(opt, "added", 0.5),
        lambda opt: delattr(opt, "added"),
    ),
    "a dict": (
        lambda opt: opt.config.get(NAME),
        lambda opt: opt.config.update(scale=0.5),
        lambda opt: opt.config.update(scale=1.0),
    ),
    "a key that is no text": (
        lambda opt: opt.config[0],
        lambda opt: opt.config.update({0: 0.5}),
        lambda opt: opt.config.update({0: 1.0}),
    ),
    "a key that is added": (
        lambda opt: 0.5 if "on" in opt.config else 1.0,
        lambda opt: opt.config.update(on=None),
        lambda opt: opt.config.pop("on"),
    ),
    "a dict in a list in a dict": (
        lambda opt: opt.config["deep"][0]["scale"],
        lambda opt: opt.config["deep"][0].update(scale=0.5),
        lambda opt: opt.config["deep"][0].update(scale=1.0),
    ),
    "defaults": (
        lambda opt: opt.defaults["scale"],
        lambda opt: opt.defaults.update(scale=0.5),
        lambda opt: opt.defaults.update(scale=1.0),
    ),
    "a dict in a group": (
        lambda opt: opt.param_groups[1]["nested"]["scales"][0]["value"],
        lambda opt: opt.param_groups[1]["nested"]["scales"][0].update(value=0.5),
        lambda opt: opt.param_groups[1]["nested"]["scales"][0].update(value=1.0),
    ),
    "the state": (
        lambda opt: opt.state.get("scale", 1.0),
        lambda opt: opt.state.update(scale=0.5),
        lambda opt: opt.state.pop("scale"),
    ),
    "a list": (
        lambda opt: opt.scales[0],
        lambda opt: opt.scales.__setitem__(0, 0.5),
        lambda opt: opt.scales.__setitem__(0, 1.0),
    ),
    "a list's length": (
        lambda opt: 1 / len(opt.scales),
        lambda opt: opt.scales.append(1.0),
        lambda opt: opt.scales.pop(),
    ),
    "a set": (
        lambda opt: 0.5 if "on" in opt.flags else 1.0,
        lambda opt: opt.flags.add("on"),
        lambda opt: opt.flags.remove("on"),
    ),
    "a large dict": (
        lambda opt: opt.many[7],
        lambda opt: opt.many.update({7: 0.5}),
        lambda opt: opt.many.update({7: 1.0}),
    ),
    "an object": (
        lambda opt: opt.held.value,
        lambda opt: setattr(opt.held, "value", 0.5),
        lambda opt: setattr(opt.held, "value", 1.0),
    ),
    "an object that is replaced": (
        lambda opt: opt.held.value,
        lambda opt: setattr(opt, "held", Scale(0.5)),
        lambda opt: setattr(opt, "held", Scale(1.0)),
    ),
    "a slot": (
        lambda opt: opt.slotted.value,
        lambda opt: setattr(opt.slotted, "value", 0.5),
        lambda opt: setattr(opt.slotted, "value", 1.0),
    ),
    "an array": (
        lambda opt: opt.array[1],
        lambda opt: opt.array.__setitem__(1, 0.5),
        lambda opt: opt.array.__setitem__(1, 1.0),
    ),
    "a decimal": (
        lambda opt: opt.decimal,
        lambda opt: setattr(opt, "decimal", decimal.Decimal("0.5")),
        lambda opt: setattr(opt, "decimal", decimal.Decimal(1)),
    ),
    "a function": (
        lambda opt: opt.function(),
        lambda opt: setattr(opt, "function", lambda: 0.5),
        lambda opt: setattr(opt, "function", lambda: 1.0),
    ),
    "a method that the object overrides": (
        lambda opt: opt.method(),
        lambda opt: setattr(opt, "method", lambda: 0.5),
        lambda opt: delattr(opt, "method"),
    ),
}


@pytest.mark.parametrize("kind", READS)
def test_what_an_optimizer_of_the_users_reads_is_read_at_every_step(kind: str, device: torch.device) -> None:
    read, change, back = READS[kind]
    make = functools.partial(Scaled, read=read)
    step = assert_trains_as_eager(make, change, device)
    # A function in an attribute is code of the module, too: its graphs are dropped once beside the other key.
    assert step.graph_stats.captures == 2 + (kind == "a method that the object overrides")
    expected, _ = trained(make, change, device, graphed=False, back=back)
    found, _ = trained(make, change, device, graphed=True, back=back)
    assert [call for call, pair in enumerate(zip(expected, found, strict=True)) if not torch.equal(*pair)] == []


def test_a_number_that_comes_back_needs_no_further_graph(device: torch.device) -> None:
    read, change, back = READS["a dict in a list in a dict"]
    _, step = trained(functools.partial(Scaled, read=read), change, device, graphed=True, back=back)
    assert step.graph_stats.captures == 2
    assert step.graph_stats.replays >= CALLS - 5


FACTOR = 1.0


def halved(optimizer: Any, closure: Any = None) -> None:
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-0.5 * group["lr"])


OF_CLASS: dict[str, tuple[Callable[[Any], Any], Change]] = {
    "an attribute": (lambda opt: opt.scale_of_class, lambda opt: setattr(type(opt), "scale_of_class", 0.5)),
    "a method": (lambda opt: opt.method(), lambda opt: setattr(type(opt), "method", lambda self: 0.5)),
    "the step": (lambda opt: 1.0, lambda opt: setattr(type(opt), "step", halved)),
    "the step of an object": (lambda opt: 1.0, lambda opt: setattr(opt, "step", types.MethodType(halved, opt))),
    "the class": (lambda opt: 1.0, lambda opt: setattr(opt, "__class__", type("Half", (type(opt),), {"step": halved}))),
    "a global": (lambda opt: FACTOR, lambda opt: globals().update(FACTOR=0.5)),
}


@pytest.mark.parametrize("kind", OF_CLASS)
def test_what_the_class_of_an_optimizer_of_the_users_holds_is_read_at_every_step(
    kind: str, device: torch.device
) -> None:
    read, change = OF_CLASS[kind]

    def make(groups: Groups) -> optim.Optimizer:
        globals().update(FACTOR=1.0)

        class Own(Scaled):
            scale_of_class = 1.0

        return Own(groups, read)

    assert_trains_as_eager(make, change, device)


def test_a_number_that_changes_at_every_call_is_named(device: torch.device) -> None:
    steps = 10
    model = nn.Linear(6, 2).to(device)
    optimizer = Scaled([{"params": [model.weight]}, {"params": [model.bias]}], lambda opt: opt.held.value)

    @sg.train_step(optimizers=optimizer, modules=[model])
    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for call in range(steps):
        optimizer.held.value = 1.0 / (1 + call)
        step(torch.ones(4, 6, device=device))
    assert step.graph_stats.details[Reason.PYTHON_STATE].startswith("optimizers.0.held.value takes new values")


def test_an_attribute_that_no_code_names_costs_no_graph(device: torch.device) -> None:
    """A trainer's counter on an optimizer of torch's."""
    _, step = trained(sgd, nothing, device, graphed=True)
    optimizer = step._wrapped.step.optimizers.all[0]
    before = step.graph_stats.captures
    for call in range(6):
        optimizer.global_step = call
        step(torch.ones(4, 6, device=device))
    assert step.graph_stats.captures == before


def test_an_optimizer_that_leads_to_too_much_runs_eagerly_by_name(device: torch.device) -> None:
    def make(groups: Groups) -> optim.Optimizer:
        optimizer = Scaled(groups, lambda opt: opt.scale)
        vars(optimizer)["tree"] = [[Scale(1.0) for _ in range(200)] for _ in range(20)]
        return optimizer

    _, step = trained(make, nothing, device, graphed=True)
    assert step.graph_stats.replays == 0
    assert step.graph_stats.details[Reason.UNTRAINABLE].startswith("optimizers.0 leads to more than 2000")


# Gradient scalers.


class Doubling(torch.amp.GradScaler):
    factor = 1.0

    def scale(self, outputs: Any) -> Any:
        return super().scale(outputs) * self.factor


def load_scaler(scaler: Any) -> None:
    numbers = {"scale": 64.0, "growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2, "_growth_tracker": 1}
    scaler.load_state_dict({**scaler.state_dict(), **numbers})


SCALERS: dict[str, Change] = {
    "set_growth_factor": lambda scaler: scaler.set_growth_factor(4.0),
    "set_backoff_factor": lambda scaler: scaler.set_backoff_factor(0.25),
    "set_growth_interval": lambda scaler: scaler.set_growth_interval(2),
    "load_state_dict": load_scaler,
    "update, a number": lambda scaler: scaler.update(64.0),
    "update, a tensor": lambda scaler: scaler.update(torch.tensor(64.0, device=scaler._scale.device)),
    "another tensor for the scale": lambda scaler: setattr(scaler, "_scale", torch.full_like(scaler._scale, 32.0)),
    "another tensor for the tracker": lambda scaler: setattr(
        scaler, "_growth_tracker", torch.full_like(scaler._growth_tracker, 2)
    ),
    "enabled": lambda scaler: setattr(scaler, "_enabled", False),
    "an attribute of the user's": lambda scaler: setattr(scaler, "factor", 2.0),
}


@pytest.mark.parametrize("named", [True, False], ids=["scaler=", "found"])
@pytest.mark.parametrize("kind", SCALERS)
def test_what_changes_in_a_scaler_is_used_from_the_next_step_on(kind: str, named: bool, device: torch.device) -> None:
    results = []
    step: Any = None
    for graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 2).to(device)
        optimizer = optim.SGD(model.parameters(), lr=0.125, fused=True)
        scaler = Doubling(device.type, init_scale=2.0**8, growth_interval=3)

        def step_fn(
            x: Tensor,
            model: nn.Module = model,
            optimizer: optim.Optimizer = optimizer,
            scaler: torch.amp.GradScaler = scaler,
        ) -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

        known = scaler if named else None
        step = sg.train_step(step_fn, optimizers=optimizer, modules=[model], scaler=known) if graphed else step_fn
        torch.manual_seed(1)
        found = []
        for call in range(16):
            if call == 8:
                SCALERS[kind](scaler)
            x = torch.randn(4, 6, device=device)
            step(x * float("inf") if call in (5, 11) else x)
            numbers = torch.tensor([scaler.get_scale(), *scaler.state_dict().values()])
            found.append(torch.cat([model.weight.detach().flatten().cpu(), numbers]).nan_to_num(7.5))
        results.append(found)
    assert [call for call, pair in enumerate(zip(*results, strict=True)) if not torch.equal(*pair)] == []
    assert step.graph_stats.replays >= 10
