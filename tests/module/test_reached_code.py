"""Code that a call reaches without its name in other code reads a value: a later change of it is never stale."""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg

# Read by the code below, and set by the tests: `NUMBER` is plain, `SETTINGS` an object that only code leads to.
NUMBER = 1.0
SETTINGS = types.SimpleNamespace(number=1.0)


@pytest.fixture(autouse=True)
def _ones() -> Iterator[None]:
    yield
    _set(1.0)


def _set(number: float) -> None:
    globals()["NUMBER"] = SETTINGS.number = number


class ByInit:
    def __init__(self) -> None:
        self.number = NUMBER

    def another(self) -> float:
        return type(self)().number

    @classmethod
    def make(cls) -> ByInit:
        return cls()


class OfSettings:
    def __init__(self) -> None:
        self.number = SETTINGS.number


class Inherited(ByInit):
    def __init__(self) -> None:
        super().__init__()


class ByNew:
    number: float

    def __new__(cls) -> ByNew:
        made = super().__new__(cls)
        made.number = NUMBER
        return made


@dataclasses.dataclass
class ByFactory:
    number: float = dataclasses.field(default_factory=lambda: NUMBER)


@dataclasses.dataclass
class ByPostInit:
    other: int = 0

    def __post_init__(self) -> None:
        self.number = NUMBER


class ByMetaclass(type):
    def __call__(cls) -> Any:
        made = super().__call__()
        made.number = NUMBER
        return made


class OfMetaclass(metaclass=ByMetaclass):
    number: float


class Shown:
    def __str__(self) -> str:
        return str(NUMBER)

    def __repr__(self) -> str:
        return str(NUMBER)


class Copied:
    number = 1.0

    def __copy__(self) -> Any:
        return types.SimpleNamespace(number=NUMBER)

    def __deepcopy__(self, memo: Any) -> Any:
        return types.SimpleNamespace(number=NUMBER)


class OfState:
    number = 1.0

    def __getstate__(self) -> Any:
        return {"number": NUMBER}


class Scaling:
    number: float

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value * NUMBER)


class WithSetter:
    @property
    def number(self) -> float:
        return self._number

    @number.setter
    def number(self, value: float) -> None:
        self._number = value * NUMBER


class Dispatching:
    @functools.singledispatchmethod
    def read(self, key: Any) -> float:
        return 0.0

    @read.register
    def _(self, key: int) -> float:
        return NUMBER


class ByInitOfModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = NUMBER

    def forward(self, x: Any) -> Any:
        return x * self.number


CLASSES = {"init": ByInit}


def _set_one(thing: Any) -> float:
    thing.number = 1.0
    return float(thing.number)


@torch.library.custom_op("simplegraph_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * NUMBER


READ: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "a constructor": (None, lambda held: ByInit().number),
    "a constructor that reads an object": (None, lambda held: OfSettings().number),
    "an inherited constructor": (None, lambda held: Inherited().number),
    "__new__": (None, lambda held: ByNew().number),
    "a factory of a dataclass": (None, lambda held: ByFactory().number),
    "dataclasses.replace": (ByPostInit(), lambda held: dataclasses.replace(held, other=1).number),
    "a metaclass": (None, lambda held: OfMetaclass().number),
    "the class of an object": (ByInit(), lambda held: held.another()),
    "a class method": (ByInit(), lambda held: held.make().number),
    "a class that an object has, too": (ByInit(), lambda held: ByInit().number),
    "a class in an attribute": (ByInit, lambda held: held().number),
    "a class in a list": ([ByInit], lambda held: held[0]().number),
    "a class in a global table": ("init", lambda held: CLASSES[held]().number),
    "a module's constructor": (None, lambda held: ByInitOfModule()(1.0)),
    "str": (Shown(), lambda held: float(str(held))),
    "repr": (Shown(), lambda held: float(repr(held))),
    "an f-string": (Shown(), lambda held: float(f"{held}")),
    "copy": (Copied(), lambda held: copy.copy(held).number),
    "deepcopy": (Copied(), lambda held: copy.deepcopy(held).number),
    "__getstate__": (OfState(), lambda held: copy.copy(held).number),
    "__setattr__": (None, lambda held: _set_one(Scaling())),
    "the setter of a property": (None, lambda held: _set_one(WithSetter())),
    "a single-dispatch method": (Dispatching(), lambda held: held.read(1)),
    "a custom operator": (None, lambda held: scaled(torch.ones(()))),
    "a held custom operator": (scaled, lambda held: held(torch.ones(()))),
    "a custom operator of torch.ops": (None, lambda held: torch.ops.simplegraph_tests.scaled(torch.ones(()))),
    "its overload": (None, lambda held: torch.ops.simplegraph_tests.scaled.default(torch.ones(()))),
}


class Reading(nn.Module):
    def __init__(self, held: Any, read: Callable[[Any], Any]) -> None:
        super().__init__()
        self.held, self.read = held, read

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = x * self.read(self.held)
        return output


def _check(graphed: Any, device: torch.device, *, change: Callable[[float], None] = _set) -> None:
    """Compare calls with eager's before and after a change, and check that graphs serve both."""
    for number in (1.0, 3.0):
        change(number)
        replays = graphed.graph_stats.replays
        for _ in range(4):
            x = torch.randn(2, 4, device=device)
            torch.testing.assert_close(graphed(x), x * number)
        assert graphed.graph_stats.replays > replays


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.parametrize("way", READ)
def test_what_code_without_a_name_reads(way: str, kind: str, device: torch.device) -> None:
    held, read = READ[way]
    model = Reading(held, read).eval()
    _check(sg.wrap(model if kind == "module" else model.forward, capture_sizes=[2], progress=False), device)


FILES = {
    "__init__.py": "",
    "inner/__init__.py": "",
    "inner/settings.py": "number = 1.0\n",
    "model.py": """
from torch import nn

class Dotted(nn.Module):
    def forward(self, x):
        import {package}.inner.settings
        return x * {package}.inner.settings.number

class Renamed(nn.Module):
    def forward(self, x):
        import {package}.inner.settings as settings
        return x * settings.number

class OfPackage(nn.Module):
    def forward(self, x):
        from {package}.inner import settings
        return x * settings.number

class Value(nn.Module):
    def forward(self, x):
        from {package}.inner.settings import number
        return x * number

class Relative(nn.Module):
    def forward(self, x):
        from .inner import settings
        return x * settings.number

class RelativeValue(nn.Module):
    def forward(self, x):
        from .inner.settings import number as renamed
        return x * renamed

class InHelper(nn.Module):
    def read(self):
        def inner():
            from .inner.settings import number
            return number
        return inner()

    def forward(self, x):
        return x * self.read()

class Module(nn.Module):
    def forward(self, x):
        from . import inner
        return x * inner.settings.number
""",
}


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("kind", ["module", "function"])
@pytest.mark.parametrize(
    "way", ["Dotted", "Renamed", "OfPackage", "Value", "Relative", "RelativeValue", "InHelper", "Module"]
)
def test_what_is_imported_inside_a_function(
    way: str, kind: str, device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = f"imported_{way}_{kind}"
    for name, text in FILES.items():
        (tmp_path / package / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / package / name).write_text(text.replace("{package}", package))
    monkeypatch.syspath_prepend(tmp_path)
    model = getattr(importlib.import_module(f"{package}.model"), way)().eval()
    settings: Any = importlib.import_module(f"{package}.inner.settings")
    graphed = sg.wrap(model if kind == "module" else model.forward, capture_sizes=[2], progress=False)
    _check(graphed, device, change=lambda number: setattr(settings, "number", number))


VARIABLE = "SIMPLEGRAPH_TESTS"
LAZY = f"""
import os

VALUES = {{"number": lambda: float(os.environ["{VARIABLE}"])}}

def __getattr__(name):
    return VALUES[name]()
"""


@pytest.fixture
def looked_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("looked_up")
    module.number = 1.0
    monkeypatch.setitem(sys.modules, "looked_up", module)
    return module


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    "read",
    [
        lambda _: sys.modules["looked_up"].number,
        lambda _: importlib.import_module("looked_up").number,
        lambda _: __import__("looked_up").number,
    ],
)
def test_what_a_module_of_python_has_that_is_looked_up_by_its_name(
    read: Callable[[Any], float], device: torch.device, looked_up: Any
) -> None:
    graphed = sg.wrap(Reading(None, read).eval(), capture_sizes=[2], progress=False)
    _check(graphed, device, change=lambda number: setattr(looked_up, "number", number))


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize(
    "read",
    [
        lambda _: float(os.environ[VARIABLE]),
        lambda _: float(os.environ.get(VARIABLE, "1")),
        lambda _: float(os.getenv(VARIABLE, "1")),
        lambda _: sys.modules["looked_up"].number,
    ],
)
def test_the_environment(
    read: Callable[[Any], float], device: torch.device, looked_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    del looked_up.number
    exec(LAZY, vars(looked_up))
    graphed = sg.wrap(Reading(None, read).eval(), capture_sizes=[2], progress=False)
    _check(graphed, device, change=lambda number: monkeypatch.setenv(VARIABLE, str(number)))


@pytest.mark.usefixtures("no_grad")
def test_a_variable_that_the_environment_gets(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Reading(None, lambda _: 3.0 if VARIABLE in os.environ else 1.0)
    graphed = sg.wrap(read.eval(), capture_sizes=[2], progress=False)

    def change(number: float) -> None:
        if number == 3.0:
            monkeypatch.setenv(VARIABLE, "on")

    _check(graphed, device, change=change)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * NUMBER


class SetUp(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.number = NUMBER

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        number: float = ctx.number
        return grad * number


class WithBackward(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4, bias=False), function

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.function.apply(self.layer(x))
        return output


@pytest.mark.parametrize("step", [False, True])
@pytest.mark.parametrize("function", [Backward, SetUp])
def test_what_the_backward_of_a_function_reads(function: Any, step: bool, device: torch.device) -> None:
    model: Any = WithBackward(function).to(device)
    trained = model if step else sg.wrap(model, capture_sizes=[2], progress=False, training=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def run(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss: Tensor = trained(x).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    graphed: Any = sg.train_step(run, optimizers=optimizer, progress=False) if step else trained
    call = graphed if step else run
    for number in (1.0, 3.0):
        _set(number)
        replays = graphed.graph_stats.replays
        for _ in range(5):
            x = torch.randn(2, 4, device=device)
            call(x)
            torch.testing.assert_close(model.layer.weight.grad, number * x.sum(0).expand(4, 4))
        assert graphed.graph_stats.replays > replays


class Meter:
    """Counts steps, and shows them. No code below a call reads the count."""

    def __init__(self) -> None:
        self.steps = 0

    def __str__(self) -> str:
        return f"{self.steps} steps"


@pytest.mark.usefixtures("no_grad")
def test_methods_that_show_or_make_an_object_make_no_call_eager(device: torch.device) -> None:
    model = Reading(1.0, lambda held: held).eval()
    model.meter = Meter()  # type: ignore[assignment]
    graphed: Any = sg.wrap(model, capture_sizes=[2], progress=False)
    for _ in range(40):
        graphed.meter.steps += 1
        graphed(torch.randn(2, 4, device=device))
    assert graphed.graph_stats.replays >= 20
