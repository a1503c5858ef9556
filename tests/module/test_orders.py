"""The order of what a forward iterates over counts, however it was changed."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.guard import versions

WIDTH = 4


class Iterates(nn.Module):
    """Adds what `read` lists, each time after doubling."""

    def __init__(self, read: Callable[[Any], Any], held: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.read, self.held = read, held

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        for item in self.read(self):
            y = item(y) if isinstance(item, nn.Module) else y * 2 + item
        return y


class Registered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, value in (("a", 2.0), ("b", 3.0)):
            self.register_buffer(f"{name}_buffer", torch.tensor(value))
            self.register_parameter(name, nn.Parameter(torch.tensor(value), requires_grad=False))
        self.layers = nn.Sequential(collections.OrderedDict(a=nn.Tanh(), b=nn.Hardtanh(0.0, 2.0)))


class Described:
    def __init__(self) -> None:
        self.a, self.b = 2.0, 3.0


def reinsert(held: Any) -> None:
    held["a"] = held.pop("a")


def last(held: Any) -> None:
    held.move_to_end("a")


def pairs() -> dict[str, float]:
    return {"a": 2.0, "b": 3.0}


def ordered() -> collections.OrderedDict[str, float]:
    return collections.OrderedDict(pairs())


class Sorted(collections.OrderedDict[str, float]):
    pass


def of_tensors(kind: Any) -> Any:
    return kind({"a": torch.tensor(2.0), "b": torch.tensor(3.0)})


def with_ordered(name: str) -> Registered:
    """As modules that were saved whole by an old torch are."""
    module = Registered()
    target = module.layers if name == "_modules" else module
    setattr(target, name, collections.OrderedDict(getattr(target, name)))
    return module


GLOBAL = ordered()
TABLE = pairs()


def in_turn(self: Any) -> Any:
    return self.held.values()


# What the module holds, how the order changes, and how it is read.
ORDERS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "a dict": (pairs, reinsert, in_turn),
    "an OrderedDict": (ordered, reinsert, in_turn),
    "move_to_end": (ordered, last, in_turn),
    "move_to_end of a subclass": (lambda: Sorted(pairs()), last, in_turn),
    "move_to_end inside": (
        lambda: [{"x": ordered()}],
        lambda held: last(held[0]["x"]),
        lambda m: m.held[0]["x"].values(),
    ),
    "move_to_end of tensors": (lambda: of_tensors(collections.OrderedDict), last, in_turn),
    "a dict of tensors": (lambda: of_tensors(dict), reinsert, in_turn),
    "objects": (
        lambda: collections.OrderedDict(a=Described(), b=types.SimpleNamespace(a=5.0)),
        last,
        lambda m: (each.a for each in m.held.values()),
    ),
    "attributes of an object": (Described, lambda held: reinsert(vars(held)), lambda m: vars(m.held).values()),
    "a global": (ordered, lambda _: last(GLOBAL), lambda _: GLOBAL.values()),
    "a global dict": (ordered, lambda _: reinsert(TABLE), lambda _: TABLE.values()),
    "buffers": (Registered, lambda held: reinsert_as(held._buffers, "a_buffer"), lambda m: m.held.buffers()),
    "parameters": (Registered, lambda held: reinsert(held._parameters), lambda m: m.held.parameters()),
    "submodules": (Registered, lambda held: reinsert(held.layers._modules), lambda m: m.held.layers.children()),
    "ordered buffers": (
        lambda: with_ordered("_buffers"),
        lambda held: held._buffers.move_to_end("a_buffer"),
        lambda m: m.held.buffers(),
    ),
    "ordered parameters": (
        lambda: with_ordered("_parameters"),
        lambda held: last(held._parameters),
        lambda m: m.held.parameters(),
    ),
    "ordered submodules": (
        lambda: with_ordered("_modules"),
        lambda held: last(held.layers._modules),
        lambda m: m.held.layers.children(),
    ),
}


def reinsert_as(held: Any, key: str) -> None:
    held[key] = held.pop(key)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def with_versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(versions, "dict_version", None)


def serve(model: Any, module: nn.Module, times: int = 5) -> None:
    replays = model.graph_stats.replays
    for _ in range(times):
        x = torch.randn(2, WIDTH)
        assert torch.equal(model(x), module(x)), model.graph_report()
    assert model.graph_stats.replays > replays, model.graph_report()


@pytest.mark.usefixtures("with_versions")
@pytest.mark.parametrize("name", ORDERS)
def test_another_order_is_noticed(name: str) -> None:
    make, change, read = ORDERS[name]
    module = Iterates(read, make()).eval()
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    serve(model, module)
    change(module.held)
    serve(model, module)


def test_another_order_of_the_modules_own_children_is_noticed() -> None:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()).eval()
    vars(module)["_modules"] = collections.OrderedDict(module._modules)
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    serve(model, module)
    module._modules.move_to_end("0")  # type: ignore[attr-defined]
    serve(model, module)


def test_an_order_that_comes_back_needs_no_capture() -> None:
    module = Iterates(in_turn, ordered()).eval()
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for key in ("a", "b", "a", "b"):
        serve(model, module)
        module.held.move_to_end(key)
    assert model.graph_stats.captures == 2
