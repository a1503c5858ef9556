"""One walk leads from any object to all that it holds: where each value lies, by a name, and none of its code runs."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.walk import DEPTH, Policy, Walk, all_tensors, holder_of, items_of, tensors_in
from simplegraph.guard.survey import Survey


class Hostile:
    """Raises whenever code of its class runs, but for the hash by which it comes into a dict."""

    asleep = False

    def __hash__(self) -> int:
        if Hostile.asleep:
            raise RuntimeError("hashed")
        return 1

    def _refuse(self, *_: Any) -> NoReturn:
        raise RuntimeError("code ran")

    __eq__ = __len__ = __iter__ = __bool__ = __str__ = __repr__ = __format__ = __getattr__ = __getitem__ = _refuse
    __getattribute__ = _refuse


class Rows(list[Any]):
    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("code ran")

    __len__: Any = __iter__


class Bare:
    def __init__(self, value: Any) -> None:
        self.value = value


class Slotted:
    __slots__ = ("__dict__", "empty", "mask")


@pytest.fixture(autouse=True)
def _hostile() -> Iterator[None]:
    yield
    Hostile.asleep = False


def hostile(tensor: Tensor) -> list[Any]:
    """Return a holder of a tensor behind each kind of class that runs code when it is looked at."""
    thing, rows, slotted = Hostile(), Rows(), Slotted()
    object.__setattr__(thing, "mask", tensor)
    list.append(rows, tensor)
    slotted.mask = tensor
    keyed = {Hostile(): tensor}
    Hostile.asleep = True
    return [thing, rows, slotted, keyed, mock.MagicMock(mask=tensor)]


def test_a_walk_runs_no_code_of_what_it_looks_at() -> None:
    tensor = torch.ones(1)
    for holder in hostile(tensor)[:-1]:
        assert [found is tensor for found in tensors_in([holder])] == [True], type(holder)


def test_a_module_that_holds_objects_with_code_of_their_own_is_served() -> None:
    """A key's own text was asked for, and a call failed where that raises or copies a tensor from the device."""
    model = nn.Linear(2, 2).eval()
    first, second = hostile(torch.ones(1))[3:]
    model.held = [first, second]
    wrapped, x = sg.wrap(model, capture_sizes=[2], progress=False), torch.randn(2, 2)
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(wrapped(x), nn.functional.linear(x, model.weight, model.bias))
    assert "held.0.<Hostile>" in Survey(model).tensors
    assert wrapped.graph_stats.replays


def test_every_value_is_named_and_its_holder_is_known() -> None:
    """Guards watch the dict, list or object that a value is set in, and messages name it."""
    slotted = Slotted()
    slotted.mask, slotted.plain = 1, 2
    model = nn.Sequential(nn.Linear(1, 1))
    model[0].table = {"a": [3], (1, "b"): 4}
    model.held = slotted
    walk, found = Walk([model]), {}
    for thing, held, _ in walk:
        for key, value in items_of(held):
            if type(value) is int:
                found[walk.path_of(key, thing)] = holder_of(thing, key)
    table = model[0].table
    assert found["0.table.a.0"] is table["a"]
    assert found["0.table.(1, b)"] is table
    assert found["held.mask"] is slotted
    assert found["held.plain"] is vars(slotted)
    assert found["0.in_features"] is vars(model[0])


def test_what_is_nested_far_deeper_than_python_can_call_is_walked() -> None:
    tensor = torch.ones(1)
    nested: Any = tensor
    for _ in range(50_000):
        nested = [nested]
    assert [found is tensor for found in tensors_in(nested)] == [True]
    model = deep = nn.Module()
    for _ in range(5_000):
        deep.add_module("m", nn.Module())
        deep = deep.m
    deep.register_buffer("b", tensor)
    (name,) = Survey(model).tensors
    assert name == "m." * 5_000 + "b"


def test_children_are_named_before_what_attributes_lead_to() -> None:
    """A layer that holds a later one in a list, to hide it from `parameters()`, gives it no name."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)))
    model[0].next = [model[1][0]]
    walk = Walk([model])
    names = {id(thing): walk.path(thing) for thing, *_ in walk}
    assert names[id(model[1][0])] == "1.0"


def test_caps_are_of_what_is_opened() -> None:
    nested: Any = torch.ones(1)
    for _ in range(5):
        nested = Bare(nested)
    depths = [len(Walk([[[[nested]]]], Policy(depth=depth)).collect_tensors()) for depth in range(6)]
    assert depths == [0, 0, 0, 0, 1, 1], "containers are no steps"
    held = [[torch.ones(1)] for _ in range(10)]
    assert len(list(Walk([held], Policy(objects=5)))) == 5


def functions(number: int, state: list[Any]) -> Callable[..., Any]:
    """Return a function that calls another, so many in all, of which the last changes the state."""
    file: dict[str, Any] = {"state": state}
    last = "def run(x):\n    state[0] += 0.5\n    return x" if number == 1 else "def run(x): return inner(x)"
    file["inner"] = functions(number - 1, state) if number > 1 else None
    exec(last, file)
    run: types.FunctionType = file["run"]
    return run


class Calls(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * 2


@pytest.mark.parametrize("number", range(1, DEPTH + 1))
def test_what_a_forward_counts_four_functions_away_it_counts_at_every_call(number: int) -> None:
    """It was noticed three functions away, and four away it stood still from the capture on."""
    state = [0.0]
    model = sg.wrap(Calls(functions(number, state)).eval(), capture_sizes=[2], progress=False)
    with torch.inference_mode():
        for _ in range(6):
            model(torch.randn(2, 2))
    assert state == [3.0]


def test_a_mask_four_containers_deep_that_is_replaced_is_no_stale_answer() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = {"layers": [{"masks": [torch.ones(2, 2)]}]}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.held["layers"][0]["masks"][0]

    model = Masked().eval()
    wrapped, x = sg.wrap(model, capture_sizes=[2], progress=False), torch.randn(2, 2)
    with torch.inference_mode():
        for _ in range(4):
            wrapped(x)
        assert wrapped.graph_stats.replays
        model.held["layers"][0]["masks"][0] = torch.full((2, 2), 3.0)
        for _ in range(3):
            assert torch.equal(wrapped(x), x * 3)


def test_all_tensors_there_are_can_be_listed() -> None:
    tensor, module = torch.ones(1), nn.Module()
    assert any(found is tensor for found in all_tensors())
    assert not any(found is module for found in all_tensors())
    assert any(found is module for found in all_tensors(nn.Module))
