"""A break alone names a value, and the forward reaches it in another way: no replay goes on with an earlier value."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.graph.breaks.models import piecewise

pytestmark = [pytest.mark.usefixtures("inference_mode"), pytest.mark.proofs]

Read = Callable[[Any], float]
PATH = ("special",)


class Child(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.number


@dataclasses.dataclass
class Settings:
    number: float = 1.0


class Reaching(nn.Module):
    """Reads a number. Its break contains the name "special", and other code below its forward does not."""

    def __init__(self) -> None:
        super().__init__()
        self.special: Any = Settings()
        self.by_name = nn.ModuleDict({"special": Child()})
        self.others: Any = None
        self.read: Read = lambda model: 1.0

    @sg.eager_break
    def look(self, x: Tensor) -> Tensor:
        assert [self.special, self.by_name["special"]]
        return x.clone()

    def forward(self, x: Tensor) -> Tensor:
        return self.look(x + 1) * self.read(self)


def _number_of(thing: Any) -> float:
    return float(thing.number)


def _of_closure(model: Reaching) -> Read:
    special = model.special
    return lambda _: _number_of(special)


def _of_called_closure(model: Reaching) -> Read:
    model.special = special = Child()
    return lambda _: special(1.0)  # type: ignore[no-any-return]


def _of_default(model: Reaching) -> Read:
    def read(_: Any, thing: Any = model.special) -> float:
        return _number_of(thing)

    return read


def _of_method(model: Reaching) -> Read:
    class Reader:
        number = 1.0

        def read(self, _: Any) -> float:
            return self.number

    model.special = Reader()
    return model.special.read  # type: ignore[no-any-return]


def _of_child(read: Read) -> Callable[[Reaching], Read]:
    def made(model: Reaching) -> Read:
        model.special = Child()
        return read

    return made


def _in_list(model: Reaching) -> Read:
    model.others = [model.special]
    return lambda model: _number_of(model.others[0])


def _in_module_list(model: Reaching) -> Read:
    model.special = Child()
    model.others = nn.ModuleList([model.special])
    return lambda model: _number_of(model.others[0])


def _in_other_module(model: Reaching) -> Read:
    model.others = Child()
    model.others.held = model.special
    return lambda model: _number_of(model.others.held)


def _set(owner: Callable[[Reaching], Any], key: str = "number") -> Callable[[Reaching], None]:
    return lambda model: setattr(owner(model), key, 2.0)


class Case(NamedTuple):
    make: Callable[[Reaching], Read]
    change: Callable[[Reaching], None] = _set(lambda model: model.special)


CASES = {
    "a closure": Case(_of_closure),
    "a module in a closure": Case(_of_called_closure),
    "a default": Case(_of_default),
    "a partial": Case(lambda model: functools.partial(lambda thing, _: _number_of(thing), model.special)),
    "a keyword of a partial": Case(
        lambda model: functools.partial(lambda _, thing: _number_of(thing), thing=model.special)
    ),
    "a method": Case(_of_method),
    "a list": Case(_in_list),
    "a list of modules": Case(_in_module_list),
    "another module": Case(_in_other_module),
    "children": Case(
        _of_child(lambda model: sum(_number_of(child) for child in model.children() if hasattr(child, "number")))
    ),
    "called children": Case(_of_child(lambda model: list(model.children())[-1](1.0))),
    "modules": Case(_of_child(lambda model: max(_number_of(m) for m in model.modules() if isinstance(m, Child)))),
    "named children": Case(
        _of_child(lambda model: max(_number_of(m) for _, m in model.named_children() if isinstance(m, Child)))
    ),
    "a path": Case(_of_child(lambda model: _number_of(model.get_submodule(PATH[0])))),
    "values of a ModuleDict": Case(
        lambda model: lambda model: max(map(_number_of, model.by_name.values())),
        _set(lambda model: model.by_name["special"]),
    ),
    "items of a ModuleDict": Case(
        lambda model: lambda model: max(_number_of(child) for _, child in model.by_name.items()),
        _set(lambda model: model.by_name["special"]),
    ),
    "keys of a ModuleDict": Case(
        lambda model: lambda model: max(_number_of(model.by_name[key]) for key in model.by_name),
        _set(lambda model: model.by_name["special"]),
    ),
}


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("way", CASES)
def test_what_only_a_break_names(device: torch.device, way: str, verify: int) -> None:
    model = Reaching()
    model.read = CASES[way].make(model)
    graphed = piecewise(model, device, capture_sizes=[4], verify=verify)
    for changed in (False, True):
        replays = graphed.graph_stats.replays
        if changed:
            CASES[way].change(model)
        for call in range(8):
            x = torch.randn(4, 4, device=device)
            assert torch.equal(graphed(x), (x + 1) * model.read(model)), (changed, call)
        assert graphed.graph_stats.replays > replays
