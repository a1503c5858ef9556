"""What a forward reads is noticed where it changes inside of things: functions, classes of objects, views, contexts."""

from __future__ import annotations

import array
import collections
import contextvars
import functools
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

WIDTH = 4


class Reads(nn.Module):
    """Multiplies by what `read` finds."""

    def __init__(self, read: Callable[[Any], Any], held: Any = None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.read, self.held = read, held

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.layer(x) * float(self.read(self)) * scale * self.method()

    def method(self, scale: float = 1.0) -> float:
        return scale * self.static() * self.of_class() * self.computed

    @staticmethod
    def static(*, scale: float = 1.0) -> float:
        return scale

    @classmethod
    def of_class(cls, scale: float = 1.0) -> float:
        return scale

    @property
    def computed(self) -> float:
        return 1.0


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.inference_mode():
        yield


def graphed(module: nn.Module) -> Any:
    return sg.wrap(module.eval(), capture_sizes=[2], progress=False)


def serve(model: Any, module: Callable[[Tensor], Tensor], times: int = 5) -> None:
    """Call a model, compare with eager, and require that graphs serve at the end."""
    replays = model.graph_stats.replays
    for _ in range(times):
        x = torch.randn(2, WIDTH)
        assert torch.equal(model(x), module(x)), model.graph_report()
    assert model.graph_stats.replays > replays, model.graph_report()


def helper(scale: float = 2.0, *, more: float = 1.0, table: Any = {"scale": 1.0}) -> float:  # noqa: B006
    return scale * more * table["scale"]


def tripled(scale: float = 2.0, *, more: float = 1.0, table: Any = None) -> float:
    return scale * 3


@functools.wraps(helper)
def decorated() -> float:
    return helper()


class Calls:
    factor = 2.0

    def __call__(self) -> float:
        return self.value()

    def value(self, scale: float = 2.0) -> float:
        return scale * self.factor


class CallsOtherwise(Calls):
    factor = 5.0

    def value(self, scale: float = 3.0) -> float:
        return scale


class Slots:
    __slots__ = ("scale",)

    def value(self) -> float:
        return 2.0


class OtherSlots:
    __slots__ = ("scale",)

    def value(self) -> float:
        return 3.0


class Items(list[Any]):
    factor = 2.0


class OtherItems(list[Any]):
    factor = 3.0


class Table(dict[str, Any]):
    factor = 2.0


class OtherTable(dict[str, Any]):
    factor = 3.0


class Never:
    """Has no equality."""

    def __eq__(self, other: object) -> bool:
        raise AssertionError("looking runs no code of the user's")

    __hash__ = object.__hash__


def copied(function: Any = helper) -> Any:
    """Return a function of its own, whose code may change."""
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = {"more": 1.0, "table": {"scale": 1.0}}
    return made


def hooked() -> Reads:
    module = Reads(lambda _: 1.0)
    module.layer.register_forward_hook(hook)
    return module


def hook(module: Any, args: Any, output: Tensor, scale: float = 2.0) -> Tensor:
    return output * scale * HOOKED


HOOKED = 1.0
HELPERS: Any = []

# A module, and what changes a function that its calls lead to.
FUNCTIONS: dict[str, tuple[Callable[[], Reads], Callable[[Any], object]]] = {
    "defaults": (lambda: Reads(lambda _: helper()), lambda _: setattr(helper, "__defaults__", (3.0,))),
    "defaults by keyword": (
        lambda: Reads(lambda _: helper()),
        lambda _: setattr(helper, "__kwdefaults__", {"more": 4.0, "table": {"scale": 1.0}}),
    ),
    "one default by keyword": (lambda: Reads(lambda _: helper()), lambda _: helper.__kwdefaults__.update(more=5.0)),
    "a default's item": (
        lambda: Reads(lambda _: helper()),
        lambda _: helper.__kwdefaults__["table"].update(scale=6.0),
    ),
    "defaults without an equality": (
        lambda: Reads(lambda _: helper(table={"scale": 1.0})),
        lambda _: setattr(helper, "__defaults__", (7.0, Never())[:1]),
    ),
    "code": (lambda: Reads(lambda _: helper()), lambda _: setattr(helper, "__code__", tripled.__code__)),
    "code of what reads": (
        lambda: Reads(copied(lambda m: 2.0)),
        lambda m: setattr(m.read, "__code__", (lambda m: 3.0).__code__),
    ),
    "in an attribute": (
        lambda: Reads(lambda m: m.held(), copied()),
        lambda m: setattr(m.held, "__defaults__", (3.0,)),
    ),
    "in a list": (
        lambda: Reads(lambda m: m.held[0](), [copied()]),
        lambda m: setattr(m.held[0], "__defaults__", (3.0,)),
    ),
    "in a tuple": (
        lambda: Reads(lambda m: m.held[0](), (copied(),)),
        lambda m: setattr(m.held[0], "__defaults__", (3.0,)),
    ),
    "of a partial": (
        lambda: Reads(lambda m: m.held(), functools.partial(copied())),
        lambda m: setattr(m.held.func, "__code__", tripled.__code__),
    ),
    "decorated": (lambda: Reads(lambda _: decorated()), lambda _: setattr(helper, "__defaults__", (3.0,))),
    "a global table's": (
        lambda: (HELPERS.append(copied()), Reads(lambda _: HELPERS[0]()))[1],
        lambda _: setattr(HELPERS[0], "__defaults__", (3.0,)),
    ),
    "an object's method": (
        lambda: Reads(lambda m: m.held(), Calls()),
        lambda _: setattr(Calls.value, "__defaults__", (3.0,)),
    ),
    "an object's call": (
        lambda: Reads(lambda m: m.held(), Calls()),
        lambda _: setattr(Calls.__call__, "__code__", (lambda self: 7.0).__code__),
    ),
    "the forward": (lambda: Reads(lambda _: 1.0), lambda _: setattr(Reads.forward, "__defaults__", (3.0,))),
    "a method": (lambda: Reads(lambda _: 1.0), lambda _: setattr(Reads.method, "__defaults__", (3.0,))),
    "a static method": (
        lambda: Reads(lambda _: 1.0),
        lambda _: setattr(Reads.static, "__kwdefaults__", {"scale": 3.0}),
    ),
    "a class method": (
        lambda: Reads(lambda _: 1.0),
        lambda _: setattr(vars(Reads)["of_class"].__func__, "__defaults__", (3.0,)),
    ),
    "a property": (
        lambda: Reads(lambda _: 1.0),
        lambda _: setattr(vars(Reads)["computed"].fget, "__code__", (lambda self: 3.0).__code__),
    ),
    "a hook's defaults": (hooked, lambda _: setattr(hook, "__defaults__", (3.0,))),
    "a global that a hook reads": (hooked, lambda _: globals().update(HOOKED=3.0)),
}


@pytest.fixture
def _functions_as_they_were() -> Iterator[None]:
    inner = vars(Reads)
    functions: list[Any] = [helper, hook, Calls.value, Calls.__call__, Reads.forward, Reads.method, Reads.static]
    functions += [inner["of_class"].__func__, inner["computed"].fget]
    before = [(each, each.__code__, each.__defaults__, each.__kwdefaults__) for each in functions]
    helper.__kwdefaults__ = {"more": 1.0, "table": {"scale": 1.0}}
    globals().update(HOOKED=1.0)
    HELPERS.clear()
    yield
    for function, *parts in before:
        function.__code__, function.__defaults__, function.__kwdefaults__ = parts


@pytest.mark.usefixtures("_functions_as_they_were", "with_versions")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_that_changes_inside_is_noticed(name: str) -> None:
    make, change = FUNCTIONS[name]
    module = make()
    model = graphed(module)
    serve(model, module)
    change(module)
    serve(model, module)
    assert model.graph_stats.captures == 2


@pytest.mark.usefixtures("_functions_as_they_were")
def test_defaults_that_come_back_need_no_capture() -> None:
    module = Reads(lambda _: helper())
    model = graphed(module)
    for scale in (2.0, 3.0, 2.0, 3.0):
        helper.__defaults__ = (scale,)
        serve(model, module)
    assert model.graph_stats.captures == 2


@pytest.mark.usefixtures("_functions_as_they_were")
@pytest.mark.parametrize(
    "change",
    [
        lambda function: setattr(function, "__code__", (lambda x: x * 3 * helper()).__code__),
        lambda _: setattr(helper, "__defaults__", (3.0,)),
        lambda _: setattr(helper, "__code__", tripled.__code__),
        lambda _: helper.__kwdefaults__.update(more=3.0),
    ],
    ids=["its code", "defaults of a helper", "code of a helper", "an item of a helper's defaults"],
)
def test_a_wrapped_function_that_changes_inside_is_noticed(change: Callable[[Any], object]) -> None:
    function = copied(lambda x: x * helper())
    model = sg.wrap(function, capture_sizes=[2], progress=False)
    serve(model, function)
    change(function)
    serve(model, function)


CLASSES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "an object": (Calls, lambda held: setattr(held, "__class__", CallsOtherwise), lambda m: m.held()),
    "an attribute of its class": (
        Calls,
        lambda held: setattr(held, "__class__", CallsOtherwise),
        lambda m: m.held.factor,
    ),
    "in a dict": (
        lambda: {"a": Calls()},
        lambda held: setattr(held["a"], "__class__", CallsOtherwise),
        lambda m: m.held["a"](),
    ),
    "in a list": (lambda: [Calls()], lambda held: setattr(held[0], "__class__", CallsOtherwise), lambda m: m.held[0]()),
    "with slots": (Slots, lambda held: setattr(held, "__class__", OtherSlots), lambda m: m.held.value()),
    "a list": (lambda: Items([1]), lambda held: setattr(held, "__class__", OtherItems), lambda m: m.held.factor),
    "a dict": (lambda: Table(a=1), lambda held: setattr(held, "__class__", OtherTable), lambda m: m.held.factor),
    "an empty dict": (Table, lambda held: setattr(held, "__class__", OtherTable), lambda m: m.held.factor),
    "a global": (lambda: None, lambda _: setattr(CALLS, "__class__", CallsOtherwise), lambda _: CALLS()),
    "what a method is bound to": (
        lambda: Calls().value,
        lambda held: setattr(held.__self__, "__class__", CallsOtherwise),
        lambda m: m.held(),
    ),
    "another dict of an empty object": (
        Calls,
        lambda held: setattr(held, "__dict__", {"factor": 3.0}),
        lambda m: m.held(),
    ),
}
CALLS = Calls()


@pytest.mark.usefixtures("with_versions")
@pytest.mark.parametrize("name", CLASSES)
def test_another_class_of_an_object_is_noticed(name: str) -> None:
    make, change, read = CLASSES[name]
    CALLS.__class__ = Calls
    module = Reads(read, make())
    model = graphed(module)
    serve(model, module)
    change(module.held)
    serve(model, module)


def local(**values: Any) -> threading.local:
    made = threading.local()
    vars(made).update(values)
    return made


VARIABLE: contextvars.ContextVar[Any] = contextvars.ContextVar("VARIABLE", default=2.0)
INNER: contextvars.ContextVar[dict[str, float]] = contextvars.ContextVar("INNER")
LOCAL = local(scale=2.0)
SHOWN = {"scale": 2.0, "deep": [2.0]}


class Current:
    variable = VARIABLE

    @staticmethod
    def scale() -> Any:
        return Current.variable.get()


def first_of_record(scale: float) -> Any:
    return np.array([(scale,)], dtype=[("scale", "f8")])[0]


# What a module holds, what changes in it, and how the forward reads it.
VALUES: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Callable[[Any], Any]]] = {
    "an array": (lambda: array.array("d", [2.0]), lambda held: held.__setitem__(0, 3.0), lambda m: m.held[0]),
    "an array that grows": (lambda: array.array("d", [2.0]), lambda held: held.append(3.0), lambda m: sum(m.held)),
    "a long array that grows": (
        lambda: array.array("d", [2.0] * 99),
        lambda held: held.append(3.0),
        lambda m: m.held[-1],
    ),
    "bytes": (lambda: bytearray(b"ab"), lambda held: held.__setitem__(0, 3), lambda m: m.held[0]),
    "an array of NumPy": (lambda: np.full(2, 2.0), lambda held: held.__setitem__(0, 3.0), lambda m: m.held[0]),
    "in a tuple": (
        lambda: (np.full(2, 2.0), [1]),
        lambda held: held[0].__setitem__(0, 3.0),
        lambda m: m.held[0][0],
    ),
    "a record of NumPy": (
        lambda: first_of_record(2.0),
        lambda held: held.__setitem__("scale", 3.0),
        lambda m: m.held["scale"],
    ),
    "records of NumPy": (
        lambda: np.array([(2.0,)], dtype=[("scale", "f8")]).view(np.recarray),
        lambda held: held.scale.__setitem__(0, 3.0),
        lambda m: m.held.scale[0],
    ),
    "a read-only view": (
        lambda: types.MappingProxyType(SHOWN),
        lambda _: SHOWN.update(scale=3.0),
        lambda m: m.held["scale"],
    ),
    "below a read-only view": (
        lambda: types.MappingProxyType(SHOWN),
        lambda _: SHOWN.update(deep=[3.0]),
        lambda m: m.held["deep"][0],
    ),
    "a thread's own": (lambda: local(scale=2.0), lambda held: setattr(held, "scale", 3.0), lambda m: m.held.scale),
    "a list of a thread's own": (
        lambda: local(scale=[2.0]),
        lambda held: held.scale.append(3.0),
        lambda m: sum(m.held.scale),
    ),
    "a global thread's own": (lambda: None, lambda _: setattr(LOCAL, "scale", 3.0), lambda _: LOCAL.scale),
    "a context variable": (lambda: None, lambda _: VARIABLE.set(3.0), lambda _: VARIABLE.get()),
    "a context variable of the module": (lambda: VARIABLE, lambda held: held.set(3.0), lambda m: m.held.get()),
    "a context variable of a class": (lambda: None, lambda _: VARIABLE.set(3.0), lambda _: Current.scale()),
    "inside of a context variable": (
        lambda: None,
        lambda _: INNER.get().update(scale=3.0),
        lambda _: INNER.get()["scale"],
    ),
    "a deque": (lambda: collections.deque([2.0]), lambda held: held.__setitem__(0, 3.0), lambda m: m.held[0]),
    "a UserList": (lambda: collections.UserList([2.0]), lambda held: held.__setitem__(0, 3.0), lambda m: m.held[0]),
    "a UserDict": (
        lambda: collections.UserDict(scale=2.0),
        lambda held: held.update(scale=3.0),
        lambda m: m.held["scale"],
    ),
    "an empty dict in a tuple": (
        lambda: ({}, [1]),
        lambda held: held[0].update(scale=3.0),
        lambda m: m.held[0].get("scale", 2.0),
    ),
}


@pytest.mark.usefixtures("with_versions")
@pytest.mark.parametrize("name", VALUES)
def test_a_value_inside_is_noticed(name: str) -> None:
    make, change, read = VALUES[name]
    VARIABLE.set(2.0)
    INNER.set({"scale": 2.0})
    SHOWN.update(scale=2.0, deep=[2.0])
    LOCAL.scale = 2.0
    module = Reads(read, make())
    model = graphed(module)
    serve(model, module)
    change(module.held)
    serve(model, module)
    assert model.graph_stats.captures == 2


REPLACED: dict[str, tuple[Any, Any, Callable[[Any], Any]]] = {
    "a tuple with a list": ((2.0, [1]), (3.0, [1]), lambda m: m.held[0]),
    "a tuple with a tensor": ((torch.ones(1), 2.0), (torch.ones(1), 3.0), lambda m: m.held[1]),
    "a tuple of functions": ((lambda: 2.0,), (lambda: 3.0,), lambda m: m.held[0]()),
    "a long array": (np.full(99, 2.0), np.full(99, 3.0), lambda m: m.held[0]),
    "how long a deque may get": (
        collections.deque([1], maxlen=2),
        collections.deque([1], maxlen=3),
        lambda m: m.held.maxlen,
    ),
}


@pytest.mark.usefixtures("with_versions")
@pytest.mark.parametrize("name", REPLACED)
def test_what_holds_values_inside_may_be_replaced(name: str) -> None:
    first, second, read = REPLACED[name]
    module = Reads(read, first)
    model = graphed(module)
    serve(model, module)
    module.held = second
    serve(model, module)


def test_each_context_and_thread_finds_its_own_value() -> None:
    module = Reads(lambda _: VARIABLE.get() * LOCAL.scale)
    model = graphed(module)
    VARIABLE.set(2.0)
    LOCAL.scale = 2.0
    serve(model, module)
    found: list[Any] = []

    def other() -> None:
        with torch.inference_mode():
            LOCAL.scale = 5.0
            x = torch.randn(2, WIDTH)
            found.extend((model(x), module(x)) for _ in range(3))

    for _ in range(2):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        serve(model, module)
    assert len(found) == 6
    for answer, expected in found:
        assert torch.equal(answer, expected)


class Prepared(threading.local):
    prepared = 0

    def __init__(self) -> None:
        Prepared.prepared += 1
        self.scale = 2.0


class Bare(threading.local):
    pass


class Defaults(threading.local):
    def __init__(self) -> None:
        self.scale = 2.0
        self.unused = None


class Elsewhere(threading.local):
    prepared = False

    def __init__(self) -> None:
        Elsewhere.prepared = True
        self.scale = 2.0


PREPARED, BARE, DEFAULTS, ELSEWHERE = Prepared(), Bare(), Defaults(), Elsewhere()


def test_defaults_that_a_thread_is_given_are_read_like_any_value() -> None:
    """An `__init__` that only sets attributes may run for a look; what a thread sets there is never stale."""
    module = Reads(lambda _: DEFAULTS.scale)
    model = graphed(module)
    for scale in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0):
        DEFAULTS.scale = scale
        x = torch.randn(2, WIDTH)
        assert torch.equal(model(x), module(x))
    assert model.graph_stats.replays > 0
    module = Reads(lambda _: ELSEWHERE.scale)
    model = graphed(module)
    for _ in range(4):
        model(torch.randn(2, WIDTH))
    assert model.graph_stats.replays == 0
    assert "ELSEWHERE is a threading.local with an __init__" in str(model.graph_report())


def test_looking_prepares_nothing_for_another_thread() -> None:
    """Looking at such an object runs its `__init__` in a new thread; the remedy that the message names works."""
    module = Reads(lambda m: PREPARED.scale if m.training else 1.0)
    model = graphed(module)
    for _ in range(4):
        x = torch.randn(2, WIDTH)
        assert torch.equal(model(x), module(x))
    assert model.graph_stats.replays == 0
    assert "PREPARED is a threading.local with an __init__, which Python would run when another thread reads it" in str(
        model.graph_report()
    )
    before = Prepared.prepared

    def other() -> None:
        with torch.inference_mode():
            model(torch.randn(2, WIDTH))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert Prepared.prepared == before
    module = Reads(lambda _: getattr(BARE, "scale", 2.0))
    model = graphed(module)
    serve(model, module)
    BARE.scale = 3.0
    serve(model, module)


def closed() -> tuple[Reads, Callable[[float], object]]:
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return Reads(lambda _: scale), change


def held(read: Callable[[Any], Any], thing: Any, change: Callable[[Any, float], object]) -> Any:
    return lambda: (Reads(read, thing), lambda value: change(thing, value))


# Where a value lies that takes a new one in every call, and what gives it that.
RESTLESS: dict[str, Callable[[], tuple[Reads, Callable[[float], object]]]] = {
    "a variable of a closure": closed,
    "a default": held(
        lambda m: m.held[0](), [copied()], lambda held, value: setattr(held[0], "__defaults__", (value,))
    ),
    "a default's item": held(
        lambda m: m.held[0](), [copied()], lambda held, value: held[0].__kwdefaults__.update(more=value)
    ),
    "deep by index": held(
        lambda m: m.held[0][1][2], {0: {1: [1.0] * 3}}, lambda held, value: held[0][1].__setitem__(2, value)
    ),
    "a dict that is iterated over": held(
        lambda m: sum(sum(values) for values in m.held.values()),
        {"any": [1.0]},
        lambda held, value: held["any"].__setitem__(0, value),
    ),
    "a context variable in a list": held(lambda m: m.held[0].get(), [VARIABLE], lambda held, value: held[0].set(value)),
    "a context variable": lambda: (Reads(lambda _: VARIABLE.get()), VARIABLE.set),
    "a read-only view": held(
        lambda m: m.held["scale"],
        types.MappingProxyType(SHOWN),
        lambda _, value: SHOWN.update(scale=value),
    ),
}


@pytest.mark.parametrize("name", RESTLESS)
def test_a_value_that_is_new_in_every_call_is_not_let_go_where_code_may_lead_to_it(name: str) -> None:
    module, change = RESTLESS[name]()
    model = graphed(module)
    for step in range(12):
        change(float(step))
        x = torch.randn(2, WIDTH)
        assert torch.equal(model(x), module(x)), step
    assert "took 4 new values within 32 calls" in str(model.graph_report())
