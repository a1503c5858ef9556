"""A break that sets what the forward reads at some calls only: no replay goes on with the earlier value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.errors import BreakError
from simplegraph.base.reasons import Reason
from tests.graph.breaks.models import Calls, piecewise

pytestmark = [pytest.mark.usefixtures("inference_mode"), pytest.mark.proofs]

NUMBER = 1.0


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: float) -> None:
        self.number = number


@dataclasses.dataclass(frozen=True)
class Frozen:
    number: float = 1.0


class Kept:
    """Stays alive, whoever holds it."""

    instances: dict[float, Kept]

    def __init__(self, number: float) -> None:
        self.number = number


Kept.instances = {number: Kept(number) for number in (1.0, 2.0)}


class Setting(nn.Module):
    """Reads a number before and after its break, which sets it to 2 for positive rows."""

    of_class = 1.0

    def __init__(self, way: str) -> None:
        super().__init__()
        global NUMBER
        NUMBER, Setting.of_class = 1.0, 1.0
        self.way, self.number, self.parts = way, 1.0, (1.0, "text")
        self.found, self.items, self.names = {"number": 1.0}, [1.0, 3.0], {1}
        self.state, self.slotted, self.inner = SimpleNamespace(number=1.0), Slotted(1.0), nn.Identity()
        self.frozen, self.kept, self.lengths = Frozen(), Kept.instances[1.0], {3: [1.0]}
        self.inner.number = 1.0
        self.variable, self.octets = closed(), bytearray([1])

    @sg.eager_break
    def look(self, x: Tensor) -> Tensor:
        global NUMBER
        Calls.breaks += 1
        if (number := 1.0 + float(x[0, 0] > 0)) == self.read():
            return x.clone()
        if self.way == "an attribute":
            self.number = number
        elif self.way == "a part of a tuple":
            self.parts = number, *self.parts[1:]
        elif self.way == "an item of a dict":
            self.found["number"] = number
        elif self.way == "a new dict":
            self.found = {"number": number}
        elif self.way == "an item of a list":
            self.items[0] = number
        elif self.way == "a longer list":
            self.items.insert(0, number)
        elif self.way == "a new list":
            self.items = [number]
        elif self.way == "a set":
            self.names = {1} if number == 1.0 else {1, 2}
        elif self.way == "an item of a set":
            (self.names.discard if number == 1.0 else self.names.add)(2)
        elif self.way == "an object":
            self.state.number = number
        elif self.way == "slots":
            self.slotted.number = number
        elif self.way == "a submodule":
            self.inner.number = number
        elif self.way == "another object":
            self.kept = Kept.instances[number]
        elif self.way == "nested":
            self.lengths[3][0] = number
        elif self.way == "a class":
            Setting.of_class = number
        elif self.way == "a global":
            NUMBER = number
        elif self.way == "a closure":
            self.variable(number)
        elif self.way == "a new object":
            self.frozen = Frozen(number)
        elif self.way == "an item of an array":
            self.octets[0] = int(number)
        return x.clone()

    def read(self) -> float:
        return max(
            self.number,
            self.parts[0],
            self.found["number"],
            self.items[0],
            self.state.number,
            self.slotted.number,
            self.inner.number,
            self.kept.number,
            self.lengths[3][0],
            self.of_class,
            NUMBER,
            self.variable(),
            self.frozen.number,
            float(self.octets[0]),
            float(len(self.names)),
        )

    def forward(self, x: Tensor) -> Tensor:
        Calls.forwards += 1
        before = self.read()
        y = self.look(x + 1)
        return y * 10 * before + self.read()


def closed() -> Any:
    number = 1.0

    def use(new: float | None = None) -> float:
        nonlocal number
        if new is not None:
            number = new
        return number

    return use


WAYS = (
    *("an attribute", "a part of a tuple", "an item of a dict", "a new dict", "an item of a list", "a longer list"),
    *("a new list", "a set", "an item of a set", "an object", "slots", "a submodule", "another object", "nested"),
    *("a class", "a global", "a closure", "a new object"),
)


def rows(number: float, device: torch.device) -> Tensor:
    return torch.full((4, 4), 0.5 if number == 2.0 else -1.5, device=device)


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_the_call_is_finished_eagerly_with_what_the_break_set(device: torch.device, way: str, verify: int) -> None:
    model = piecewise(Setting(way), device, capture_sizes=[4], verify=verify)
    before, finished = 1.0, 0
    for call in range(240):
        number = 2.0 if call > 8 and call % 60 > 40 else 1.0
        x, breaks, replays = rows(number, device), Calls.breaks, model.graph_stats.replays
        found = model(x)
        assert torch.equal(found, (x + 1) * 10 * before + number), call
        if model.graph_stats.replays == replays:
            finished += number != before
            assert Calls.breaks == breaks + 1, "each break runs once"
        assert sg.unwrap(model).read() == number
        before = number
    assert finished
    assert model.graph_stats.replays > 10
    assert not model.graph_stats.failures


class Drawing(Setting):
    """Draws random numbers before its break."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.rand_like(x) * 0)


class Accumulating(Setting):
    """Writes to a buffer before its break."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.sums += x.sum(0)
        return super().forward(x)


class Doubling(Setting):
    """Has a break that writes to what it is passed, and whose code sums that up."""

    @sg.eager_break
    def double(self, x: Tensor) -> None:
        x *= 2

    def forward(self, x: Tensor) -> Tensor:
        y = x + 0
        self.double(y)
        return super().forward(y / 2)


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize(
    ("kind", "way", "why"),
    [
        (Setting, "an item of an array", "what that was is not known any more"),
        (Drawing, "an attribute", "the forward draws random numbers"),
        (Doubling, "an attribute", "it writes to what it is passed"),
        (Accumulating, "an attribute", "memory from before the call was written by then"),
    ],
)
def test_a_call_that_cannot_be_finished_raises(
    device: torch.device, kind: type[Setting], way: str, why: str, verify: int
) -> None:
    model = piecewise(kind(way), device, capture_sizes=[4], verify=verify)
    for _ in range(12):
        model(rows(1.0, device))
    assert model.graph_stats.replays
    with pytest.raises(BreakError, match=r"set (number|octets), which the forward may read") as error:
        model(rows(2.0, device))
    assert why in str(error.value)
    assert "Let the break do what depends on it" in str(error.value)
    assert sg.unwrap(model).read() == 2.0  # as after eager's break
    for number in (2.0, 2.0):
        before, x = sg.unwrap(model).read(), rows(number, device)
        assert torch.equal(model(x), (x + 1) * 10 * before + number)


def test_the_report_says_what_was_set(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    model = piecewise(Setting("an attribute"), device, capture_sizes=[4], verify=1)
    for _ in range(12):
        model(rows(1.0, device))
    eager = model.graph_stats.eager[Reason.PYTHON_STATE]
    model(rows(2.0, device))
    assert model.graph_stats.eager[Reason.PYTHON_STATE] == eager + 1
    assert "number, which an eager break set and the forward may read: let the break" in caplog.text


class Several(nn.Module):
    """Has a break that sets a number between others, which write memory or not."""

    def __init__(self, *, is_counting: bool = False) -> None:
        super().__init__()
        self.number, self.is_counting, self.seen = 1.0, is_counting, 0

    @sg.eager_break
    def first(self, x: Tensor) -> Tensor:
        Calls.breaks += 1
        self.seen += 1  # only breaks name it
        return x + 1

    @sg.eager_break
    def second(self, x: Tensor) -> Tensor:
        Calls.breaks += 1
        if float(x[0, 0]) > 5:
            self.number = 2.0
        return x * 2

    @sg.eager_break
    def third(self, x: Tensor) -> Tensor:
        Calls.breaks += 1
        return x + self.number

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x * self.number)
        y = self.second(y * self.number)
        return self.third(y * self.number) * self.number


@pytest.mark.parametrize("number_of_rows", [3, 4])
def test_later_breaks_run_once_with_the_new_number(device: torch.device, number_of_rows: int) -> None:
    model = piecewise(Several(), device, capture_sizes=[4])
    small = torch.ones(number_of_rows, 4, device=device)
    for _ in range(8):
        assert torch.equal(model(small), (small + 1) * 2 + 1)
    assert model.graph_stats.replays
    replays, calls, x = model.graph_stats.replays, Calls.breaks, small * 9
    assert torch.equal(model(x), ((x + 1) * 2 * 2 + 2) * 2)
    assert Calls.breaks == calls + 3
    assert model.graph_stats.replays == replays
    for _ in range(8):
        assert torch.equal(model(small), ((small * 2 + 1) * 2 * 2 * 2 + 2) * 2)
    assert model.graph_stats.replays > replays


class Sometimes(nn.Module):
    """Reads the number that its break sets only if it is told to, if `uses` says so, or for few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.uses = 1.0, False

    @sg.eager_break
    def look(self, x: Tensor) -> Tensor:
        self.number = 2.0 if float(x[0, 0]) > 0 else 1.0
        return x.clone()

    def forward(self, x: Tensor, *, uses: bool = False) -> Tensor:
        y = self.look(x + 1)
        return y * self.number if uses or self.uses or len(x) == 2 else y


@pytest.mark.parametrize("by", ["an argument", "an attribute", "the number of rows"])
def test_what_one_graph_does_not_read_another_may_read(device: torch.device, by: str) -> None:
    model = piecewise(Sometimes(), device, capture_sizes=[2, 4], padding=False)

    def found(number: float, *, uses: bool) -> Tensor:
        sg.unwrap(model).uses = uses and by == "an attribute"
        x = rows(number, device)[: 2 if uses and by == "the number of rows" else 4]
        result = model(x, uses=True) if uses and by == "an argument" else model(x)
        assert torch.equal(result, (x + 1) * (number if uses else 1)), (number, uses)
        return result

    for call in range(40):
        found(1.0 + call % 2, uses=False)
    replays = model.graph_stats.replays
    for call in range(10):
        found(1.0 + call % 2, uses=False)
    assert model.graph_stats.replays == replays + 10, "this graph does not read it"
    replays = model.graph_stats.replays
    found(1.0, uses=False)
    for _ in range(8):
        found(1.0, uses=True)
    assert model.graph_stats.replays > replays
    for number in (2.0, 1.0, 2.0):
        found(number, uses=True)


class Inner(nn.Module):
    """Is a break as a whole, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.number, self.state, self.count, self.counts = 1.0, SimpleNamespace(number=1.0), 0, {"forward": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.counts["forward"] += 1
        if x[0, 0] > 1:
            self.number = self.state.number = 2.0
        return x.clone()


class Outer(nn.Module):
    """Reads the numbers of the child that is a break."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x + 1) * self.inner.number * self.inner.state.number


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("setter", ["the break", "other code"])
def test_numbers_of_a_module_that_is_a_break(device: torch.device, setter: str, verify: int) -> None:
    outer = Outer()
    assert sg.break_at(outer, "inner") == ["inner"]
    model = piecewise(outer, device, capture_sizes=[4], verify=verify)
    x = torch.zeros(4, 4, device=device)
    for _ in range(40):
        assert torch.equal(model(x), x + 1)
    assert model.graph_stats.replays >= 20, "its own counts end no graph"
    if setter == "the break":
        x = x + 1
    else:
        outer.inner.number = outer.inner.state.number = 2.0
    for call in range(8):
        assert torch.equal(model(x), (x + 1) * 4), call
    assert outer.inner.count == outer.inner.counts["forward"] == 48


class Listing(nn.Module):
    """Goes through a dict in one of these ways; its break alone names a key of it."""

    def __init__(self, way: str, *, by_variable: bool) -> None:
        super().__init__()
        self.way, self.factors, self.by_variable = way, {"one": 1.0}, by_variable

    @sg.eager_break
    def look(self, x: Tensor) -> Tensor:
        if float(x[0, 0]) > 0 and self.by_variable:
            for key in ("another", "last"):
                self.factors[key] = 3.0
        elif float(x[0, 0]) > 0:
            self.factors["other"] = 3.0
        return x.clone()

    def one_or(self, one: float, **others: float) -> float:
        return one + sum(others.values())

    def read(self) -> float:
        if self.way == "its values":
            return sum(self.factors.values())
        if self.way == "its length":
            return float(len(self.factors))
        if self.way == "its items":
            return max(number for _, number in self.factors.items())
        return self.one_or(**self.factors)

    def forward(self, x: Tensor) -> Tensor:
        return self.look(x + 1) * self.read()


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("by_variable", [False, True])
@pytest.mark.parametrize("way", ["its values", "its length", "its items", "as arguments"])
def test_a_key_that_only_a_break_names(device: torch.device, way: str, by_variable: bool, verify: int) -> None:
    model = piecewise(Listing(way, by_variable=by_variable), device, capture_sizes=[4], verify=verify)
    for _ in range(10):
        assert torch.equal(model(rows(1.0, device)), rows(1.0, device) + 1)
    assert model.graph_stats.replays
    for _ in range(8):
        x = rows(2.0, device)
        found = model(x)
        assert torch.equal(found, (x + 1) * sg.unwrap(model).read())
    assert len(sg.unwrap(model).factors) == 2 + by_variable


class Replacing(Several):
    """Has a break before others that replaces the `__dict__` or the class of an object, or a child."""

    class One:
        factor = 1.0

    class Two(One):
        factor = 2.0

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.state, self.child = way, Replacing.One(), nn.Identity()
        self.child.number = 1.0

    @sg.eager_break
    def second(self, x: Tensor) -> Tensor:
        Calls.breaks += 1
        if float(x[0, 0]) > 5 and self.way == "its __dict__":
            self.child.__dict__ = {**vars(self.child), "number": 2.0}
        elif float(x[0, 0]) > 5 and self.way == "its class":
            self.state.__class__ = Replacing.Two
        elif float(x[0, 0]) > 5:
            self.child = nn.Identity()
            self.child.number = 2.0
        return x * 2

    def read(self) -> float:
        return self.child.number * self.state.factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return self.third(y * self.read()) * self.read()


@pytest.mark.parametrize("way", ["its __dict__", "its class", "a child"])
def test_no_later_break_runs_on_what_was_replaced(device: torch.device, way: str) -> None:
    model = piecewise(Replacing(way), device, capture_sizes=[4], verify=1)
    x = torch.ones(4, 4, device=device)
    for _ in range(8):
        assert torch.equal(model(x), (x + 1) * 2 + 1)
    replays, calls = model.graph_stats.replays, Calls.breaks
    assert replays
    x = x * 9
    try:
        found = model(x)
    except BreakError:  # the earlier one is not known any more
        assert Calls.breaks == calls + 2, "the third break did not run"
    else:
        assert torch.equal(found, ((x + 1) * 2 * 2 + 1) * 2)
        assert Calls.breaks == calls + 3
    assert sg.unwrap(model).read() == 2.0


def sum_by_place(values: dict[Any, float]) -> float:
    return sum(value * place for place, value in enumerate(values.values(), 1))


# What a break does to a dict at some calls; the forward reads it before the break and after it, in its order.
CHANGED_KEYS: dict[str, Callable[[dict[Any, float]], object]] = {
    "the first is gone": lambda d: d.pop(1),
    "the last is gone": lambda d: d.pop("b"),
    "another one comes": lambda d: d.update(c=5.0),
    "one goes, another one comes": lambda d: (d.pop(1), d.update(c=5.0)),
    "another order": lambda d: d.update({1: d.pop(1)}),
    "other values in another order": lambda d: (d.clear(), d.update({"b": 7.0, 1: 3.0})),
}


@pytest.mark.parametrize("way", CHANGED_KEYS)
def test_keys_that_come_and_go_are_put_back_in_their_order(device: torch.device, way: str) -> None:
    class Keyed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.found: dict[Any, float] = {1: 1.0, "b": 2.0}

        @sg.eager_break
        def look(self, x: Tensor) -> Tensor:
            if float(x[0, 0]) > 0:
                CHANGED_KEYS[way](self.found)
            return x.clone()

        def forward(self, x: Tensor) -> Tensor:
            y = x * sum_by_place(self.found)
            return self.look(x + 1) * sum_by_place(self.found) + y

    model, eager = piecewise(Keyed(), device, capture_sizes=[4]), Keyed()
    for number in (*[1.0] * 12, 2.0):
        x = rows(number, device)
        assert torch.equal(model(x), eager(x))
    assert model.graph_stats.replays
    assert [*sg.unwrap(model).found.items()] == [*eager.found.items()]


def test_without_proofs_a_break_that_sets_what_is_read_makes_calls_run_eagerly(device: torch.device) -> None:
    """A call that draws random numbers could not be finished."""

    class Drawing(nn.Module):
        number = 1.0

        @sg.eager_break
        def look(self, x: Tensor) -> Tensor:
            self.number = 2.0 if float(x[0, 0]) > 0 else 1.0
            return x.clone()

        def forward(self, x: Tensor) -> Tensor:
            return self.look(x + torch.rand_like(x) * 0) * self.number

    model, eager = piecewise(Drawing(), device, capture_sizes=[4], verify=0), Drawing()
    for call in range(12):
        x = rows(1.0 + (call + 1) % 2, device)
        assert torch.equal(model(x), eager(x))
