"""`sg.wrap` in a class body: each instance has graphs of its own, and copies and pickles compute with their weights."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import ConfigError

pytestmark = pytest.mark.usefixtures("no_grad")


@sg.wrap
def doubled(x: Tensor) -> Tensor:
    return x * 2


class Policy:
    def __init__(self, factor: float = 1.0) -> None:
        self.layer, self.factor = nn.Linear(4, 4), factor

    @sg.wrap
    def act(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        """Choose."""
        return self.layer(x) * self.factor + shift

    @staticmethod
    @sg.wrap
    def halved(x: Tensor) -> Tensor:
        return x / 2

    @sg.wrap
    @staticmethod
    def tripled(x: Tensor) -> Tensor:
        return x * 3


class Careful(Policy):
    @functools.partial(sg.wrap, capture_sizes=[4])
    def act(self, x: Tensor, *, shift: float = 0.0) -> Tensor:
        return super().act(x, shift=shift) + 1


class Acting(nn.Module):
    """Has both: a method that is wrapped in the class body, and one that is wrapped for the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.run_fast = sg.wrap(self.run)

    def run(self, x: Tensor) -> Tensor:
        return self.layer(x)

    @sg.wrap
    def act(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.run_fast(x) + self.act(x)


def replays(wrapped: Any, function: Any, device: torch.device) -> bool:
    """Call both on new inputs; true if the last calls were replays."""
    for _ in range(5):
        before = wrapped.graph_stats.replays
        x = torch.randn(4, 4, device=device)
        assert torch.equal(wrapped(x), function(x))
    return wrapped.graph_stats.replays > before


def policy(device: torch.device, *args: Any, kind: type = Policy) -> Any:
    made = kind(*args)
    made.layer.to(device)
    return made


def test_a_method_has_graphs_for_each_instance(device: torch.device) -> None:
    one, other = policy(device, 1.0), policy(device, 3.0)
    assert replays(one.act, lambda x: one.layer(x), device)
    assert replays(other.act, lambda x: other.layer(x) * 3.0, device)
    assert replays(one.act, lambda x: one.layer(x), device)
    assert one.act is one.act
    assert one.act is not other.act
    assert one.act.__doc__ == "Choose."
    one.factor = 5.0
    assert replays(one.act, lambda x: one.layer(x) * 5.0, device)
    x = torch.ones(4, 4, device=device)
    assert torch.equal(one.act(x, shift=1.0), one.layer(x) * 5 + 1)
    assert Policy.act.graph_stats.replays == 0


def test_a_static_method_stays_one(device: torch.device) -> None:
    made = policy(device)
    assert replays(made.halved, lambda x: x / 2, device)
    assert replays(made.tripled, lambda x: x * 3, device)


def test_a_subclass_may_override_a_wrapped_method(device: torch.device) -> None:
    made = policy(device, kind=Careful)
    assert replays(made.act, lambda x: made.layer(x) + 1, device)
    plain = policy(device)
    assert replays(plain.act, lambda x: plain.layer(x), device)


def test_an_instance_is_not_kept_alive(device: torch.device) -> None:
    made = policy(device)
    assert replays(made.act, made.layer, device)
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_a_replaced_method_is_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    made, x = policy(device), torch.ones(4, 4, device=device)
    replays(made.act, lambda x: made.layer(x), device)
    monkeypatch.setattr(Policy, "act", lambda self, x: x * 7)
    assert torch.equal(made.act(x), x * 7)


def test_a_method_of_a_module_serves_the_module_and_its_wrapper(device: torch.device) -> None:
    module = Acting().eval().to(device)
    model = sg.wrap(module, progress=False)
    assert replays(model, lambda x: module.layer(x) + module.layer(x), device)
    assert replays(model.act, module.layer, device)
    assert replays(module.act, module.layer, device)
    assert set(model.state_dict()) == {"layer.weight", "layer.bias"}


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("kind", [Policy, Acting])
def test_a_copy_computes_with_its_own_weights(device: torch.device, kind: type, how: str) -> None:
    made = policy(device, kind=kind)
    wrapped = [name for name in ("act", "run_fast") if hasattr(made, name)]
    for name in wrapped:
        assert replays(getattr(made, name), made.layer, device)
    other = copies(made, how)
    shared = how == "copy"
    if shared:
        other.layer = nn.Linear(4, 4).to(device)
        wrapped = wrapped[:1]  # an attribute stays the other's bound method, as in Python
    else:
        for parameter in other.layer.parameters():
            parameter.mul_(3)
    for name in wrapped:
        assert replays(getattr(other, name), other.layer, device)
        assert replays(getattr(made, name), made.layer, device)


def copies(value: Any, how: str) -> Any:
    if how == "torch.save":
        stream = io.BytesIO()
        torch.save(value, stream)
        stream.seek(0)
        return torch.load(stream, weights_only=False)
    return {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": lambda each: pickle.loads(pickle.dumps(each)),
    }[how](value)


def test_an_average_of_a_module_that_holds_wrapped_methods_has_its_own_weights(device: torch.device) -> None:
    module = Acting().eval().to(device)
    for _ in range(4):
        module(torch.ones(4, 4, device=device))
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    for parameter in module.parameters():
        parameter.mul_(3)
    average.update_parameters(module)
    layer = average.module.layer
    assert not torch.equal(layer.weight, module.layer.weight)
    for _ in range(5):
        x = torch.randn(4, 4, device=device)
        assert torch.equal(average(x), layer(x) + layer(x))
        assert torch.equal(module(x), module.layer(x) + module.layer(x))


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle", "torch.save"])
def test_a_decorated_function_that_was_called_is_found_by_its_name(device: torch.device, how: str) -> None:
    replays(doubled, lambda x: x * 2, device)
    assert copies(doubled, how) is doubled
    assert copies(Policy.act, how) is Policy.act


def scaled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


@pytest.mark.parametrize("how", ["copy", "deepcopy", "pickle", "torch.save"])
def test_a_wrapped_function_that_was_called_has_a_copy_with_graphs_and_settings(device: torch.device, how: str) -> None:
    for function in (scaled, functools.partial(scaled, factor=3.0)):
        wrapped = sg.wrap(function, capture_sizes=[4], outputs="static")
        replays(wrapped, function, device)
        other = copies(wrapped, how)
        assert other.graph_stats.replays == 0
        assert replays(other, function, device)
        assert other.graph_manager.config.capture_sizes == (4,)
        assert other.graph_manager.config.outputs == "static"


class Slotted:
    __slots__ = ("factor",)

    @sg.wrap
    def act(self, x: Tensor) -> Tensor:
        return x * self.factor


class Classes:
    factor = 2.0

    def run(cls, x: Tensor) -> Tensor:
        return x * cls.factor

    served = classmethod(run)


def test_an_instance_without_a_dict_is_refused_and_the_remedy_works(device: torch.device) -> None:
    with pytest.raises(ConfigError, match='Name "__dict__" in its __slots__'):
        _ = Slotted().act

    class Mended:
        __slots__ = ("__dict__", "factor")
        act = sg.wrap(vars(Slotted)["act"].__wrapped__)

    made = Mended()
    made.factor = 2.0
    assert replays(made.act, lambda x: x * 2.0, device)


def test_a_class_method_is_wrapped_when_it_is_bound(device: torch.device) -> None:
    assert replays(sg.wrap(Classes.served), lambda x: x * 2.0, device)
