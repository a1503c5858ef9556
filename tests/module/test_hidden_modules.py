"""A module that code leads to, and no attribute of the wrapped one, is compared as submodules are."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: nn.Module) -> None:
        self.value = value


class Keeps:
    part: nn.Module


KEPT: dict[str, Any] = {}
FILE: Any = types.ModuleType("file_of_parts")


def same(value: Any) -> Any:
    return value


class Reading(nn.Module):
    def __init__(self, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.read = nn.Linear(4, 4), read

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.read(self)(self.first(x))
        return y


def in_a_closure(model: Any, part: nn.Module) -> None:
    model.read = lambda _: part


def in_a_default(model: Any, part: nn.Module) -> None:
    model.read = lambda _, held=part: held


def in_a_partial(model: Any, part: nn.Module) -> None:
    model.held, model.read = functools.partial(same, part), lambda self: self.held()


def in_a_slot(model: Any, part: nn.Module) -> None:
    model.held, model.read = Slotted(part), lambda self: self.held.value


def in_a_set(model: Any, part: nn.Module) -> None:
    model.held, model.read = {part}, lambda self: next(iter(self.held))


def in_a_class(model: Any, part: nn.Module) -> None:
    Keeps.part, model.read = part, lambda _: Keeps.part


def in_a_global(model: Any, part: nn.Module) -> None:
    KEPT["part"], model.read = part, lambda _: KEPT["part"]


def in_another_file(model: Any, part: nn.Module) -> None:
    FILE.part, model.read = part, lambda _: lambda x: FILE.part(x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "a weight": lambda part: setattr(part[0], "weight", nn.Parameter(torch.randn(4, 4))),
    "a weight that is gone": lambda part: setattr(part[0], "bias", None),
    "a buffer": lambda part: setattr(part[1], "running_var", torch.full((4,), 4.0)),
    "another part of its class": lambda part: part.__setitem__(0, nn.Linear(4, 4)),
    "one part more": lambda part: part.append(nn.Tanh()),
    "a hook": lambda part: part[0].register_forward_hook(lambda module, args, out: out * 2),
    "a hook before": lambda part: part.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "its mode": lambda part: part[1].train(),
    "a setting": lambda part: setattr(part[1], "eps", 3.0),
    "its forward": lambda part: setattr(part[0], "forward", lambda h: h * 3),
    "its class": lambda part: setattr(part[0], "__class__", nn.Identity),
}


@pytest.mark.parametrize(
    "place", [in_a_closure, in_a_default, in_a_partial, in_a_slot, in_a_set, in_a_class, in_a_global, in_another_file]
)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_a_module_that_code_leads_to_is_noticed(name: str, place: Callable[[Any, Any], None]) -> None:
    model, part = Reading(same), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    place(model, part.eval())
    graphs: Any = sg.wrap(model.eval(), capture_sizes=[4], progress=False)
    for change in (None, CHANGES[name], lambda part: setattr(part, "unread", 1)):
        if change is not None:
            change(part)
        replays = graphs.graph_stats.replays
        for _ in range(5):
            x = torch.randn(4, 4)
            with torch.inference_mode():
                state = {name: value.clone() for name, value in part.state_dict().items()}
                expected = model(x)
                part.load_state_dict(state)  # batch norm in train mode writes its statistics
                torch.testing.assert_close(graphs(x), expected)
        assert graphs.graph_stats.replays > replays, graphs.graph_report()


def test_a_function_of_another_file_that_is_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FILE, "act", torch.tanh, raising=False)
    model = Reading(lambda _: lambda x: FILE.act(x))
    graphs: Any = sg.wrap(model.eval(), capture_sizes=[4], progress=False)
    for act in (torch.tanh, torch.sin, lambda x: x * 3):
        FILE.act = act
        replays = graphs.graph_stats.replays
        for _ in range(5):
            x = torch.randn(4, 4)
            with torch.inference_mode():
                assert torch.equal(graphs(x), model(x))
        assert graphs.graph_stats.replays > replays, graphs.graph_report()
