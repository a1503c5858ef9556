"""Make a module of a plain function, so that it gets graphs as modules do: it holds what the function reaches."""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn

from simplegraph.base.errors import ConfigError
from simplegraph.base.nested import ATOMS, constant_key
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.guard.reach import CodePlace, is_code, places_of
from simplegraph.program.places import ABSENT, is_library

P = ParamSpec("P")
R = TypeVar("R")
Link = tuple[Any, Any, Any]

# What a function that has graphs offers beside being called, of `CudaGraphWrapper`.
_METHODS = frozenset(
    {
        *("configure_graphs", "use_graph_pool", "use_ranks", "static_inputs", "reset_graphs"),
        *("graph_report", "graph_stats", "graph_manager"),
    }
)


class FunctionModule(nn.Module):
    """A module whose forward is a function. Its children are the modules that the function reaches.

    Args:
        function: a function, bound method, partial, or other callable.

    Attributes:
        reached: what else the function reaches, by name: tensors, containers, objects.
        values: the plain values among it.
        computes_gradients: True if the function calls backward itself.
        proves_any_size: True if proofs copy all that it writes, however much that is.
    """

    computes_gradients = False
    proves_any_size = False

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.training = False
        self.values = ReachedValues(getattr(function, "__qualname__", None) or type(function).__qualname__)
        self._function = function
        self.reached: dict[str, Any] = {}

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.values.watching():
                return self._run(args, kwargs)

        self.forward = forward

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._function(*args, **kwargs)

    def _get_name(self) -> str:
        return self.values.name

    def resolve(self) -> None:
        """Find again what the function reaches: globals and attributes may be bound to something else by now."""
        found = [(place, value) for place in self._find_places() if (value := place.value) is not ABSENT]
        self.values.use(found)
        modules = {place.name: value for place, value in found if isinstance(value, nn.Module)}
        others = {
            place.name: value
            for place, value in found
            if place.last and not isinstance(value, (*ATOMS, nn.Module)) and not is_code(value) and _may_hold(value)
        }
        _update(self._modules, modules)
        _update(self.reached, others)

    def _find_places(self) -> list[CodePlace]:
        return places_of(self._function)

    def links(self) -> list[Link]:
        """List (holder, key, value) for every place that the function reads; plain values are in `state` instead."""
        return [(place.holder, place.key, value) for place, value in self.values.found if not isinstance(value, ATOMS)]

    def code(self) -> list[Any]:
        """List the functions that the function calls by name, as far as they are the user's."""
        return [value for _, value in self.values.found if isinstance(value, types.FunctionType)]

    def watched_dicts(self) -> list[dict[Any, Any]]:
        """List dicts whose entries tell when the code that calls run may have changed."""
        return []

    def held(self) -> Iterator[tuple[str, tuple[Link, ...]]]:
        """Yield what else calls read, by name, with the links to it."""
        return iter(())

    def state(self) -> Hashable:
        """Return the plain values that the function reads, as a key. Raises CannotBind if it changes them itself."""
        if self.values.moved():
            self.resolve()
        return self.values.state()

    # What a function that does more than return a result lets graphs know.

    def serve(self, binding: Any) -> None:
        """Note which kind of calls is served next."""

    def note_read(self, observers: Iterable[Any]) -> set[int]:
        """Note what runs read; return the storage keys of memory that the last one found, and that no graph reads."""
        return set()

    def is_over(self, context: Any) -> bool:
        """True if calls in the context of a signature are not expected to come again."""
        return False

    def with_effects(self, whole: Any) -> Any:
        """Return what a captured run left, beside what it returned."""
        return whole


class ReachedValues:
    """Holds what a function reaches; apart from the module, whose attributes are watched."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found: list[tuple[CodePlace, Any]] = []
        self._atoms: tuple[list[Any], list[Any]] = [], []
        self._names: list[str] = []
        self._ways: tuple[list[Any], list[Any], list[Any]] = [], [], []
        self._last: tuple[list[Any], Hashable] = [], ()
        self._changed: set[str] = set()  # by the latest run
        self.counted: set[str] = set()  # by two runs in a row: by each, as far as can be told

    def use(self, found: list[tuple[CodePlace, Any]]) -> None:
        self.found = found
        atoms = [place for place, value in found if isinstance(value, ATOMS) and place.last]
        self._atoms = [place.holder for place in atoms], [place.key for place in atoms]
        self._names = [place.name for place in atoms]
        ways = [(place.holder, place.key, value) for place, value in found if self._leads_to_values(place, value)]
        self._ways = [holder for holder, _, _ in ways], [key for _, key, _ in ways], [value for _, _, value in ways]

    def _leads_to_values(self, place: CodePlace, value: Any) -> bool:
        """True for an object or container on the way to plain values."""
        inside = (value, getattr(value, "__dict__", None))
        return not isinstance(value, ATOMS) and any(
            getattr(holder, "thing", holder) is each for holder in self._atoms[0] for each in inside
        )

    def moved(self) -> bool:
        """True if something else is on the way to the plain values than when they were looked for."""
        holders, keys, values = self._ways
        return bool(holders) and not all(map(operator.is_, map(_item, holders, keys), values))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Find out if the run in here changes the plain values, which a replay would not."""
        before = self.now()
        yield
        changed = self.changed_since(before)
        self.counted |= changed & self._changed
        self._changed = changed

    def now(self) -> dict[str, tuple[Any, Any, Any]]:
        """Return the plain values, by name, each with its holder and key."""
        places = zip(self._names, *self._atoms, strict=True)
        return {name: (holder, key, _item(holder, key)) for name, holder, key in places}

    def changed_since(self, before: dict[str, tuple[Any, Any, Any]], *, put_back: bool = False) -> set[str]:
        """Name those that are others than before, and put them back if asked to."""
        changed = set()
        for name, (holder, key, then) in before.items():
            now = _item(holder, key)
            if now is not then and now != then:
                changed.add(name)
                if put_back:
                    holder[key] = then
        return changed

    def state(self) -> Hashable:
        """Return the plain values as a key: the very same object while none is set again."""
        if self.counted:
            raise CannotBind(Reason.PYTHON_STATE, ", ".join(sorted(self.counted)))
        try:
            found = list(map(operator.getitem, *self._atoms))
        except (LookupError, ValueError):
            return None
        known, key = self._last
        if len(found) != len(known) or not all(map(operator.is_, found, known)):
            values = tuple((type(value), constant_key(value)) for value in found)
            key = key if values == key else values
            self._last = found, key
        return key


class GraphedFunction(Generic[P, R]):
    """A function that goes through graphs; it has the methods of `CudaGraphWrapper` that are about graphs.

    Args:
        function: what it stands for.
        wrapped: the module made of it, wrapped.
    """

    def __init__(self, function: Callable[P, R], wrapped: Any) -> None:
        functools.update_wrapper(self, function, updated=())
        self._wrapped = wrapped
        self._grad_mode = _decorated_mode(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if self._grad_mode is None:
            return self._serve(args, kwargs)
        with self._grad_mode():
            return self._serve(args, kwargs)

    def _serve(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        wrapped = self._wrapped
        runner = wrapped._graph_runner
        result: R = (
            runner.call(wrapped, args, kwargs)
            if runner.lengths is None
            else runner.lengths.call(runner, wrapped, args, kwargs)
        )
        return result

    def capture_graphs(self, *args: Any, **kwargs: Any) -> Any:
        """Capture all sizes now, from example arguments; see `CudaGraphWrapper.capture_graphs`."""
        with self._grad_mode() if self._grad_mode else contextlib.nullcontext():
            return self._wrapped.capture_graphs(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name not in _METHODS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._wrapped, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_METHODS})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wrapped._get_name()})"


def computes_gradients(module: nn.Module) -> bool:
    """True if calls of a module call backward themselves."""
    return isinstance(module, FunctionModule) and module.computes_gradients


def note_read(module: nn.Module, observers: Iterable[Any]) -> set[int]:
    """Let a function's module know what runs read; see `FunctionModule.note_read`."""
    return module.note_read(observers) if isinstance(module, FunctionModule) else set()


def check_function(function: Any, what: str) -> None:
    """Refuse what is no function that a graph can stand for. Raises ConfigError."""
    if isinstance(function, nn.Module):
        expected = "expected a function that calls it, its backward and the optimizer"
        instead = "For graphs of its forward and backward alone: wrap(module, training=True)"
        raise ConfigError(f"{what} got a {type(function).__name__}, a module; {expected}. {instead}.")
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{what} got {function!r}; expected a function, a bound method or another callable.")
    if isinstance(function, torch.jit.ScriptFunction):
        raise ConfigError(f"{what} got a TorchScript function; wrap the Python function it was made from.")
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    if any(kind(function) for kind in kinds):
        raise ConfigError(f"{what} got {function!r}, whose body runs after the call returns; pass a plain function.")
    try:
        inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{what} got {function!r}, whose arguments Python does not know; put it into a function of your own."
        ) from None


def _decorated_mode(function: Any) -> Callable[[], Any] | None:
    """Return what makes the mode of ``@torch.no_grad()`` or ``@torch.inference_mode()``, if a function has one."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "ctx_factory" not in names:  # the name in torch's decorator
        return None
    make: Callable[[], Any] = function.__closure__[names.index("ctx_factory")].cell_contents
    return make if isinstance(getattr(make, "__self__", None), (torch.no_grad, torch.inference_mode)) else None


def _item(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (LookupError, ValueError):
        return ABSENT


def _may_hold(value: Any) -> bool:
    """True unless a value is an object of a library that holds no tensors, such as a logger."""
    home = type(value).__module__
    return home.partition(".")[0] in ("builtins", "collections", "types", "torch") or not is_library(home)


def _update(held: dict[str, Any], now: dict[str, Any]) -> None:
    """Let a dict hold something else, without a write where nothing changes: writes are noticed."""
    for name in held.keys() - now.keys():
        held.pop(name, None)
    for name, value in now.items():
        if held.get(name) is not value:
            held[name] = value
