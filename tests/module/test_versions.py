"""Versions of dicts say where to look: a steady call looks nowhere, and no change is missed, not even without them."""

from __future__ import annotations

import collections
import contextvars
import subprocess
import sys
import types
import weakref
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.guard import links, reading, value_check, versions
from tests.module.answers import close
from tests.module.stateful import captured, rows

pytestmark = pytest.mark.usefixtures("no_grad")

needs_versions = pytest.mark.skipif(versions.dict_version is None, reason="this torch has no versions of dicts")


@pytest.fixture
def looked_at(monkeypatch):
    """Collects the attributes that calls look at."""
    looked, hold = [], links.AttributeEntries.hold
    monkeypatch.setattr(links.AttributeEntries, "hold", lambda self, held: looked.append(held) or hold(self, held))
    return looked


def served(model, module, device):
    before = model.graph_stats.replays
    x = rows(4, device)
    close(model(x), module(x))
    return model.graph_stats.replays - before


@needs_versions
def test_a_steady_call_looks_at_no_attribute(device, looked_at):
    model, module = captured(device)
    served(model, module, device)
    looked_at.clear()
    assert all(served(model, module, device) for _ in range(5))
    assert looked_at == []


CONTAINERS = {
    "list": lambda: [1, "a", None],
    "set": lambda: {1, 2},
    "deque": lambda: collections.deque([1, 2], maxlen=3),
    "empty deque": collections.deque,
    "dict": lambda: {"a": [1, {"b": 2}]},
    "ordered dict": lambda: collections.OrderedDict(a=1, b=2),
    "tuple of lists": lambda: ([1], [2]),
    "user dict": lambda: collections.UserDict(a=1),
    "object": lambda: types.SimpleNamespace(a=1, b=[2]),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_a_steady_call_reads_no_value_again(device, monkeypatch, kind):
    model, module = captured(device)
    module.kept = CONTAINERS[kind]()
    while not served(model, module, device):
        pass
    read = []
    monkeypatch.setattr(value_check.ValueHolder, "read", lambda self, _: read.append(self.name))
    monkeypatch.setattr(value_check.ValueCheck, "moved", lambda self, _: read.append(self))
    assert all(served(model, module, device) for _ in range(3))
    assert read == []


# Changes that mean nothing to a graph.
MEANINGLESS = {
    "there and back": lambda m: (m.linear.train(), m.linear.eval()),
    "deleted and stored again": lambda m: setattr(m.linear, "in_features", vars(m.linear).pop("in_features")),
    "an entry of another name": lambda m: (setattr(m.linear, "note", 1), delattr(m.linear, "note")),
}


@needs_versions
@pytest.mark.parametrize("change", MEANINGLESS)
def test_a_change_that_means_nothing_costs_one_look_and_no_capture(device, looked_at, change):
    model, module = captured(device)
    served(model, module, device)
    looked_at.clear()
    MEANINGLESS[change](module)
    assert served(model, module, device)
    assert [held is vars(module.linear) for held in looked_at] == [True]
    assert all(served(model, module, device) for _ in range(3))
    assert len(looked_at) == 1
    assert model.graph_stats.recaptures == 0


@pytest.mark.parametrize("with_versions", [True, False])
def test_a_change_that_another_thread_makes_during_a_comparison_is_seen_by_the_next_call(
    device, monkeypatch, with_versions
):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)

    class Doubles(nn.Module):
        def forward(self, x):
            return x * 2 if self.training else x

    module = nn.Sequential(nn.Linear(6, 6, device=device), Doubles()).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    hold = links.AttributeEntries.hold

    def hold_and_write(entries, attributes):
        held = hold(entries, attributes)
        module[1].training = True  # which guards alone compare
        return held

    monkeypatch.setattr(links.AttributeEntries, "hold", hold_and_write)
    module[1].train()  # a reason to look
    module[1].eval()
    model(rows(4, device))
    monkeypatch.setattr(links.AttributeEntries, "hold", hold)
    for _ in range(4):
        x = rows(4, device)
        close(model(x), module(x))


def test_a_child_that_a_thread_adds_after_the_survey_reads_as_changed(device):
    """An error of the guards would be an error of the user's call."""
    module = nn.Sequential(nn.Linear(6, 6, device=device))
    surveyed = list(module.modules())
    module.append(nn.ReLU())
    assert not reading.Reading(surveyed, ()).holds(vars(module))
    assert reading.Reading(list(module.modules()), ()).holds(vars(module))


@pytest.mark.parametrize("with_versions", [True, False])
def test_an_equal_dict_in_place_of_an_objects_own_costs_no_capture(device, monkeypatch, with_versions):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    model, module = captured(device)
    for _ in range(4):
        module.linear.__dict__ = dict(vars(module.linear))
        assert served(model, module, device)
    assert model.graph_stats.recaptures == 0


class Attributes(dict):
    pass


@pytest.mark.parametrize("with_versions", [True, False])
def test_a_dict_of_a_class_of_its_own_is_watched_too(device, monkeypatch, with_versions):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    module = nn.Sequential(nn.Linear(6, 6, device=device), nn.LeakyReLU(0.5)).eval()
    module[1].__dict__ = Attributes(vars(module[1]))
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    for slope in (0.1, 0.9):
        module[1].__dict__["negative_slope"] = slope
        for _ in range(4):
            served(model, module, device)
    assert model.graph_stats.replays > 0


@needs_versions
def test_many_attributes_cost_a_steady_call_nothing(device, looked_at):
    module = nn.Linear(6, 6, device=device).eval()
    vars(module).update((f"note{at}", at) for at in range(100_000))
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    looked_at.clear()
    assert served(model, module, device)
    assert looked_at == []
    module.note5 = "another"
    for _ in range(4):
        served(model, module, device)
    looked_at.clear()
    assert served(model, module, device)
    assert looked_at == []
    module.weight = nn.Parameter(torch.randn(6, 6, device=device), requires_grad=False)
    for _ in range(4):
        served(model, module, device)
    assert model.graph_stats.recaptures == 1


@pytest.mark.parametrize("with_versions", [True, False])
def test_modules_that_share_one_dict_are_served(device, monkeypatch, with_versions):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    first, second = nn.LeakyReLU(0.5), nn.LeakyReLU(0.5)
    second.__dict__ = first.__dict__
    module = nn.Sequential(nn.Linear(6, 6, device=device), first, second).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(6):
        served(model, module, device)
    first.negative_slope = 0.1
    for _ in range(4):
        served(model, module, device)
    assert served(model, module, device)


class Scale(nn.Module):
    """Has no tensor by which guards would notice it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Named(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, device=device))
        self.second = nn.Parameter(torch.randn(6, device=device))
        self.one, self.two = Scale(2.0), Scale(3.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x * self.first) - self.two(x) * self.second.square()


def _other_attributes(module: nn.Module) -> None:
    module.one.__dict__ = dict(vars(module.one), factor=5.0)


def _other_class(module: nn.Module) -> None:
    class Other(Scale):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x - self.factor

    module.one.__class__ = Other


def _parameters_change_names(module: nn.Module) -> None:
    first, second = module.first, module.second
    del module.first, module.second
    module.second, module.first = first, second  # in the order in which they were


def _children_change_names(module: nn.Module) -> None:
    one, two = module.one, module.two
    del module.one, module.two
    module.two, module.one = one, two


_UNSEEN_BY_VALUES = (_other_attributes, _other_class, _parameters_change_names, _children_change_names)


@pytest.mark.parametrize("with_versions", [True, False])
@pytest.mark.parametrize("change", _UNSEEN_BY_VALUES, ids=lambda change: change.__name__[1:])
@pytest.mark.parametrize("way", ["wrapped", "a function", "in a list"])
def test_a_change_that_moves_no_tensor_is_noticed(device, monkeypatch, with_versions, change, way):
    if not with_versions:
        monkeypatch.setattr(versions, "dict_version", None)
    module = Named(device).eval()
    listed = [module]
    served = {
        "wrapped": lambda: sg.wrap(module, capture_sizes=[4], progress=False),
        "a function": lambda: sg.wrap(lambda x: module(x), capture_sizes=[4], progress=False),
        "in a list": lambda: sg.wrap(Listing(listed), capture_sizes=[4], progress=False),
    }[way]()
    for _ in range(6):
        x = rows(4, device)
        close(served(x), module(x))
    assert served.graph_stats.replays > 0
    change(module)
    for _ in range(6):
        x = rows(4, device)
        close(served(x), module.forward(x))
    before = served.graph_stats.replays
    served(rows(4, device))
    assert served.graph_stats.replays == before + 1


class Listing(nn.Module):
    """Holds modules that are no children of it."""

    def __init__(self, modules: list[nn.Module]) -> None:
        super().__init__()
        self.listed = modules
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.listed:
            x = module(x)
        return x


@pytest.mark.skipif(versions.clock is None, reason="before Python 3.12 there is no clock of versions")
def test_a_steady_call_asks_the_clock_instead_of_each_dict(device, monkeypatch):
    model, module = captured(device)
    model_of_others, others = captured(device)
    for one, two in ((model, module), (model_of_others, others)) * 2:
        served(one, two, device)
    taken, take = [], versions.dict_version

    def version(taken_of):
        taken.extend([taken_of] * bool(taken_of))  # an empty one reads the clock
        return take(taken_of)

    monkeypatch.setattr(versions, "dict_version", version)
    both = ((model, module), (model_of_others, others))
    counts = []
    for one, two in both * 3:
        taken.clear()
        assert served(one, two, device)
        counts.append(len(taken))
    assert len(set(counts)) == 1, "the other model's clock disturbs none"
    MEANINGLESS["there and back"](others)  # of one model, and every model looks once
    for one, two in both * 3:
        taken.clear()
        assert served(one, two, device)
        counts.append(len(taken))
    assert min(counts[6:8]) > 2 * counts[0]
    assert counts[-2:] == counts[:2]
    module.linear.forward = module.linear.forward
    x = rows(4, device)
    close(model(x), module(x))


class Slotted:
    __slots__ = ("scale", "shift")

    def __init__(self, scale: float, shift: float) -> None:
        self.scale, self.shift = scale, shift


LEVEL: contextvars.ContextVar[float] = contextvars.ContextVar("LEVEL", default=1.0)
STAGES = collections.OrderedDict(double=lambda x: x * 2, more=lambda x: x + 1)  # not kept: it holds functions


class InPlaces(nn.Module):
    """Reads what has no version: slots, a context variable and an order."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Slotted(2.0, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.config.scale + self.config.shift + LEVEL.get()
        for stage in STAGES.values():
            x = stage(x)
        return x


def swap(config: Slotted) -> None:
    config.scale, config.shift = config.shift, config.scale


CHANGES_OF_PLACES = {
    "a slot": lambda module: setattr(module.config, "scale", 3.0),
    "slots that are swapped": lambda module: swap(module.config),
    "a slot that becomes an equal number of another type": lambda module: setattr(module.config, "scale", 2),
    "another object": lambda module: setattr(module, "config", Slotted(4.0, 0.5)),
    "a context variable": lambda _: LEVEL.set(5.0),
    "an order": lambda _: STAGES.move_to_end(next(iter(STAGES))),
}


@pytest.fixture
def places():
    token, order = LEVEL.set(1.0), list(STAGES)
    yield InPlaces().eval()
    LEVEL.reset(token)
    for name in order:
        STAGES.move_to_end(name)


def assert_noticed(module, change, device):
    """Replay, change the module, and compare with eager until it replays again."""
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for happens in (lambda _: None, change):
        happens(module)
        for _ in range(5):
            served(model, module, device)
        assert served(model, module, device)


@pytest.mark.parametrize("change", CHANGES_OF_PLACES)
def test_changes_of_what_has_no_version_are_noticed(device, places, change):
    assert_noticed(places, CHANGES_OF_PLACES[change], device)


TABLE: contextvars.ContextVar[dict[str, Any]] = contextvars.ContextVar("TABLE")


class Tables(nn.Module):
    """Reads dicts that are held by no dict."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.config, self.paired, cell = [], Slotted(0.0, 0.5), [()], None

        def in_cell(*table):
            nonlocal cell
            cell = table[0] if table else cell
            return cell

        self.in_cell = in_cell
        for place in PLACES.values():
            place(self, {"stage": lambda x: x + 1})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tables = self.listed[0], self.config.scale, self.paired[0][0], TABLE.get(), self.in_cell()
        for table in tables:
            x = table["stage"](x)
        return x


PLACES = {
    "a list": lambda module, table: module.listed.__setitem__(slice(None), [table]),
    "a slot": lambda module, table: setattr(module.config, "scale", table),
    "a tuple in a list": lambda module, table: module.paired.__setitem__(0, (table,)),
    "a context variable": lambda module, table: TABLE.set(table),
    "a cell": lambda module, table: module.in_cell(table),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_dict_that_takes_the_place_and_the_id_of_another_is_noticed(device, place):
    """The end of a dict changes no version."""
    module, put = Tables().eval(), PLACES[place]
    put(module, old := {"stage": lambda x: x + 1})
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(5):
        served(model, module, device)
    assert served(model, module, device)
    old_id, others, new = id(old), [], None
    put(module, old := None)
    while id(new) != old_id:
        others.append(new)
        new = {"stage": lambda x: x * 3}
    put(module, new)
    for _ in range(5):
        served(model, module, device)
    assert served(model, module, device)


class Failure(ImportError):
    """Has members of C, of which the garbage collector sees no number and no empty one."""


def cell_of(value: float) -> Any:
    """Return a function that returns its cell's value, or sets another one; None empties the cell."""

    def read(*given):
        nonlocal value
        if given:
            value = given[0]
            if value is None:
                del value
            return None
        try:
            return value
        except NameError:
            return 0.0

    return read


class ReadsEmpty(nn.Module):
    """Reads what may be empty."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.failure = Slotted(2.0, 0.5), Failure(False, name=3.0)
        self.first, self.second = cell_of(4.0), cell_of(5.0)
        self.second(None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first() + 10 * self.second() + getattr(self.config, "scale", 7.0)
        x = x - 3 * (self.failure.name or 0) - 2 * (self.failure.path or 0)
        return -x if self.failure.__suppress_context__ else x


def _into_cell(module: ReadsEmpty) -> None:
    scale = module.config.scale
    del module.config.scale
    module.second(scale)


def _into_other_cell(module: ReadsEmpty) -> None:
    module.second(module.first())
    module.first(None)


def _into_member(module: ReadsEmpty) -> None:
    module.failure.path = module.failure.name
    del module.failure.name


MOVES = {
    "a cell to an empty cell": _into_other_cell,
    "a slot to an empty cell": _into_cell,
    "a member to an empty member": _into_member,
    "a number that the garbage collector does not see": lambda module: setattr(
        module.failure, "__suppress_context__", True
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_value_that_moves_to_an_empty_place_is_noticed(device, move):
    assert_noticed(ReadsEmpty().eval(), MOVES[move], device)


class Factor(property):
    """Has state of its own, beside that of a property."""

    def __get__(self, owner: Any, kind: type | None = None) -> float:
        return self.by


Item = TypeVar("Item")


class Scaled(Generic[Item]):
    by = 2.0

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x * Scaled.by


ALIAS, C_ALIAS = Scaled[int], types.GenericAlias(Scaled, int)


class Indirect(nn.Module):
    factor = Factor()

    def __init__(self, alias: Any) -> None:
        super().__init__()
        self.alias = alias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.alias(ALIAS(C_ALIAS(x).x).x).x * self.factor


@pytest.mark.parametrize("alias", [ALIAS, C_ALIAS], ids=["of typing", "of C"])
@pytest.mark.parametrize("changed", [vars(Indirect)["factor"], Scaled], ids=["a property", "a class of items"])
def test_what_properties_and_classes_of_items_lead_to_is_compared(device, changed, alias):
    vars(Indirect)["factor"].by, Scaled.by = 2.0, 2.0
    module = Indirect(alias).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(5):
        served(model, module, device)
    assert served(model, module, device)
    changed.by = 3.0
    for _ in range(5):
        served(model, module, device)
    assert served(model, module, device)


def test_a_reading_keeps_no_container_once_a_submodule_is_gone(device):
    class Held(list):
        pass

    module = nn.Sequential(nn.Linear(6, 6, device=device))
    module.held = held = Held([None])
    kept = weakref.ref(held)
    check = types.SimpleNamespace(token=object(), moment=None, checks=lambda *_: False, checks_versions=lambda _: False)
    read = reading.Reading(list(module.modules()), [((held, 0, None),)])
    assert read.holds(vars(module), check)
    del module.held, held, module[0]
    assert kept() is None


@needs_versions
def test_what_was_read_before_a_moment_is_not_noted_for_it(device):
    """A graph is launched between the reading of tensors and the comparison; a thread may set a buffer meanwhile."""
    module = nn.Sequential(nn.Linear(6, 6, device=device)).eval()
    module[0].register_buffer("extra", None)
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    for _ in range(5):
        served(model, module, device)
    check = model._graph_runner._calls.plain.present.check
    reading, attributes = model._graph_runner.builder.state.reading, vars(model)
    for _ in range(2):
        assert check.holds(attributes)
        assert reading.holds(attributes, check, reading.read_if_in_place(attributes))
    read = reading.read_if_in_place(attributes)
    model[0].extra = torch.ones(6, device=device)
    assert check.holds(attributes)
    reading.holds(attributes, check, read)  # of either outcome, since the call was under way
    assert check.holds(attributes)
    assert not reading.holds(attributes, check, reading.read_if_in_place(attributes))


@pytest.mark.skipif(versions.clock is None, reason="before Python 3.12 there is no clock of versions")
def test_a_steady_call_reads_no_place_by_itself(device, places, monkeypatch):
    model = sg.wrap(places, capture_sizes=[4], progress=False)
    for _ in range(5):
        served(model, places, device)
    read, original = [], value_check.ValueHolder.read_state
    reading = lambda self: read.append(self.name) or original(self)  # noqa: E731
    monkeypatch.setattr(value_check.ValueHolder, "read_state", reading)
    assert all(served(model, places, device) for _ in range(3))
    assert read == []


@needs_versions
def test_a_steady_call_reads_no_slot_that_a_comparison_covers(device, monkeypatch):
    module = nn.Sequential(nn.Linear(8, 8)).eval().requires_grad_(False)
    module.config = types.SimpleNamespace(names=["a", "b"], inner={"c": [1, 2]}, empty={}, nothing=None)
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    read, original = [], links.SlotValues.containers_if_same
    reading = lambda self, attributes: read.append(self) or original(self, attributes)  # noqa: E731
    monkeypatch.setattr(links.SlotValues, "containers_if_same", reading)
    for _ in range(5):
        model(torch.randn(4, 8))
    assert read != []
    read.clear()
    for _ in range(3):
        model(torch.randn(4, 8))
    assert read == []
    module.config.nothing = torch.ones(8)  # no graph reads it, but the next one might
    for _ in range(5):
        model(torch.randn(4, 8))
    assert read != []


@needs_versions
def test_what_a_function_reaches_is_read_at_once(device, monkeypatch):
    """No comparison covers these slots, and a step of training reaches hundreds of functions."""
    layer, config = nn.Linear(8, 8, device=device), types.SimpleNamespace(names=["a"], inner={"c": [1]}, nothing=None)

    def inner(x):
        return x if config.nothing is None else x * config.nothing

    def function(x):
        return inner(layer(x)) * len(config.names) + config.inner["c"][0]

    model = sg.wrap(function, capture_sizes=[4], progress=False)
    for _ in range(5):
        model(torch.randn(4, 8, device=device))
    read, original = [], links.SlotValues.containers_if_same
    reading = lambda self, attributes: read.append(self) or original(self, attributes)  # noqa: E731
    monkeypatch.setattr(links.SlotValues, "containers_if_same", reading)
    model(torch.randn(4, 8, device=device))
    assert len(read) <= 2
    layer.note = [None]  # another slot of no comparison's
    config.inner["c"][0] = 5
    for _ in range(5):
        x = torch.randn(4, 8, device=device)
        close(model(x), function(x))


LOOP = """
import sys, torch, simplegraph as sg
from simplegraph.guard import value_check

class Scaled(torch.nn.Module):
    def forward(self, x):
        return x * SCALE + len(sys.path) * 0

SCALE, looked = 2.0, []
moved, torch.backends.mkldnn.enabled = value_check.ValueCheck.moved, False
value_check.ValueCheck.moved = lambda self, attributes: looked.append(1) or moved(self, attributes)
model = sg.wrap(Scaled().eval(), capture_sizes=[2], progress=False)
for number in range(12):
    y = model(torch.ones(2, 4))
    assert y.eq(SCALE).all(), (number, y)
    if number == 5:
        looked.clear()
    if number == 8:
        assert not looked, looked
        SCALE = 3.0
assert model.graph_stats.replays >= 5, model.graph_report()
"""


def test_a_loop_at_the_top_of_a_script_sets_globals_and_costs_no_look(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LOOP)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
