"""Plain values that are attributes of tensors, such as the scale of a quantized weight, are never stale."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("no_grad")

GLOBAL: Any = torch.ones(())


class Scaled(nn.Module):
    """Multiplies by an attribute of one of its tensors."""

    def __init__(self, held: Any, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return x * self.read(self)


def _with(tensor: Tensor, **attributes: Any) -> Any:
    vars(tensor).update(attributes)
    return tensor


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a parameter": (lambda: nn.Parameter(torch.ones(())), lambda model: model.held),
    "a tensor": (lambda: torch.ones(()), lambda model: model.held),
    "a listed tensor": (lambda: [torch.ones(())], lambda model: model.held[0]),
    "a tensor in a dict": (lambda: {"weight": torch.ones(())}, lambda model: model.held["weight"]),
    "a parameter of a child": (lambda: nn.Linear(1, 1), lambda model: model.held.weight),
    "a global tensor": (lambda: None, lambda model: GLOBAL),
}
# The attributes of the tensor, how the forward reads a number among them, and how a test changes it.
VALUES: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any, float], None]]] = {
    "a number": (1.0, lambda tensor: tensor.scale, lambda tensor, number: setattr(tensor, "scale", number)),
    "a dict": (
        {"scale": 1.0},
        lambda tensor: tensor.scale["scale"],
        lambda tensor, number: tensor.scale.update(scale=number),
    ),
    "an object": (
        types.SimpleNamespace(scale=1.0),
        lambda tensor: tensor.scale.scale,
        lambda tensor, number: setattr(tensor.scale, "scale", number),
    ),
    "a later attribute": (
        None,
        lambda tensor: getattr(tensor, "late", 1.0),
        lambda tensor, number: setattr(tensor, "late", number),
    ),
}


@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("place", HELD)
def test_an_attribute_of_a_tensor_is_never_stale(place: str, value: str, kind: str, device: torch.device) -> None:
    make, find = HELD[place]
    scale, read, change = VALUES[value]
    vars(GLOBAL).clear()
    model: Any = Scaled(make(), lambda model: read(find(model))).eval()
    _with(find(model), scale=scale)
    graphed: Any = sg.wrap(model if kind == "module" else model.forward, capture_sizes=[2], progress=False)
    for number in (1.0, 3.0):
        change(find(model), number)
        replays = graphed.graph_stats.replays
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(graphed(x), x * number)
        assert graphed.graph_stats.replays > replays


def test_an_attribute_that_keeps_changing_and_that_no_code_reads_costs_no_replay(device: torch.device) -> None:
    model: Any = Scaled(nn.Parameter(torch.ones(())), lambda model: 1.0).eval()
    graphed: Any = sg.wrap(model, capture_sizes=[2], progress=False)
    for call in range(40):
        model.held.last_update = call
        graphed(torch.randn(2, 4, device=device))
    assert graphed.graph_stats.replays >= 20


def test_a_breaks_attribute_of_a_tensor_is_not_looked_at(device: torch.device) -> None:
    @sg.eager_break
    def scaled(x: Tensor, weight: Any) -> Tensor:
        scale: float = weight.by_break
        return x * scale

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight: Any = _with(nn.Parameter(torch.ones(4)), by_break=1.0)

        def forward(self, x: Tensor) -> Tensor:
            output: Tensor = scaled(x + self.weight, self.weight) * 2
            return output

    model: Any = Broken().to(device).eval()
    graphed: Any = sg.wrap(model, capture_sizes=[2], progress=False, mode="PIECEWISE")
    for call in range(6):
        graphed.weight.by_break = float(call)
        x = torch.randn(2, 4, device=device)
        torch.testing.assert_close(graphed(x), (x + graphed.weight) * call * 2)
    assert graphed.graph_stats.replays >= 4
