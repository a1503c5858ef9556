"""Plain functions, methods and other callables have graphs as modules do; what they reach is found and watched."""

from __future__ import annotations

import functools
import operator
import re
import types
from typing import NamedTuple

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.base.reasons import Reason

pytestmark = pytest.mark.usefixtures("no_grad")

BUFFER = torch.ones(2)
SCALE = 2.0


def reads_globals(x):
    return x * SCALE + BUFFER


def answers(wrapped, function, *, rows=4, calls=5):
    """Call both on new inputs; return how many calls were replays."""
    before = wrapped.graph_stats.replays
    for _ in range(calls):
        x = torch.randn(rows, 2)
        assert torch.equal(wrapped(x), function(x))
    return wrapped.graph_stats.replays - before


class Agent:
    def __init__(self):
        self.model = nn.Linear(2, 2)
        self.offset = torch.ones(2)
        self.factor = 0.5
        self.parts = {"head": [nn.Linear(2, 2)]}

    def act(self, x):
        return self.finish(self.model(x)) + self.offset

    def finish(self, x):
        return self.parts["head"][0](x) * self.factor


def test_a_function_replays_and_answers_as_it_would():
    model = nn.Linear(2, 2)

    def forward(x, power=2):
        """Square."""
        return model(x) ** power

    wrapped = sg.wrap(forward)
    assert answers(wrapped, forward) == 4
    assert wrapped.__doc__ == "Square."
    assert "forward" in str(wrapped.graph_report())
    assert torch.equal(wrapped(torch.ones(4, 2), power=3), forward(torch.ones(4, 2), 3))


@pytest.mark.proofs
def test_the_first_replay_of_a_function_is_proven():
    wrapped = sg.wrap(reads_globals)
    answers(wrapped, reads_globals)
    assert [graph.proof for graph in wrapped.graph_stats.graphs.values()] == ["exact"]


def test_batches_are_padded_as_a_modules_are():
    wrapped = sg.wrap(reads_globals, capture_sizes=[8])
    wrapped.capture_graphs(torch.randn(8, 2))
    assert answers(wrapped, reads_globals, rows=5) == 5


@pytest.mark.parametrize(
    "change",
    [
        lambda agent: setattr(agent, "model", nn.Linear(2, 2)),
        lambda agent: setattr(agent, "offset", torch.zeros(2)),
        lambda agent: setattr(agent, "factor", 3.0),
        lambda agent: agent.model.load_state_dict(nn.Linear(2, 2).state_dict(), assign=True),
        lambda agent: agent.parts.update(head=[nn.Linear(2, 2)]),
        lambda agent: agent.parts["head"].__setitem__(0, nn.Linear(2, 2)),
        lambda agent: setattr(agent, "finish", lambda x: x * 7),
        lambda agent: agent.model.weight.data.mul_(2),
        lambda agent: setattr(agent.model.weight, "data", torch.zeros(2, 2)),
    ],
)
def test_whatever_a_method_reads_of_its_object_is_never_stale(change):
    agent = Agent()
    wrapped = sg.wrap(agent.act)
    assert answers(wrapped, agent.act) == 4
    change(agent)
    assert answers(wrapped, agent.act) >= 3


def test_globals_that_are_bound_to_something_else_are_never_stale(monkeypatch):
    wrapped = sg.wrap(reads_globals)
    assert answers(wrapped, reads_globals) == 4
    monkeypatch.setitem(globals(), "BUFFER", torch.zeros(2))
    assert answers(wrapped, reads_globals) >= 3
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert answers(wrapped, reads_globals) >= 3
    assert wrapped.graph_stats.captures == 3


def test_a_closure_that_is_bound_to_something_else_is_never_stale():
    model, factor = nn.Linear(2, 2), 1

    def forward(x):
        return inner(x) * factor

    def inner(x):
        return model(x)

    wrapped = sg.wrap(forward)
    assert answers(wrapped, forward) == 4
    model = nn.Linear(2, 2)
    assert answers(wrapped, forward) >= 3
    factor = 4
    assert answers(wrapped, forward) >= 3


def test_partials_defaults_decorated_functions_and_callable_objects():
    model = nn.Linear(2, 2)

    @torch.no_grad()
    def decorated(x, by=model):
        return by(x)

    class Caller:
        def __call__(self, x):
            return model(x)

    for function in (functools.partial(lambda held, x: held(x), model), decorated, Caller()):
        wrapped = sg.wrap(function)
        assert answers(wrapped, function) == 4
        model.weight.data = torch.randn(2, 2)
        assert answers(wrapped, function) >= 3


class Settings:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor


class Fields(NamedTuple):
    factor: float


def scaled(settings, x):
    return x * settings.factor


class Configured:
    """Reads its settings in the ways that Python has for it."""

    bias = 1.0

    def __init__(self):
        self.settings = types.SimpleNamespace(factor=2.0, inner=Settings(2.0))
        self.table = {"factor": 2.0, "function": lambda x: x * 2}
        self.fields = Fields(2.0)

    def by_attribute(self, x):
        return x * self.settings.factor * self.settings.inner.factor

    def by_local_name(self, x):
        settings = self.settings
        inner = settings.inner
        return x * settings.factor * inner.factor

    def by_item(self, x):
        table = self.table
        return table["function"](x) * self.table["factor"]

    def by_text(self, x):
        return x * getattr(self.settings, "factor")  # noqa: B009

    def by_argument(self, x):
        return scaled(self.settings, x)

    def by_field(self, x):
        return x * self.fields.factor

    @classmethod
    def by_class(cls, x):
        return x + cls.bias

    def with_class(self, x):
        return self.by_class(x)


def rebound(agent):
    agent.settings = types.SimpleNamespace(factor=5.0, inner=Settings(5.0))


@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("by_attribute", rebound),
        ("by_attribute", lambda agent: setattr(agent.settings, "inner", Settings(4.0))),
        ("by_attribute", lambda agent: setattr(agent.settings.inner, "factor", 4.0)),
        ("by_local_name", rebound),
        ("by_local_name", lambda agent: setattr(agent.settings.inner, "factor", 4.0)),
        ("by_item", lambda agent: agent.table.update(factor=7.0)),
        ("by_item", lambda agent: agent.table.update(function=lambda x: x * 9)),
        ("by_item", lambda agent: setattr(agent, "table", {"factor": 3.0, "function": lambda x: x * 5})),
        ("by_text", lambda agent: setattr(agent.settings, "factor", 3.0)),
        ("by_argument", lambda agent: setattr(agent.settings, "factor", 3.0)),
        ("by_field", lambda agent: setattr(agent, "fields", Fields(3.0))),
    ],
)
def test_settings_are_never_stale_however_they_are_read(way, change):
    agent = Configured()
    function = getattr(agent, way)
    wrapped = sg.wrap(function)
    assert answers(wrapped, function) == 4
    change(agent)
    assert answers(wrapped, function) >= 3


class Items(dict):
    __getattr__ = dict.get


class Corners:
    """Reads what it holds through descriptors, caches and defaults."""

    base = 3.0

    def __init__(self):
        self.factor, self.items = 2.0, Items(factor=2.0)

    @property
    def doubled(self):
        return self.factor * 2

    @staticmethod
    def fixed(x):
        return x * 2

    @classmethod
    def of_class(cls, x):
        return x * cls.base

    def act(self, x):
        return self.defaulting(self.of_class(self.fixed(x * self.doubled * self.items.factor)) * self.base * cached())

    def defaulting(self, x, *, by=1.0):
        return x * by


@functools.lru_cache(None)
def cached():
    return SCALE


@pytest.mark.parametrize(
    "change",
    [
        lambda corners, patch: patch.setattr(Corners, "doubled", property(lambda self: self.factor * 7)),
        lambda corners, patch: patch.setattr(Corners, "fixed", staticmethod(lambda x: x * 7)),
        lambda corners, patch: patch.setattr(Corners, "of_class", classmethod(lambda cls, x: x * 7)),
        lambda corners, patch: patch.setattr(Corners.defaulting, "__kwdefaults__", {"by": 7.0}),
        lambda corners, patch: patch.setitem(globals(), "cached", functools.lru_cache(None)(lambda: 7.0)),
        lambda corners, patch: patch.setattr(corners, "base", 7.0),
        lambda corners, patch: patch.setattr(corners, "__dict__", {**vars(corners), "factor": 7.0}),
        lambda corners, patch: corners.items.update(factor=7.0),
    ],
)
def test_what_is_read_through_descriptors_caches_and_defaults_is_never_stale(change, monkeypatch):
    corners, x = Corners(), torch.ones(4, 2)
    wrapped = sg.wrap(corners.act)
    assert answers(wrapped, corners.act) == 4
    before = wrapped(x)
    change(corners, monkeypatch)
    assert answers(wrapped, corners.act) >= 3
    assert not torch.equal(wrapped(x), before)


COMPUTED = {"name": "factor", "numbers": [2.0], "functions": [lambda x: x * 2]}


def by_computed_name(x):
    return x * getattr(Configured, COMPUTED["name"] + "_used")


def by_index(x):
    return x * COMPUTED["numbers"][0]


def by_function_in_a_list(x):
    return COMPUTED["functions"][0](x)


HELD = types.SimpleNamespace(scale=1.0, offset=torch.zeros(2))


def by_library(x):
    return x * 2 * HELD.scale + operator.attrgetter(COMPUTED["name"])(HELD)


@pytest.mark.parametrize(
    ("function", "change"),
    [
        (by_library, lambda: setattr(HELD, "offset", torch.full((2,), 5.0))),
        (by_computed_name, lambda: setattr(Configured, "factor_used", 7.0)),
        (by_index, lambda: COMPUTED["numbers"].__setitem__(0, 7.0)),
        (by_function_in_a_list, lambda: COMPUTED["functions"].__setitem__(0, lambda x: x * 7)),
    ],
)
def test_what_no_name_leads_to_is_noticed(function, change, monkeypatch):
    """As of modules: computed names, what a library reads, and numbers and functions in lists."""
    monkeypatch.setitem(COMPUTED, "name", "offset" if function is by_library else "factor")
    monkeypatch.setattr(HELD, "offset", torch.zeros(2))
    monkeypatch.setattr(Configured, "factor_used", 2.0, raising=False)
    monkeypatch.setitem(COMPUTED, "numbers", [2.0])
    monkeypatch.setitem(COMPUTED, "functions", [lambda x: x * 2])
    wrapped, x = sg.wrap(function), torch.ones(4, 2)
    assert answers(wrapped, function) == 4
    change()
    assert torch.equal(function(x), x * 7)
    assert answers(wrapped, function) >= 3


class Counter:
    """Has a number of the name of a method that the function calls on something else."""

    def __init__(self):
        self.model, self.sum = nn.Linear(2, 2), 0.0

    def forward(self, x):
        return self.model(x).sum()


def test_a_number_with_the_name_of_a_method_that_is_called_may_change_at_every_call():
    """`self.sum` is no part of what ``self.model(x).sum()`` reads."""
    counter = Counter()
    wrapped = sg.wrap(counter.forward, exact_shapes=True)
    for _ in range(12):
        counter.sum += 1
        x = torch.randn(4, 2)
        assert torch.equal(wrapped(x), counter.forward(x))
    assert wrapped.graph_stats.captures == 1
    assert wrapped.graph_stats.replays >= 9


def test_a_number_that_shares_a_name_and_keeps_changing_is_told():
    class Shaped(Counter):
        shape = 0

        def forward(self, x):
            return self.model(x) * x.shape[0]

    counter = Shaped()
    wrapped = sg.wrap(counter.forward, exact_shapes=True)
    for _ in range(30):
        counter.shape += 1
        x = torch.randn(4, 2)
        assert torch.equal(wrapped(x), counter.forward(x))
    assert wrapped.graph_stats.captures == 0
    assert wrapped.graph_stats.eager[Reason.PYTHON_STATE] > 10
    told = wrapped.graph_stats.details[Reason.PYTHON_STATE]
    assert told.startswith("self.shape took 4 new values within 32 calls")
    assert "rename it" in told
    for _ in range(280):
        x = torch.randn(4, 2)
        assert torch.equal(wrapped(x), counter.forward(x))
    assert wrapped.graph_stats.replays > 0, "once it stays, calls replay"


class Scales:
    def __init__(self):
        self.scale = 1.0


def changed_global(monkeypatch):
    return reads_globals, lambda value: monkeypatch.setitem(globals(), "SCALE", value)


def changed_attribute(monkeypatch):
    scales = Scales()

    def forward(x):
        return x * scales.scale

    return forward, lambda value: setattr(scales, "scale", value)


def changed_default(monkeypatch):
    def forward(x, scale=1.0):
        return x * scale

    return forward, lambda value: setattr(forward, "__defaults__", (value,))


@pytest.mark.parametrize("make", [changed_global, changed_attribute, changed_default])
def test_a_value_with_three_changes_in_ten_calls_is_served(make, monkeypatch):
    """docs/limits.md: only a value that is new four times within 32 calls makes calls run eagerly."""
    forward, change = make(monkeypatch)
    change(1.0)
    wrapped = sg.wrap(forward)
    answers(wrapped, forward)
    replays = 0
    for value, calls in ((3.0, 3), (5.0, 3), (7.0, 4)):
        change(value)
        replays += answers(wrapped, forward, calls=calls)
    assert replays >= 10 - 3, "one call with each new value is eager at most"
    assert wrapped.graph_stats.captures == 4
    assert Reason.PYTHON_STATE not in wrapped.graph_stats.eager


def test_two_closures_with_one_name_are_both_followed():
    def make(model):
        def inner(x):
            return model(x)

        def change(new):
            nonlocal model
            model = new

        return inner, change

    (first, change_first), (second, change_second) = make(nn.Linear(2, 2)), make(nn.Linear(2, 2))

    def forward(x):
        return first(x) + second(x)

    wrapped = sg.wrap(forward)
    assert answers(wrapped, forward) == 4
    for change in (change_first, change_second):
        change(nn.Linear(2, 2))
        assert answers(wrapped, forward) >= 3


def test_what_a_method_of_a_base_class_reads_is_never_stale():
    class Base:
        def __init__(self):
            self.offset = torch.ones(2)

        def act(self, x):
            return x + self.offset

    class Derived(Base):
        def act(self, x):
            return super().act(x) * 2

    derived = Derived()
    wrapped = sg.wrap(derived.act)
    assert answers(wrapped, derived.act) == 4
    derived.offset = torch.zeros(2)
    assert answers(wrapped, derived.act) >= 3


def test_what_a_class_method_reads_of_its_class_is_never_stale(monkeypatch):
    agent = Configured()
    wrapped = sg.wrap(agent.with_class)
    assert answers(wrapped, agent.with_class) == 4
    monkeypatch.setattr(Configured, "bias", 4.0)
    assert answers(wrapped, agent.with_class) >= 3


def test_objects_of_settings_may_alternate():
    agent, known = Configured(), [types.SimpleNamespace(factor=number, inner=Settings(1.0)) for number in (2.0, 3.0)]
    wrapped = sg.wrap(agent.by_attribute)
    for number in range(12):
        agent.settings = known[number % 2]
        x = torch.randn(4, 2)
        assert torch.equal(wrapped(x), agent.by_attribute(x))
    assert wrapped.graph_stats.replays >= 8


def test_a_function_that_counts_in_a_dict_is_refused_by_name():
    counts = {"calls": 0}

    def forward(x):
        counts["calls"] += 1
        return x * 2

    wrapped = sg.wrap(forward)
    for _ in range(8):
        wrapped(torch.randn(2, 2))
    assert counts == {"calls": 8}
    assert "the forward changes `counts.calls` whenever it runs" in str(wrapped.graph_report())


def test_a_function_without_arguments_has_a_graph_of_its_shapes():
    model, observation = nn.Linear(2, 2), torch.randn(3, 2)

    def rollout():
        observation.copy_(model(observation))
        return observation.sum()

    wrapped = sg.wrap(rollout, exact_shapes=True)
    twin = observation.clone()
    for _ in range(6):
        result = wrapped()
        twin.copy_(model(twin))
        assert torch.equal(result, twin.sum())
        assert torch.equal(observation, twin)
    assert wrapped.graph_stats.replays >= 4


def test_exact_shapes_are_captured_each_by_itself():
    def forward(x, y):
        return x.sum() + y.mean()

    wrapped = sg.wrap(forward, exact_shapes=True)
    for _ in range(4):
        for rows in (1, 3, 4):
            x, y = torch.randn(rows, 2), torch.randn(5)
            assert torch.equal(wrapped(x, y), forward(x, y))
    assert wrapped.graph_stats.captures == 3
    assert wrapped.graph_stats.padded_tokens == 0
    assert "a call with x float32[3, 2]" in {graph.label[:27] for graph in wrapped.graph_stats.graphs.values()}


def counting_in_a_closure():
    count = 0

    def forward(x):
        nonlocal count
        count += 1
        return x * 2

    return forward, lambda: count


def counting_in_an_object():
    class Counter:
        count = 0

        def forward(self, x):
            self.count += 1
            return x * 2

    counter = Counter()
    return counter.forward, lambda: counter.count


def counting_in_a_class():
    class Counter:
        count = 0

        def forward(self, x):
            Counter.count += 1
            return x * 2

    return Counter().forward, lambda: Counter.count


def counting_in_a_global():
    global COUNT
    COUNT = 0

    def forward(x):
        global COUNT
        COUNT += 1
        return x * 2

    return forward, lambda: COUNT


@pytest.mark.parametrize(
    "make", [counting_in_a_closure, counting_in_an_object, counting_in_a_class, counting_in_a_global]
)
def test_a_function_that_counts_in_python_is_refused_by_name(make):
    forward, count = make()
    wrapped = sg.wrap(forward)
    for _ in range(8):
        wrapped(torch.randn(2, 2))
    assert count() == 8
    assert wrapped.graph_stats.replays == 0
    assert wrapped.graph_stats.eager[Reason.CAPTURE_FAILED] >= 5
    (failure,) = wrapped.graph_stats.failures.values()
    assert re.search(r"the forward changes the .* count\b.* whenever it runs", failure, re.IGNORECASE)


def test_a_flag_that_is_set_once_is_no_reason():
    class Lazy:
        ready = False

        def forward(self, x):
            if not self.ready:
                self.ready = True
            return x * 2

    lazy = Lazy()
    wrapped = sg.wrap(lazy.forward)
    assert answers(wrapped, lambda x: x * 2, calls=6) >= 3
    lazy.ready = False
    assert answers(wrapped, lambda x: x * 2, calls=6) >= 3
    assert lazy.ready


def test_a_function_that_keeps_a_tensor_in_a_list_is_refused_by_name():
    kept = []

    def forward(x):
        kept.append(x * 2)
        return x + 1

    wrapped = sg.wrap(forward)
    for number in range(6):
        x = torch.full((2, 2), float(number))
        wrapped(x)
        assert torch.equal(kept[-1], x * 2)
    assert len(kept) == 6
    assert wrapped.graph_stats.eager[Reason.CAPTURE_FAILED] >= 1
    assert "kept" in str(wrapped.graph_report())


def test_a_function_of_weights_that_want_gradients_runs_eagerly():
    model = nn.Linear(2, 2)
    wrapped = sg.wrap(lambda x: model(x))
    with torch.enable_grad():
        for _ in range(3):
            wrapped(torch.randn(2, 2)).sum().backward()
    assert wrapped.graph_stats.eager == {Reason.GRAD: 3}


@pytest.mark.parametrize("target", [torch.add, 3, "text", None])
def test_what_is_no_function_is_refused(target):
    with pytest.raises(sg.ConfigError, match="wrap got"):
        sg.wrap(target)


def test_generators_and_coroutines_are_refused():
    def generator(x):
        yield x

    async def coroutine(x):
        return x

    for function in (generator, coroutine):
        with pytest.raises(sg.ConfigError, match="body runs after"):
            sg.wrap(function)


def test_wrapping_a_wrapped_function_keeps_its_settings():
    first = sg.wrap(reads_globals, capture_sizes=[4])
    again = sg.wrap(first, padding=False)
    assert again.__wrapped__ is reads_globals
    assert list(again._wrapped._graph_runner.settings.capture_sizes) == [4]
    assert not again._wrapped._graph_runner.settings.padding


def test_a_function_has_the_methods_that_are_about_graphs():
    wrapped = sg.wrap(reads_globals)
    answers(wrapped, reads_globals)
    wrapped.reset_graphs()
    assert wrapped.graph_manager.programs == {}
    wrapped.configure_graphs(capture_sizes=[2])
    assert "reset_graphs" in dir(wrapped)
    with pytest.raises(AttributeError, match="weights"):
        _ = wrapped.weights


@pytest.mark.parametrize("mode", [torch.no_grad(), torch.inference_mode()], ids=["no_grad", "inference_mode"])
def test_a_decorator_that_switches_gradients_off_is_enough(mode):
    """A sampler that is decorated needs no `torch.no_grad()` around its calls."""
    agent = Agent()

    @mode
    def decorated(x):
        return agent.act(x)

    class Sampler:
        @mode
        def draw(self, x):
            return agent.act(x)

    with torch.enable_grad():
        for function in (decorated, Sampler().draw, functools.partial(decorated)):
            wrapped = sg.wrap(function)
            assert answers(wrapped, function) == 4
            assert wrapped(torch.ones(4, 2)).is_inference() == function(torch.ones(4, 2)).is_inference()
        ahead = sg.wrap(decorated, capture_sizes=[4])
        assert ahead.capture_graphs(torch.ones(4, 2)).captured == 1
        undecorated = sg.wrap(agent.act)
        assert undecorated(torch.ones(4, 2)).requires_grad
    assert list(undecorated.graph_stats.eager) == [Reason.GRAD]


def test_lengths_of_a_functions_arguments_are_padded_as_a_modules_are():
    model = nn.Conv1d(1, 2, 3)

    def forward(x):
        return model(x)

    wrapped = sg.wrap(forward, capture_sizes=[2], length_dims={"x": 2}, lengths=[16])
    for length in (10, 12, 9, 16, 11, 13, 8):
        x = torch.randn(2, 1, length)
        assert torch.equal(wrapped(x), forward(x))
    assert wrapped.graph_stats.captures == 1
    assert wrapped.graph_stats.replays > 0
    ahead = sg.wrap(forward, capture_sizes=[2], length_dims={"x": 2}, lengths=[8, 16])
    assert ahead.capture_graphs(torch.randn(2, 1, 10)).captured == 2
    assert str(ahead.graph_report()).startswith("test_lengths")
    with pytest.raises(sg.ConfigError, match="length_dims names 'mel', but forward takes x"):
        sg.wrap(forward, length_dims={"mel": 2}, lengths=[16])


def test_a_name_that_no_keyword_argument_has_is_in_the_report():
    misnamed = sg.wrap(lambda **named: named["x"] * 2, length_dims={"mel": 2}, lengths=[16])
    misnamed(x=torch.randn(2, 1, 10))
    assert "length_dims names mel; the arguments are x" in str(misnamed.graph_report())


def test_what_is_for_modules_alone_refuses_a_function():
    with pytest.raises(sg.ConfigError, match=r"expected a subclass of torch.nn.Module.*or a function, use"):
        sg.cuda_graph(reads_globals)
