"""Plain values that a call reads through Python are a part of its key: never stale, and going back costs nothing."""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.base.reasons import CannotBind
from simplegraph.guard import holders, plain_state, value_check, values
from simplegraph.guard import versions as versions_of_dicts
from simplegraph.guard.plain_state import PlainState

SCALE = 2.0
TABLE = {"scale": 2.0}


def wrapped(model: nn.Module, **settings: Any) -> Any:
    return sg.wrap(model.eval(), capture_sizes=[2], progress=False, **settings)


def serve(model: Any, times: int = 5) -> None:
    """Call a model, compare with eager, and require that graphs serve at the end."""
    replays = model.graph_stats.replays
    for _ in range(times):
        x = torch.randn(2, 4)
        assert torch.equal(model(x), sg.unwrap(model)(x)), model.graph_report()
    assert model.graph_stats.replays > replays, model.graph_report()


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.inference_mode():
        yield


def scaling() -> Any:
    return scaling.scale  # type: ignore[attr-defined]


class Kind(enum.Enum):
    SMALL = 1
    LARGE = 3


@dataclasses.dataclass
class Config:
    scale: float = 2.0

    def read(self) -> float:
        return self.scale

    def double(self) -> float:
        return self.scale * 2


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Items(list[float]):
    scale = 2.0


class Notes(dict[str, float]):
    scale = 2.0


class DotDict(dict[str, Any]):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


class Helper:
    """Holds the module that holds it."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner, self.scale = owner, 2.0


class Reads(nn.Module):
    """Multiplies by what `read` finds."""

    factor = 2.0

    def __init__(self, read: Callable[[Reads], Any], **held: Any) -> None:
        super().__init__()
        self.read = read
        self.layer = nn.Linear(4, 4)
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * float(self.read(self))


def helper(model: Any) -> None:
    model.helper = Helper(model)


def setting(path: str, value: Any) -> Callable[[Any], None]:
    *ways, last = path.split(".")

    def change(model: Any) -> None:
        for way in ways:
            model = getattr(model, way)
        setattr(model, last, value)

    return change


VALUES = {
    "a number": (2.0, 3.0, float),
    "a flag": (True, False, float),
    "a sign of zero": (0.0, -0.0, lambda value: torch.tensor(value).signbit()),
    "a text": ("a", "bcd", len),
    "a number for another class": (1, True, lambda value: type(value) is bool),
    "none": (None, 3.0, lambda value: value or 1.0),
    "an enum": (Kind.SMALL, Kind.LARGE, lambda value: value.value),
    "a dtype": (torch.float32, torch.float64, lambda value: torch.finfo(value).bits),
    "a scalar of NumPy": (np.float32(2), np.float32(3), float),
    "a small array": (np.ones(2), np.full(2, 3.0), lambda value: value.sum()),
    "a decimal": (decimal.Decimal("2"), decimal.Decimal("3"), float),
    "a day": (datetime.date(2020, 1, 2), datetime.date(2020, 1, 3), lambda value: value.day),
    "a range": (range(0, 3, 2), range(0, 4, 2), lambda value: value.stop),
    "a very long number": (10**5000, 10**5000 + 1, lambda value: value % 7),
    "a tuple": ((1, 2), (1, 3), sum),
    "a list": ([1, 2], [1, 3], sum),
    "a set": ({1, 2}, {1, 3}, sum),
    "a dict": ({"a": 1}, {"a": 2}, lambda value: value.get("a", 1)),
    "a key": ({"a": 1}, {"b": 1}, lambda value: "b" in value),
    "an order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}, lambda value: next(iter(value.values()))),
    "a deque": (collections.deque([1]), collections.deque([2]), sum),
    "a dataclass": (Config(2.0), Config(3.0), lambda value: value.scale),
    "slots": (Slotted(2.0), Slotted(3.0), lambda value: value.scale),
    "a dict with attributes": (DotDict(scale=2), DotDict(scale=3), lambda value: value.scale),
    "a dict behind a class": (collections.UserDict(scale=2), collections.UserDict(scale=3), lambda v: v["scale"]),
    "a namespace": (types.SimpleNamespace(scale=2), types.SimpleNamespace(scale=3), lambda value: value.scale),
    "arguments of a program": (argparse.Namespace(scale=2), argparse.Namespace(scale=3), lambda value: value.scale),
    "a deep value": ({"a": [{"b": (1, 2)}]}, {"a": [{"b": (1, 3)}]}, lambda value: value["a"][0]["b"][1]),
}


@pytest.fixture(params=[True, False], ids=["versions", "no versions"])
def versions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(versions_of_dicts, "dict_version", None)


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_that_is_replaced_gets_a_graph_of_its_own_and_going_back_costs_nothing(name: str) -> None:
    first, second, read = VALUES[name]
    model = wrapped(Reads(lambda self: read(self.value), value=first))
    serve(model)
    model.value = second
    serve(model)
    captures, eager = model.graph_stats.captures, dict(model.graph_stats.eager)
    for value in (first, second, first):
        model.value = value
        for _ in range(2):
            x = torch.randn(2, 4)
            assert torch.equal(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.captures == captures == 2
    assert {reason: count for reason, count in model.graph_stats.eager.items() if reason != "proof"} == {
        reason: count for reason, count in eager.items() if reason != "proof"
    }


IN_PLACE: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "an item": ({"a": 2.0}, lambda held: held.update(a=3.0), lambda held: held["a"]),
    "an added item": ({}, lambda held: held.update(a=3.0), lambda held: held.get("a", 1.0)),
    "a deleted item": ({"a": 3.0}, lambda held: held.clear(), lambda held: held.get("a", 1.0)),
    "an item of a list": ([2.0], lambda held: held.__setitem__(0, 3.0), lambda held: held[0]),
    "an appended item": ([2.0], lambda held: held.append(3.0), sum),
    "an item of a set": ({2.0}, lambda held: held.add(3.0), sum),
    "an item of a deque": (collections.deque([2.0]), lambda held: held.append(3.0), sum),
    "an attribute": (Config(), lambda held: setattr(held, "scale", 3.0), lambda held: held.scale),
    "the dict of an object": (
        Config(),
        lambda held: setattr(held, "__dict__", {"scale": 3.0}),
        lambda held: held.scale,
    ),
    "what a method is bound to": (
        Config().read,
        lambda held: setattr(held.__self__, "scale", 3.0),
        lambda held: held(),
    ),
    "what a method in a list is bound to": (
        [Config().read],
        lambda held: setattr(held[0].__self__, "scale", 3.0),
        lambda held: held[0](),
    ),
    "an attribute of a list of a class": (
        Items([1.0]),
        lambda held: setattr(held, "scale", 3.0),
        lambda held: held.scale,
    ),
    "an attribute of a dict of a class": (
        Notes(a=1.0),
        lambda held: setattr(held, "scale", 3.0),
        lambda held: held.scale,
    ),
    "a slot": (Slotted(2.0), lambda held: setattr(held, "scale", 3.0), lambda held: held.scale),
    "an element of an array": (np.ones(2), lambda held: held.__setitem__(0, 3.0), lambda held: held[0]),
    "statistics of observations": (np.ones(512), lambda held: held.__setitem__(3, 7.0), lambda held: float(held[3])),
    "statistics that become a tensor": (
        np.ones(17, dtype=np.float32),
        lambda held: np.add(held, 1, out=held),
        lambda held: torch.as_tensor(held)[3],
    ),
    "beside a tensor": (
        {"a": 2.0, "t": torch.ones(1)},
        lambda held: held.update(a=3.0),
        lambda held: held["a"],
    ),
    "a list beside a tensor": (
        [torch.ones(1), 2.0],
        lambda held: held.__setitem__(1, 3.0),
        lambda held: held[1],
    ),
    "deep": ({"a": [{"b": [2.0]}]}, lambda held: held["a"][0]["b"].append(3.0), lambda held: sum(held["a"][0]["b"])),
    "a long list": ([0] * 1000, lambda held: held.append(3.0), lambda held: held[-1] + 1),
    "a long dict": (dict.fromkeys(range(1000), 1.0), lambda held: held.update({5: 3.0}), lambda held: held[5]),
}


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_value_that_is_changed_in_place_is_noticed(name: str) -> None:
    held, change, read = IN_PLACE[name]
    if name == "a long dict" and versions_of_dicts.dict_version is None:
        pytest.skip("without versions only its length counts")
    model = wrapped(Reads(lambda self: read(self.held), held=copy.deepcopy(held)))
    serve(model)
    change(model.held)
    serve(model)
    assert model.graph_stats.captures == 2


PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "of a submodule": (
        lambda model: setattr(model.layer, "scale", 2.0),
        lambda model: setattr(model.layer, "scale", 3.0),
        lambda model: model.layer.scale,
    ),
    "that appears": (
        lambda model: None,
        lambda model: setattr(model, "late", 3.0),
        lambda model: getattr(model, "late", 1.0),
    ),
    "that is deleted": (
        lambda model: setattr(model, "late", 3.0),
        lambda model: delattr(model, "late"),
        lambda model: getattr(model, "late", 1.0),
    ),
    "by a computed name": (
        lambda model: setattr(model, "scale_3", 2.0),
        lambda model: setattr(model, "scale_3", 3.0),
        lambda model: getattr(model, f"scale_{3}"),
    ),
    "behind its dict": (
        lambda model: setattr(model, "scale", 2.0),
        lambda model: model.__dict__.update(scale=3.0),
        lambda model: model.scale,
    ),
    "of what leads back": (
        helper,
        lambda model: setattr(model.helper, "scale", 3.0),
        lambda model: model.helper.scale,
    ),
    "of a class": (
        lambda model: setattr(Reads, "factor", 2.0),
        lambda model: setattr(Reads, "factor", 3.0),
        lambda model: model.factor,
    ),
    "that becomes a tensor": (
        lambda model: setattr(model, "scale", 2.0),
        lambda model: setattr(model, "scale", torch.tensor(3.0)),
        lambda model: model.scale,
    ),
    "that was a tensor": (
        lambda model: setattr(model, "scale", torch.tensor(3.0)),
        lambda model: setattr(model, "scale", 2.0),
        lambda model: model.scale,
    ),
    "of a function": (
        lambda model: setattr(scaling, "scale", 2.0),
        lambda model: setattr(scaling, "scale", 3.0),
        lambda model: scaling(),
    ),
    "global": (
        lambda model: globals().update(SCALE=2.0),
        lambda model: globals().update(SCALE=3.0),
        lambda model: SCALE,
    ),
    "of a global dict": (
        lambda model: TABLE.update(scale=2.0),
        lambda model: TABLE.update(scale=3.0),
        lambda model: TABLE["".join(("sca", "le"))],
    ),
}


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("name", PLACES)
def test_a_value_is_noticed_wherever_it_lies(name: str) -> None:
    prepare, change, read = PLACES[name]
    model = Reads(lambda self: 1.0 if name == "that becomes a tensor" else read(self))
    if "tensor" in name:
        model = Reads(lambda self: 2.0)
        model.read = Reading(read)
    prepare(model)
    model = wrapped(model)
    serve(model)
    change(sg.unwrap(model))
    serve(model)
    prepare(sg.unwrap(model))
    serve(model)


class Reading:
    """Reads a number, or the shape of a tensor, which no graph reads back."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read

    def __call__(self, model: Any) -> float:
        found = self.read(model)
        return 7.0 if isinstance(found, Tensor) else found


def test_a_value_that_is_new_in_every_call_is_not_remembered_for_ever() -> None:
    model = Reads(lambda self: self.value, value=0.0)
    state = PlainState(breaks=True)
    for step in range(600):
        model.value = float(step)
        with contextlib.suppress(CannotBind):
            state.read_values(model)
    assert max(map(len, state._history.new_values._seen.values())) <= 256


class Settings:
    class Inner:
        scale = 2.0

    scale = 2.0


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("holder", [Settings, Settings.Inner], ids=["a class", "a class inside of it"])
def test_an_attribute_of_a_class_that_an_attribute_holds_is_noticed(holder: Any) -> None:
    read = {Settings: lambda self: self.settings.scale, Settings.Inner: lambda self: self.settings.Inner.scale}
    model = wrapped(Reads(read[holder], settings=Settings))
    for scale in (2.0, 3.0, 2.0):
        holder.scale = scale
        serve(model)
    assert model.graph_stats.captures == 2


@pytest.mark.usefixtures("versions")
def test_a_function_in_place_of_one_that_is_gone_is_another() -> None:
    """Python gives the second the address of the first."""
    model = wrapped(Reads(lambda self: self.steps[0](), steps=[lambda: 2.0]))
    serve(model)
    model.steps.clear()
    model.steps.append(lambda: 3.0)
    serve(model)
    assert model.graph_stats.captures == 2


@pytest.mark.usefixtures("versions")
def test_another_method_of_the_same_object_is_another_value() -> None:
    config = Config()
    model = wrapped(Reads(lambda self: self.step(), step=config.read))
    serve(model)
    model.step = config.double
    serve(model)
    assert model.graph_stats.captures == 2


class Stream:
    """As torch's own streams, whose weak references outlive them: none may be made."""


def test_no_weak_reference_is_made_of_what_does_not_bear_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = values.can_be_referenced
    for place in (values, value_check, holders):
        monkeypatch.setattr(place, "can_be_referenced", lambda kind: kind is not Stream and real(kind))
    streams = [Stream() for _ in range(7)]
    in_closure = streams[6]

    def read(module: Any) -> float:
        assert in_closure is not None
        return 2.0

    model = wrapped(Reads(read))
    held = sg.unwrap(model)
    held.stream, held.items, held.table = streams[0], [streams[1]], {"stream": streams[2], streams[3]: 1}
    held.some, held.slotted = {streams[4]}, Slotted(2.0)
    held.slotted.scale = streams[5]
    serve(model)
    assert [weakref.getweakrefcount(stream) for stream in streams] == [0] * 7


def test_the_end_of_an_object_ends_the_check_of_its_values() -> None:
    """Another object may get its id, and would count as the one that was read."""
    model = wrapped(Reads(lambda module: module.held.scale, held=Config()))
    model(torch.randn(2, 4))  # no graph keeps the object alive
    present = model._graph_runner._calls.plain.present
    check = present.check
    assert check is not None
    sg.unwrap(model).held = Config()
    assert present.check is None
    present.keep(check)  # as by a thread that was making it
    assert present.check is None
    serve(model)
    assert present.check is not None


def test_what_changes_while_it_is_looked_at_makes_a_call_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wrapped(Reads(lambda module: module.held, held=2.0))
    serve(model)
    real = value_check.ValueHolder.read

    def troubled(holder: Any, opened: Any) -> Any:
        raise RuntimeError("dictionary changed size during iteration")

    monkeypatch.setattr(value_check.ValueHolder, "read", troubled)
    sg.unwrap(model).held = 3.0
    x, replays = torch.randn(2, 4), model.graph_stats.replays
    assert torch.equal(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == replays
    assert "what the call reads changes while it is read" in str(model.graph_report())
    monkeypatch.setattr(value_check.ValueHolder, "read", real)
    serve(model)


BUFFERS: dict[str, Callable[[], Any]] = {
    "a list": list,
    "a deque whose first item goes": lambda: collections.deque(maxlen=8),
}


@pytest.mark.usefixtures("versions")
@pytest.mark.parametrize("named", [False, True], ids=["that no code names", "that code names"])
@pytest.mark.parametrize("kind", BUFFERS)
def test_what_is_appended_in_each_call_is_not_searched(kind: str, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a buffer of replays, or a queue; a search takes as long as there are objects."""
    searches = 0

    class Counted(holders.Holders):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal searches
            searches += 1
            super().__init__(*args, **kwargs)

    monkeypatch.setattr(plain_state, "Holders", Counted)
    read = (lambda module: 2.0 * len(module.experience)) if named else (lambda module: 2.0)
    model = wrapped(Reads(read, experience=BUFFERS[kind]()))
    held = sg.unwrap(model)
    for step in range(12):
        held.experience.append(Config(float(-step)))
        x = torch.randn(2, 4)
        assert torch.equal(model(x), held(x)), step
    before, replays = searches, model.graph_stats.replays
    for step in range(40):
        held.experience.append([Config(float(step)), {"step": step}])
        x = torch.randn(2, 4)
        assert torch.equal(model(x), held(x)), step
    assert searches <= before + 1
    assert model.graph_stats.replays == replays + (0 if named else 40)


def test_another_item_of_a_set_at_the_address_of_one_that_is_gone_is_another() -> None:
    model = wrapped(Reads(lambda self: next(iter(self.held)), held={decimal.Decimal("2.5")}))
    serve(model)
    for number in range(3, 5):
        model.held.clear()
        model.held.add(decimal.Decimal(number))
        serve(model)


def test_a_list_that_gets_shorter_at_every_call_is_named_in_words() -> None:
    model = wrapped(Reads(lambda self: sum(self.held), held=[1.0] * 12))
    for _ in range(10):
        model.held.pop()
        model(torch.randn(2, 4))
    assert "held took 4 new values within 32 calls (nothing)" in str(model.graph_report())


def test_a_place_that_code_names_in_a_tuple_of_texts_is_never_let_go() -> None:
    model = wrapped(Reads(lambda self: [getattr(self, name) for name in ("factor", "held")][1], held=1.0))
    for number in range(12):
        model.held = float(number)
        x = torch.randn(2, 4)
        assert torch.equal(model(x), sg.unwrap(model)(x))


def test_a_set_that_others_changed_is_no_cache_that_a_call_fills() -> None:
    def read(self: Any) -> float:
        total = float(sum(self.held))
        self.held.add(len(self.held))
        return total

    model, expected = wrapped(Reads(read, held={1, 2})), Reads(read, held={1, 2}).eval()
    expected.load_state_dict(sg.unwrap(model).state_dict())
    for call in range(6):
        for each in (model, expected):
            if call == 2:
                each.held = {1, 3}
        x = torch.randn(2, 4)
        assert torch.equal(model(x), expected(x))
        assert model.held == expected.held


@pytest.mark.parametrize("held", [[], {}], ids=["list", "dict"])
def test_a_container_that_a_call_filled_and_others_emptied_counts(held: Any) -> None:
    def read(self: Any) -> float:
        if self.fills:
            held.extend([2.0]) if type(held) is list else held.update({7: 2.0})
        return float(sum(held if type(held) is list else held.values()))

    model = wrapped(Reads(read, fills=True, held=held))
    model(torch.randn(2, 4))
    model.fills = False
    serve(model)
    model.held.clear()
    serve(model)


class Remembers(nn.Module):
    """Adds to a list when it is trained."""

    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.seen, self.read = nn.Linear(4, 4), list[float](), read

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen.append(1.0)
        return self.linear(x) * self.read(self)


@pytest.mark.parametrize(
    ("read", "is_log"),
    [
        (lambda self: 1.0 + len(self.seen), False),
        (lambda self: 1.0 + sum(getattr(self, "seen")), False),  # noqa: B009
        (lambda self: 1.0 + sum(self.__dict__["seen"]), False),
        (lambda self: 2.0, True),
    ],
)
def test_a_list_that_some_calls_add_to_counts_if_code_reads_it(read: Any, is_log: bool) -> None:
    model = wrapped(Remembers(read))
    for phase in range(3):
        replays = model.graph_stats.replays
        serve(model)
        assert (model.graph_stats.replays == replays + 5) is (is_log and phase > 0)
        model.train()
        for _ in range(2):
            model(torch.randn(2, 4))
        model.eval()


def test_what_lies_in_a_container_that_calls_fill_counts() -> None:
    def read(self: Any) -> float:
        if 2 not in self.held:
            self.held[2] = {"factor": 2.0}
        return float(self.held[2]["factor"])

    model = wrapped(Reads(read, held={}))
    for call in range(14):
        if call == 7:
            model.held[2]["factor"] = 5.0
        x = torch.randn(2, 4)
        assert torch.equal(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays >= 6


def test_a_count_that_a_submodule_keeps_for_others_makes_no_call_eager() -> None:
    """Running statistics: code names the submodule, and not its count."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.statistics = Reads(lambda self: 1.0, count=0.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.statistics(x) - [1, 2].count(1)

    model: Any = wrapped(Normalised())
    for _ in range(14):
        model.statistics.count += 4.0
        x = torch.randn(2, 4)
        assert torch.equal(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays >= 8


class Trainer:
    """Logs beside what its method reads."""

    def __init__(self) -> None:
        self.log: list[float] = []
        self.scales = [1.0]

    def scaled(self, x: Tensor) -> Tensor:
        return x.abs().log() * self.scales[0]


@pytest.mark.parametrize(("fills", "served"), [("log", True), ("scales", False)])
def test_a_list_beside_what_a_method_reads_makes_no_call_eager(fills: str, served: bool) -> None:
    trainer = Trainer()
    method: Any = sg.wrap(trainer.scaled, exact_shapes=True)
    for number in range(14):
        getattr(trainer, fills).insert(0, float(number))
        x = torch.rand(2, 4) + 1
        assert torch.equal(method(x), trainer.scaled(x))
    assert (method.graph_stats.replays >= 8) is served


def test_what_a_closure_reads_counts_whatever_its_name() -> None:
    log, count = [1.0], 0

    def scaled(x: Tensor) -> Tensor:
        return x * log[0] + count

    method: Any = sg.wrap(scaled, exact_shapes=True)
    for number in range(14):
        log[0], count = (float(number), count) if number % 2 else (log[0], number)
        x = torch.randn(2, 4)
        assert torch.equal(method(x), scaled(x))
