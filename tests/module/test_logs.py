"""What a forward writes to logs, tables and contexts it writes in every call: it runs eagerly, by the place's name."""

from __future__ import annotations

import collections
import contextvars
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

WIDTH, CALLS = 4, 7


class Logs(nn.Module):
    """Does something to Python in each call."""

    def __init__(self, do: Callable[[Any, Tensor], object], held: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.do, self.held = do, held

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        self.do(self, y)
        return y


class Record:
    def __init__(self, step: int) -> None:
        self.step = step


class Registry:
    log: list[Any] = []  # noqa: RUF012


class Property(property):
    """A user's kind of property."""


class Computed:
    @property
    def count(self) -> int:
        LOG.append(len(LOG))
        return len(LOG)

    @Property
    def own_count(self) -> int:
        LOG.append(len(LOG))
        return len(LOG)


Item = TypeVar("Item")


class Noted(Generic[Item]):
    def __init__(self, number: int) -> None:
        LOG.append(number)


class Listed:
    def __init__(self, number: int) -> None:
        LOG.append(number)


NOTED: Any = Noted[int]
LISTED: Any = types.GenericAlias(Listed, int)


def oldest_last(held: Any) -> None:
    key = next(iter(held))
    held[key] = held.pop(key)


LOG: list[Any] = []
TABLE: dict[Any, Any] = {}
LISTS: dict[str, list[Any]] = collections.defaultdict(list)
LAST: collections.deque[Any] = collections.deque(maxlen=2)
STEPS = contextvars.ContextVar("STEPS", default=0)
NOTES: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("NOTES")
KEPT: contextvars.ContextVar[list[Any]] = contextvars.ContextVar("KEPT", default=[])  # noqa: B039
LOCAL = threading.local()


def default_log(module: Any, y: Tensor, log: list[Any] = []) -> None:  # noqa: B006
    log.append((len(log), "step"))


def clear() -> None:
    for container in (LOG, TABLE, LISTS, LAST, Registry.log, default_log.__defaults__[0]):  # type: ignore[index]
        container.clear()
    LAST.extend([(0,), (0,)])
    STEPS.set(0)
    NOTES.set([])
    KEPT.get().clear()
    LOCAL.log = []


# What a call does, what the module holds, what that comes to, and what the report names.
EFFECTS: dict[str, tuple[Callable[[Any, Tensor], object], Callable[[], Any], Callable[[Any], Any], str]] = {
    "tuples in a list": (lambda m, y: m.held.append((1, 2.0)), list, lambda m: len(m.held), "held"),
    "dicts in a list": (lambda m, y: m.held.append({"loss": 1.0}), list, lambda m: len(m.held), "held"),
    "an iterator": (lambda m, y: next(m.held), lambda: iter(range(99)), lambda m: m.held.__length_hint__(), "held"),
    "a long dict": (
        lambda m, y: m.held.__setitem__(len(m.held), (1,)),
        lambda: dict.fromkeys(range(500)),
        lambda m: len(m.held),
        "held",
    ),
    "a dict by latest use": (
        lambda m, y: oldest_last(m.held),
        lambda: {"a": 1, "b": 2, "c": 3},
        lambda m: list(m.held),
        "held",
    ),
    "an OrderedDict by latest use": (
        lambda m, y: m.held.move_to_end(next(iter(m.held))),
        lambda: collections.OrderedDict(a=1, b=2, c=3),
        lambda m: list(m.held),
        "held",
    ),
    "tuples in a global": (lambda m, y: LOG.append((len(LOG), 1.0)), list, lambda _: len(LOG), "LOG"),
    "objects in a global": (lambda m, y: LOG.append(Record(len(LOG))), list, lambda _: len(LOG), "LOG"),
    "a global dict that grows": (lambda m, y: TABLE.update({len(TABLE): (1,)}), list, lambda _: len(TABLE), "TABLE"),
    "a list in a global dict": (lambda m, y: LISTS["a"].append((1,)), list, lambda _: len(LISTS["a"]), "LISTS"),
    "the last of a global": (lambda m, y: LAST.append((LAST[-1][0] + 1,)), list, lambda _: list(LAST), "LAST"),
    "a list of a class": (lambda m, y: Registry.log.append((1,)), list, lambda _: len(Registry.log), "log"),
    "a default": (default_log, list, lambda _: len(default_log.__defaults__[0]), "default"),  # type: ignore[index]
    "a context variable": (lambda m, y: STEPS.set(STEPS.get() + 1), list, lambda _: STEPS.get(), "STEPS"),
    "a list of a context variable": (lambda m, y: NOTES.get().append((1,)), list, lambda _: len(NOTES.get()), "NOTES"),
    "a default of a context variable": (
        lambda m, y: KEPT.get().append((1,)),
        list,
        lambda _: len(KEPT.get()),
        "KEPT",
    ),
    "a property": (lambda m, y: m.held.count, Computed, lambda _: len(LOG), "LOG"),
    "a property of a user's class": (lambda m, y: m.held.own_count, Computed, lambda _: len(LOG), "LOG"),
    "a class of items": (lambda m, y: NOTED(1), list, lambda _: len(LOG), "LOG"),
    "a class of items in C": (lambda m, y: LISTED(1), list, lambda _: len(LOG), "LOG"),
    "a list of a thread's own": (lambda m, y: LOCAL.log.append((1,)), list, lambda _: len(LOCAL.log), "LOCAL"),
}


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("name", EFFECTS)
def test_what_a_call_writes_down_it_writes_down_every_time(name: str) -> None:
    do, make, read, place = EFFECTS[name]
    x = torch.randn(2, WIDTH)
    clear()
    eager = Logs(do, make())
    for _ in range(CALLS):
        eager(x)
    expected = read(eager)
    clear()
    module = Logs(do, make()).eval()
    model: Any = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(CALLS):
        torch.testing.assert_close(model(x), module.layer(x))
    assert read(module) == expected
    assert model.graph_stats.replays == 0
    assert place in str(model.graph_report())


CACHE: dict[Any, Any] = {}
SHAPES: list[Any] = []


def test_what_is_written_down_once_is_no_obstacle() -> None:
    """A cache by shape, of objects or tensors, in a global."""

    def do(module: Any, y: Tensor) -> None:
        if y.shape not in CACHE:
            CACHE[y.shape] = Record(len(CACHE))
            SHAPES.append((y.shape, Record(0)))

    model: Any = sg.wrap(Logs(do).eval(), capture_sizes=[2], progress=False)
    x = torch.randn(2, WIDTH)
    for _ in range(CALLS):
        torch.testing.assert_close(model(x), sg.unwrap(model).layer(x))
    assert model.graph_stats.replays
    assert len(CACHE) == len(SHAPES) == 1


def test_a_context_variable_that_a_call_sets_to_the_same_is_no_obstacle() -> None:
    def do(module: Any, y: Tensor) -> None:
        token = STEPS.set(5)
        STEPS.reset(token)

    clear()
    model: Any = sg.wrap(Logs(do).eval(), capture_sizes=[2], progress=False)
    x = torch.randn(2, WIDTH)
    for _ in range(CALLS):
        torch.testing.assert_close(model(x), sg.unwrap(model).layer(x))
    assert model.graph_stats.replays
    assert STEPS.get() == 0
