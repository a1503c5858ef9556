"""What user code keeps anywhere is there again after a failed capture: eager calls go on as if there had been none."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import functools
import queue
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import Reason
from simplegraph.device.select import graph_device

pytestmark = pytest.mark.usefixtures("inference_mode")


class Slots:
    __slots__ = ("h",)


class Key:
    pass


@dataclasses.dataclass(slots=True)
class Data:
    h: Any = None


class Deep:
    def __init__(self) -> None:
        self.inner = Slots()

    @property
    def h(self) -> Any:
        return self.inner.h

    @h.setter
    def h(self, value: Any) -> None:
        self.inner.h = value


def a_class() -> type:
    class Shared:
        h: Any = None

    return Shared


def a_function() -> Any:
    def function() -> None: ...

    return function


KEY = Key()
ATTRIBUTES: dict[str, Callable[[], Any]] = {
    "slots": Slots,
    "slots dataclass": Data,
    "slots inside an object": Deep,
    "thread local": threading.local,
    "function": a_function,
    "class": a_class,
    "partial": lambda: functools.partial(print),
}
ITEMS: dict[str, tuple[Callable[[], Any], Any]] = {
    "chain map": (lambda: collections.ChainMap({}, {}), "h"),
    "user dict": (collections.UserDict, "h"),
    "weak keys": (weakref.WeakKeyDictionary, KEY),
    "list in a tuple": (lambda: ([None],), None),
}


class Keeps(nn.Module):
    """Reads what the call before kept, and keeps its own; read back, it cannot be captured."""

    def __init__(self, holder: Any, key: Any = None, *, item: bool = False, fails: bool = True) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.holder, self.key, self.item, self.fails = holder, key, item, fails
        self.keep(torch.ones(2, 4))

    def keep(self, h: Tensor) -> None:
        if not self.item:
            self.holder.h = h
        elif isinstance(self.holder, tuple):
            self.holder[0][0] = h
        else:
            self.holder[self.key] = h

    def kept(self) -> Tensor:
        if not self.item:
            return self.holder.h
        return self.holder[0][0] if isinstance(self.holder, tuple) else self.holder[self.key]

    def forward(self, x: Tensor) -> Tensor:
        h = self.l(x) + self.kept()
        self.keep(h)
        return h * (2 if self.fails and h.sum().item() > 0 else 1)


def answers(net: Keeps, device: torch.device, *, wrapped: bool) -> list[Tensor]:
    torch.manual_seed(0)
    nn.init.eye_(net.l.weight)
    net.to(device).eval()
    net.keep(torch.ones(2, 4, device=device))
    model: Any = sg.wrap(net, capture_sizes=[2], progress=False) if wrapped else net
    ys = [model(torch.full((2, 4), float(step), device=device)).clone() for step in range(5)]
    if wrapped:
        assert model.graph_stats.eager[Reason.CAPTURE_FAILED]
    return ys


@pytest.mark.parametrize("fails", [True, False], ids=["read back", "kept"])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_holds_what_it_held_after_a_failed_capture(name: str, fails: bool, device: torch.device) -> None:
    plain, wrapped = (
        answers(Keeps(ATTRIBUTES[name](), fails=fails), device, wrapped=wrapped) for wrapped in (False, True)
    )
    torch.testing.assert_close(wrapped, plain, rtol=0, atol=0)


@pytest.mark.parametrize("fails", [True, False], ids=["read back", "kept"])
@pytest.mark.parametrize("name", ITEMS)
def test_an_item_is_what_it_was_after_a_failed_capture(name: str, fails: bool, device: torch.device) -> None:
    make, key = ITEMS[name]
    plain, wrapped = (
        answers(Keeps(make(), key, item=True, fails=fails), device, wrapped=wrapped) for wrapped in (False, True)
    )
    torch.testing.assert_close(wrapped, plain, rtol=0, atol=0)


def test_a_context_variable_shows_that_what_it_holds_is_undefined(device: torch.device) -> None:
    variable: contextvars.ContextVar[Tensor] = contextvars.ContextVar("h")

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            h = self.l(x)
            variable.set(h)
            return h * 2

    net = Net().to(device).eval()
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    failed = model.capture_graphs(torch.ones(2, 4, device=device)).failed["batch size 2"]
    assert "undefined" in str(failed)
    assert variable.get().isnan().all()
    x = torch.ones(2, 4, device=device)
    torch.testing.assert_close(model(x), net(x))


@pytest.mark.parametrize("kind", [queue.Queue, queue.LifoQueue, queue.PriorityQueue])
def test_each_call_takes_one_item_from_a_queue_and_the_reason_names_it(kind: type[Any], device: torch.device) -> None:
    class Feeds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = kind()

        def forward(self, x: Tensor) -> Tensor:
            return x * self.items.get_nowait()

    net = Feeds().eval()
    for item in range(8):
        net.items.put(float(item))
    model = sg.wrap(net, capture_sizes=[2], progress=False)
    ys = [float(model(torch.ones(2, 4, device=device))[0, 0]) for _ in range(8)]
    assert sorted(ys) == [float(item) for item in range(8)]
    assert "items" in next(iter(model.graph_stats.failures.values()))


@pytest.mark.parametrize("fails", ["before", "after", "between"])
@pytest.mark.parametrize("holder", ["object", "dict", "list"])
def test_a_count_is_eagers_when_a_padded_size_cannot_be_captured(holder: str, fails: str, device: torch.device) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(4, 4)
            self.first = [0]
            self.seen: Any = {"object": types.SimpleNamespace(n=0), "dict": {"n": 0}, "list": [0]}[holder]

        def count(self) -> None:
            if isinstance(self.seen, types.SimpleNamespace):
                self.seen.n += 1
            else:
                self.seen[0 if holder == "list" else "n"] += 1

        def forward(self, x: Tensor) -> Tensor:
            if fails == "after":
                self.count()
            if fails == "between":
                self.first[0] += 1
            if graph_device(device).is_capturing():
                raise LookupError("not in a capture")
            if fails != "after":
                self.count()
            return self.l(x)

    net = Counts().to(device).eval()
    model = sg.wrap(net, capture_sizes=[4], progress=False)
    for calls, rows in enumerate((1, 3, 1, 4, 2), start=1):
        model(torch.ones(rows, 4, device=device))
        seen = net.seen
        assert (seen.n if holder == "object" else seen[0 if holder == "list" else "n"]) == calls
    assert "not in a capture" in next(iter(model.graph_stats.failures.values()))
