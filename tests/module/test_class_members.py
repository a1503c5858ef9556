"""A class gets another method, property or operator after a capture: never stale, though no instance changed."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("no_grad")

WIDTH = 4


def _scaled(kind: str, number: float) -> Any:
    """Return a member of a class that makes the tests' forwards multiply by a number."""
    return {
        "__call__": lambda self, x: x * number,
        "__getitem__": lambda self, key: number,
        "__len__": lambda self: int(number),
        "__contains__": lambda self, key: number > 2,
        "__iter__": lambda self: iter([number]),
        "__mul__": lambda self, x: x * number,
        "__enter__": lambda self: number,
        "__getattr__": lambda self, name: number,
        "__eq__": lambda self, other: number > 2,
        "value": property(lambda self: number),
        "of_class": classmethod(lambda cls: number),
        "static": staticmethod(lambda: number),
        "method": lambda self: number,
        "__init__": lambda self: setattr(self, "made", number),
        "__str__": lambda self: str(number),
        "__copy__": lambda self: number,
    }[kind]


def _entered(scale: Any) -> Any:
    with scale as number:
        return number


READ: dict[str, Callable[[Any, Tensor], Any]] = {
    "__call__": lambda scale, x: scale(x),
    "__getitem__": lambda scale, x: x * scale["any"],
    "__len__": lambda scale, x: x * len(scale),
    "__contains__": lambda scale, x: x * (3 if "any" in scale else 2),
    "__iter__": lambda scale, x: x * sum(scale),
    "__mul__": lambda scale, x: scale * x,
    "__enter__": lambda scale, x: x * _entered(scale),
    "__getattr__": lambda scale, x: x * scale.missing,
    "__eq__": lambda scale, x: x * (3 if scale == 1 else 2),
    "value": lambda scale, x: x * scale.value,
    "of_class": lambda scale, x: x * scale.of_class(),
    "static": lambda scale, x: x * scale.static(),
    "method": lambda scale, x: x * scale.method(),
    "__init__": lambda scale, x: x * type(scale)().made,
    "__str__": lambda scale, x: x * float(str(scale)),
    "__copy__": lambda scale, x: x * copy.copy(scale),
}


class Scaling(nn.Module):
    """Multiplies the output of a layer by what an object's class computes."""

    def __init__(self, scale: Any, read: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale, self.read = scale, read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.scale, self.layer(x))


def _replays(model: Any, device: torch.device, number: float) -> None:
    """Call a model several times, compare with eager, and check that a graph served."""
    before = model.graph_stats.replays
    for _ in range(4):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(model(x), model.layer(x) * number)
    assert model.graph_stats.replays > before


@pytest.mark.parametrize("member", READ)
def test_a_replaced_member_of_an_objects_class_is_never_stale(member: str, device: torch.device) -> None:
    kind: Any = type("Scale", (), {"__exit__": lambda self, *_: None, member: _scaled(member, 2.0)})
    model = sg.wrap(Scaling(kind(), READ[member]).to(device).eval(), capture_sizes=[2], progress=False)
    _replays(model, device, 2.0)
    setattr(kind, member, _scaled(member, 3.0))
    _replays(model, device, 3.0)


@pytest.mark.parametrize("member", ["value", "of_class", "static", "method", "__call__", "forward"])
def test_a_replaced_member_of_a_modules_class_is_never_stale(member: str, device: torch.device) -> None:
    body = {"forward": lambda self, x: x, member: _scaled("__call__" if member == "forward" else member, 2.0)}
    kind: Any = type("Scale", (nn.Module,), body)
    read = READ["__call__"] if member == "forward" else READ[member]
    model = sg.wrap(Scaling(kind(), read).to(device).eval(), capture_sizes=[2], progress=False)
    _replays(model, device, 2.0)
    setattr(kind, member, _scaled("__call__" if member == "forward" else member, 3.0))
    _replays(model, device, 3.0)


def test_a_patched_call_of_torchs_modules_is_never_stale(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sg.wrap(Scaling(2.0, lambda scale, x: x * scale).to(device).eval(), capture_sizes=[2], progress=False)
    _replays(model, device, 2.0)
    call = nn.Module.__call__
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x: call(self, x) * 3, raising=False)
    for _ in range(4):
        x = torch.randn(2, WIDTH, device=device)
        torch.testing.assert_close(model(x), x @ model.layer.weight.T * 6)


def test_a_replaced_hook_object_is_never_stale(device: torch.device) -> None:
    kind: Any = type("Hook", (), {"__call__": lambda self, module, args, output: output * 2})
    model = Scaling(1.0, lambda scale, x: x * scale).to(device).eval()
    model.layer.register_forward_hook(kind())
    graphed: Any = sg.wrap(model, capture_sizes=[2], progress=False)
    for number in (2, 3):
        kind.__call__ = lambda self, module, args, output, number=number: output * number
        before = graphed.graph_stats.replays
        for _ in range(4):
            x = torch.randn(2, WIDTH, device=device)
            torch.testing.assert_close(graphed(x), x @ model.layer.weight.T * number)
        assert graphed.graph_stats.replays > before


def test_a_property_at_the_address_of_an_earlier_one_is_another(device: torch.device) -> None:
    """A property supports no weak reference, and is compared by the identity of its functions."""
    kind: Any = type("Scale", (), {"value": property(lambda self: 2.0)})
    address = id(kind.value)
    model = sg.wrap(Scaling(kind(), READ["value"]).to(device).eval(), capture_sizes=[2], progress=False)
    _replays(model, device, 2.0)
    for _ in range(100):
        kind.value = property(lambda self: 3.0)
        if id(kind.value) == address:
            break
    _replays(model, device, 3.0)


def test_an_object_at_the_address_of_an_earlier_one_is_another(device: torch.device) -> None:
    """Plain objects support no weak reference, and are compared by identity."""
    numbers: dict[Any, float] = {object(): 2.0}
    holder = types.SimpleNamespace(key=next(iter(numbers)))
    address = id(holder.key)
    module = Scaling(holder, lambda scale, x: x * numbers[scale.key]).to(device).eval()
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    _replays(model, device, 2.0)
    numbers.clear()
    holder.key = None
    others: list[Any] = []
    while len(others) < 100 and address not in map(id, others):
        others.append(object())
    holder.key = others[-1]
    numbers[holder.key] = 3.0
    _replays(model, device, 3.0)
