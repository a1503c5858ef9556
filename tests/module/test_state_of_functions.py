"""Functions, methods and steps read plain values of every kind, wherever these lie, and are never stale."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import functools
import pathlib
import types
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self) -> Any:
        return self.value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Config:
    scale: float = 2.0


class Pair(NamedTuple):
    value: Any
    other: int = 0


class Policy:
    """A plain object whose method is wrapped."""

    scale = 2.0

    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        self.held, self.read, self.layer = held, read, nn.Linear(4, 4)

    @torch.no_grad()
    def run(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(self.read(self))

    @torch.no_grad()
    def by_name(self, x: Tensor) -> Tensor:
        return self.layer(x) * getattr(self, "sca" + "le")


def serves(graphs: Any, eager: Callable[[Tensor], Tensor]) -> None:
    """Call both, compare, and require that graphs serve at the end."""
    replays = graphs.graph_stats.replays
    for _ in range(5):
        x = torch.randn(2, 4)
        assert torch.equal(graphs(x), eager(x)), graphs.graph_report()
    assert graphs.graph_stats.replays > replays, graphs.graph_report()


# What a policy holds, how it reads that, and what changes it.
HELD: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an item of a list": ([2.0], lambda held: held[0], lambda held: held.__setitem__(0, 3.0)),
    "items of a list": ([2.0], sum, lambda held: held.append(3.0)),
    "an item by a number": ({3: 2.0}, lambda held: held[3], lambda held: held.update({3: 3.0})),
    "an item of a dict": ({"k": 2.0}, lambda held: next(iter(held.values())), lambda held: held.update(k=3.0)),
    "a deque": (collections.deque([2.0]), sum, lambda held: held.append(3.0)),
    "a set": ({2.0}, sum, lambda held: held.add(3.0)),
    "a date": (Box(datetime.date(2020, 1, 2)), lambda h: h.value.day, lambda h: vars(h).update(value=h.value.max)),
    "a decimal": (Box(decimal.Decimal(2)), lambda h: h.value, lambda h: vars(h).update(value=decimal.Decimal(3))),
    "a set in an object": (Box({1}), lambda held: len(held.value), lambda held: held.value.add(2)),
    "a slot": (Slotted((1, 2)), lambda held: held.value[1], lambda held: setattr(held, "value", (1, 3))),
    "a dataclass in a list": ([Config()], lambda held: held[0].scale, lambda held: setattr(held[0], "scale", 3.0)),
    "a keyword of a partial": (
        functools.partial(float, **{}),
        lambda held: held.keywords.get("x", 2.0),
        lambda held: held.keywords.update(x=3.0),
    ),
}


@pytest.mark.parametrize("kind", ["method", "function", "step"])
@pytest.mark.parametrize("name", HELD)
def test_what_a_method_a_function_and_a_step_read_is_never_stale(name: str, kind: str) -> None:
    held, read, change = HELD[name]
    held = _copied(held)
    policy = Policy(held, lambda policy: read(policy.held))
    eager: Callable[[Tensor], Tensor] = policy.run if kind == "method" else lambda x: policy.run(x)
    if kind == "function":
        eager = torch.no_grad()(eager)
    chosen = torch.optim.SGD(policy.layer.parameters(), lr=0.1)
    graphs: Any = sg.train_step(eager, optimizers=chosen, progress=False) if kind == "step" else None
    graphs = graphs or sg.wrap(eager, capture_sizes=[2], progress=False)
    serves(graphs, eager)
    change(held)
    serves(graphs, eager)


def _copied(held: Any) -> Any:
    """Return another object of the same values, so that no test changes those of another."""
    if isinstance(held, functools.partial):
        return functools.partial(held.func, **held.keywords)
    if isinstance(held, (Box, Slotted)):
        value = held.value
        return type(held)(set(value) if isinstance(value, set) else value)
    return type(held)([Config()]) if isinstance(held, list) and isinstance(held[0], Config) else type(held)(held)


def test_an_attribute_by_a_computed_name_is_never_stale() -> None:
    policy = Policy(None, float)
    graphs: Any = sg.wrap(policy.by_name, capture_sizes=[2], progress=False)
    serves(graphs, policy.by_name)
    policy.scale = 3.0
    serves(graphs, policy.by_name)


class Reading(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Tensor], held: Any = None) -> None:
        super().__init__()
        self.run, self.held, self.layer = run, held, nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, self.layer(x))


SETTINGS, TABLE = Box(2.0), [2.0]


def by_its_name(_: Any) -> Any:
    return globals()["TABLE"][0]


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda _: SETTINGS.get(), lambda: setattr(SETTINGS, "value", 3.0)),
        (by_its_name, lambda: TABLE.__setitem__(0, 3.0)),
    ],
)
def test_a_module_reads_a_global_by_a_method_and_by_its_name(
    read: Callable[[Any], Any], change: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SETTINGS, "value", 2.0)
    monkeypatch.setitem(globals(), "TABLE", [2.0])
    module = Reading(lambda module, x: x * read(module)).eval()
    graphs: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    serves(graphs, module)
    change()
    serves(graphs, module)


@pytest.mark.parametrize(
    "value",
    [
        *(datetime.date(2020, 1, 2), decimal.Decimal(2), np.int64(2), np.float32(2), Pair(1), Pair((1, 2))),
        *(frozenset({2}), uuid.UUID(int=2), pathlib.PurePosixPath("2"), np.datetime64(2, "s")),
    ],
)
@pytest.mark.parametrize("kind", [Box, Slotted, types.SimpleNamespace])
def test_a_value_that_a_method_stores_again_is_stored_once_a_call(value: Any, kind: Any) -> None:
    def following(value: Any) -> Any:
        if isinstance(value, Pair):
            return value._replace(other=value.other + 1)
        if isinstance(value, frozenset):
            return value | {len(value)}
        if isinstance(value, (uuid.UUID, pathlib.PurePath)):
            return uuid.UUID(int=value.int + 1) if isinstance(value, uuid.UUID) else value / "next"
        return value + type(value - value)(1)

    def step(x: Tensor) -> Tensor:
        held.value = following(held.value)
        return x * 2

    held, expected = kind(value=value), value
    graphs: Any = sg.wrap(step, capture_sizes=[2], progress=False)
    for _ in range(8):
        graphs(torch.randn(2, 4))
        expected = following(expected)
        assert held.value == expected


def raised(x: Tensor, by: float) -> Tensor:
    return x + by


def test_a_partial_that_a_forward_stores_again_is_put_back() -> None:
    """A partial of C has members that nobody can set."""

    def run(module: Any, x: Tensor) -> Tensor:
        y = module.held.value(x)
        module.held.value = functools.partial(raised, by=1.0)
        return y

    module = Reading(run, Slotted(functools.partial(raised, by=4.0))).eval()
    graphs: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for call in range(6):
        x = torch.randn(2, 4)
        assert torch.equal(graphs(x), module.layer(x) + (1 if call else 4))


class Scaler:
    """An object whose method reads a number of it."""

    def __init__(self) -> None:
        self.factor = 2.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.factor


def _of_attribute(method: Any) -> Any:
    def run(x: Tensor) -> Any:
        return run.method(x)  # type: ignore[attr-defined]

    run.method = method  # type: ignore[attr-defined]
    return run


def _of_static_method(method: Any) -> Any:
    holder = type("Holder", (), {"called": staticmethod(method)})
    return lambda x: holder.called(x)


def _of_default(method: Any) -> Any:
    return lambda x, method=method: method(x)


def _of_keyword(method: Any) -> Any:
    return lambda x, *, method=method: method(x)


def _of_object(method: Any) -> Any:
    held = Box(functools.partial(method))
    return lambda x: held.value(x)


@pytest.mark.parametrize(
    "leading",
    [
        functools.partial,
        lambda method: functools.partial(lambda called, x: called(x), method),
        lambda method: functools.partial(lambda x, called: called(x), called=method),
        lambda method: torch.no_grad()(functools.partial(method)),
        lambda method: functools.wraps(functools.partial(method))(lambda x: method(x)),
        _of_attribute,
        _of_static_method,
        _of_default,
        _of_keyword,
        _of_object,
    ],
)
def test_a_number_of_the_object_of_a_method_counts_whatever_leads_to_the_method(leading: Any) -> None:
    scaler = Scaler()
    function = leading(scaler.scaled)
    graphs: Any = sg.wrap(function, capture_sizes=[2], progress=False)
    with torch.no_grad():
        for call in range(16):
            scaler.factor = 3.0 if 6 <= call < 11 else 2.0
            x = torch.randn(2, 4)
            assert torch.equal(graphs(x), x * scaler.factor)
    assert graphs.graph_stats.replays > 6


def test_a_number_that_a_function_reads_counts_if_it_is_an_argument_of_a_partial() -> None:
    held = Box(2.0)

    def scaled(x: Tensor) -> Tensor:
        return x * held.value

    graphs: Any = sg.wrap(functools.partial(lambda called, x: called(x), scaled), capture_sizes=[2], progress=False)
    with torch.no_grad():
        for call in range(12):
            held.value = 3.0 if call > 6 else 2.0
            x = torch.randn(2, 4)
            assert torch.equal(graphs(x), x * held.value)


class Kind(type):
    factor = 2.0


class OfKind(metaclass=Kind):
    pass


@pytest.mark.parametrize("step", [lambda x: x * OfKind.factor, lambda x: x * Kind.factor])
def test_an_attribute_of_a_metaclass_counts(step: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: Any = sg.wrap(step, capture_sizes=[2], progress=False)
    with torch.no_grad():
        for call in range(12):
            monkeypatch.setattr(Kind, "factor", 3.0 if call > 6 else 2.0)
            x = torch.randn(2, 4)
            assert torch.equal(graphs(x), x * Kind.factor)
