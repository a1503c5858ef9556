"""Objects that a forward reaches are looked at without running their code, whatever they pretend or refuse."""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives  # outputs are looked at for its tensors once it is there
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import ConfigError, Reason
from simplegraph.base.nested import constant_key

pytestmark = pytest.mark.usefixtures("no_grad")


def ran(*_: Any) -> NoReturn:
    raise RuntimeError("code of the user's ran only to look")


class Unread:
    __getattr__ = ran


class Closed:
    __getattribute__ = ran


class Classless:
    __class__ = property(ran)


class Attributeless:
    __dict__ = property(ran)
    scale = property(ran)


class Uncompared:
    __eq__ = __hash__ = __bool__ = __iter__ = __len__ = __repr__ = __contains__ = __getitem__ = ran


class Descriptor:
    __get__ = ran


class Describing:
    scale = Descriptor()


class UncountedList(list):
    __len__ = __iter__ = __bool__ = __eq__ = __getitem__ = ran
    __hash__ = None


class UncountedDict(dict):
    __len__ = __iter__ = __bool__ = __eq__ = __getitem__ = keys = items = values = ran
    __hash__ = None


class Number(int):
    __eq__ = __hash__ = __repr__ = ran


class Text(str):
    __eq__ = __hash__ = ran


class Fraction(float):
    __eq__ = __hash__ = __repr__ = ran


class LazyModule(types.ModuleType):
    __getattribute__ = ran


class Meta(type):
    __getattr__ = __bool__ = ran


class OfMeta(metaclass=Meta):
    scale = 2.0


def pretends(kind: type) -> Any:
    """Make an object whose ``__class__`` is another one than its type."""
    return type("Pretends", (), {"__class__": property(lambda self: kind)})()


def dead_proxy(kind: Callable[[], Any]) -> Any:
    return weakref.proxy(kind())


THINGS: dict[str, Callable[[], Any]] = {
    "getattr": Unread,
    "getattribute": Closed,
    "class": Classless,
    "dict": Attributeless,
    "compared": Uncompared,
    "descriptor": Describing,
    "list": lambda: UncountedList([1]),
    "mapping": lambda: UncountedDict(scale=1),
    "number": lambda: Number(3),
    "text": lambda: Text("a"),
    "fraction": lambda: Fraction(2.0),
    "lazy module": lambda: LazyModule("lazy"),
    "metaclass": lambda: OfMeta,
    "of a metaclass": OfMeta,
    "as a module": lambda: pretends(nn.Module),
    "as a tensor": lambda: pretends(Tensor),
    "as a dict": lambda: pretends(dict),
    "as a function": lambda: pretends(types.FunctionType),
    "mock of a module": lambda: mock.Mock(spec=nn.Module),
    "mock of a layer": lambda: mock.Mock(spec=nn.Linear(2, 2)),
    "mock of a tensor": lambda: mock.Mock(spec=Tensor),
    "mock": mock.MagicMock,
    "dead proxy": lambda: dead_proxy(Unread),
    "dead proxy of a module": lambda: dead_proxy(nn.ReLU),
}


class Holder:
    pass


def in_closure(thing: Any, weight: Tensor) -> Any:
    def forward(x: Tensor) -> Tensor:
        return x if x is thing else x * weight

    return forward


def in_global(thing: Any, weight: Tensor) -> Any:
    names = {"thing": thing, "weight": weight}
    exec("def forward(x):\n  return x if x is thing else x * weight", names)
    return names["forward"]


def in_container(thing: Any, weight: Tensor) -> Any:
    things, named = [thing, (thing,)], {"thing": thing}

    def forward(x: Tensor) -> Tensor:
        return x if x is things[0] or x is named["thing"] else x * weight

    return forward


def in_object(thing: Any, weight: Tensor) -> Any:
    holder = Holder()
    holder.thing = thing

    def forward(x: Tensor) -> Tensor:
        return x if x is holder.thing else x * weight

    return forward


def by_name(thing: Any, weight: Tensor) -> Any:
    """Read an attribute of it, which eager lets fail."""

    def forward(x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError, AttributeError, ReferenceError):
            thing.scale  # noqa: B018
        return x * weight

    return forward


def as_default(thing: Any, weight: Tensor) -> Any:
    def forward(x: Tensor, thing: Any = thing) -> Tensor:
        return x * weight

    return forward


def in_partial(thing: Any, weight: Tensor) -> Any:
    def forward(thing: Any, x: Tensor) -> Tensor:
        return x * weight

    return functools.partial(forward, thing)


class Module(nn.Module):
    def __init__(self, thing: Any, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        object.__setattr__(self, "thing", thing)
        self.things, self.holder = [thing, {"thing": thing}], Holder()
        self.holder.thing = thing

    def forward(self, x: Tensor) -> Tensor:
        return x if x is self.thing or x is self.things[0] else x * self.weight


def in_module(thing: Any, weight: Tensor) -> Any:
    return Module(thing, weight).eval()


PLACES = [in_closure, in_global, in_container, in_object, by_name, as_default, in_partial, in_module]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("thing", THINGS)
def test_an_object_that_refuses_to_be_looked_at_is_not_asked(device: torch.device, thing: str, place: Any) -> None:
    forward = place(THINGS[thing](), torch.full((4,), 3.0, device=device))
    model = sg.wrap(forward, capture_sizes=[1, 2], progress=False)
    for turn in range(8):
        x = torch.randn(1 + turn % 2, 4, device=device)
        assert torch.equal(model(x), x * 3)
    assert model.graph_stats.replays >= 2
    assert str(model.graph_report())


@pytest.mark.parametrize("thing", THINGS)
def test_such_an_object_may_be_passed_and_returned(device: torch.device, thing: str) -> None:
    held = THINGS[thing]()

    class Passes(nn.Module):
        def forward(self, x: Tensor, *things: Any) -> Any:
            return x * 2, held

    model = sg.wrap(Passes().eval(), capture_sizes=[1, 2], progress=False)
    for turn in range(6):
        x = torch.randn(1 + turn % 2, 4, device=device)
        for things in ((), (held,), ([held],), ({"held": held},)):
            answer, returned = model(x, *things)
            assert torch.equal(answer, x * 2)
            assert type(returned) is type(held)


def test_a_live_proxy_is_seen_through(device: torch.device) -> None:
    holder = Holder()
    holder.weight = torch.ones(4, device=device)
    seen = weakref.proxy(holder)

    def forward(x: Tensor) -> Tensor:
        return x * seen.weight

    wrapped = sg.wrap(forward, capture_sizes=[2], progress=False)
    x = torch.randn(2, 4, device=device)
    for _ in range(5):
        assert torch.equal(wrapped(x), forward(x))
    replays = wrapped.graph_stats.replays
    assert replays
    holder.weight = torch.full((4,), 5.0, device=device)
    for _ in range(5):
        assert torch.equal(wrapped(x), forward(x))
    assert wrapped.graph_stats.replays > replays


def test_a_module_behind_a_weak_proxy_runs_eagerly(device: torch.device) -> None:
    held = {"layer": nn.Linear(4, 4).to(device)}
    layer, x = weakref.proxy(held["layer"]), torch.randn(2, 4, device=device)
    wrapped = sg.wrap(lambda x: layer(x), capture_sizes=[2], progress=False)
    for _ in range(4):
        assert torch.equal(wrapped(x), held["layer"](x))
    assert wrapped.graph_stats.eager[Reason.PYTHON_STATE] == 4
    assert "layer is a weak proxy of a module" in str(wrapped.graph_report())
    remedy = sg.wrap(lambda x: held["layer"](x), capture_sizes=[2], progress=False)
    for _ in range(4):
        assert torch.equal(remedy(x), held["layer"](x))
    assert remedy.graph_stats.replays
    del held["layer"], remedy
    gc.collect()
    with pytest.raises(ReferenceError):
        wrapped(x)


def test_a_number_of_the_users_own_class_is_part_of_the_key(device: torch.device) -> None:
    holder = Holder()
    holder.factor = Number(3)

    def forward(x: Tensor) -> Tensor:
        return x * int(holder.factor)

    model, x = sg.wrap(forward, capture_sizes=[2], progress=False), torch.ones(2, 4, device=device)
    for _ in range(5):
        assert torch.equal(model(x), x * 3)
    assert model.graph_stats.replays
    holder.factor = Number(4)
    for _ in range(5):
        assert torch.equal(model(x), x * 4)


def test_a_class_attribute_that_becomes_a_property_is_noticed(device: torch.device) -> None:
    class Scaled:
        scale = 2.0

    scaled = Scaled()

    def forward(x: Tensor) -> Tensor:
        return x * scaled.scale

    model, x = sg.wrap(forward, capture_sizes=[2], progress=False), torch.ones(2, 4, device=device)
    for _ in range(5):
        assert torch.equal(model(x), x * 2)
    Scaled.scale = property(lambda self: 3.0)
    for _ in range(5):
        assert torch.equal(model(x), x * 3)


def test_equal_values_of_a_class_that_compares_otherwise_are_told_apart() -> None:
    class Level(enum.IntEnum):
        low = 1

    class Folded(str):
        def __eq__(self, other: object) -> bool:
            return str(self).lower() == str(other).lower()

        def __hash__(self) -> int:
            return hash(str(self).lower())

    assert constant_key(Folded("A")) != constant_key(Folded("a"))
    assert constant_key(Fraction(0.0)) != constant_key(Fraction(-0.0))
    assert constant_key(Level.low) == constant_key(Level.low)
    assert constant_key(True) is True


def test_a_mock_or_an_object_that_refuses_is_wrapped_or_refused_in_words(device: torch.device) -> None:
    x = torch.ones(2, 4, device=device)
    mocked = mock.Mock(spec=nn.Module, side_effect=lambda x: x * 2)
    with pytest.raises(ConfigError, match="a Mock that passes for a module; wrap a function that calls it"):
        sg.wrap(mocked)
    model = sg.wrap(lambda x: mocked(x))
    for _ in range(4):
        assert torch.equal(model(x), x * 2)

    class Calls(Unread):
        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

    calls = Calls()
    with pytest.raises(ConfigError, match="put it into a function of your own"):
        sg.wrap(calls)
    remedy = sg.wrap(lambda x: calls(x))
    for _ in range(4):
        assert torch.equal(remedy(x), x * 2)
    assert remedy.graph_stats.replays


@pytest.mark.parametrize("thing", THINGS)
def test_such_an_object_in_a_training_step_or_a_checked_module_is_not_asked(device: torch.device, thing: str) -> None:
    held = THINGS[thing]()
    layer = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.clone()

    def train(x: Tensor) -> Any:
        if x is held:
            return None
        loss = layer(x).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = sg.train_step(train, optimizers=optimizer, progress=False)
    x = torch.ones(2, 4, device=device)
    with torch.enable_grad():
        for _ in range(5):
            step(x)
    assert step.graph_stats.replays
    assert torch.allclose(layer.weight, before - 0.5)
    assert str(sg.check(in_module(held, torch.ones(4, device=device)), x))
