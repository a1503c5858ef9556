"""`GraphedFunction`: a wrapped function, whose calls go through graphs; and which functions can be wrapped."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from simplegraph.base.errors import ConfigError
from simplegraph.base.objects import class_member, own_dict
from simplegraph.base.patches import original_of
from simplegraph.guard.functions import decorated_mode
from simplegraph.manager.stats import CaptureSummary, GraphReport, GraphStats

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class GraphedFunction(Generic[P, R]):
    """A function whose calls go through graphs, with the methods of `CudaGraphWrapper` that concern graphs.

    Args:
        function: the original function.
        wrapped: the wrapped `FunctionModule` of the function.
        again: makes a `GraphedFunction` of another function, with settings; None if that is impossible.
    """

    # Attributes of the wrapped module, which `__getattr__` returns.
    configure_graphs: Callable[..., None]
    use_graph_pool: Callable[..., None]
    use_ranks: Callable[..., None]
    static_inputs: Callable[..., dict[str, Tensor]]
    reset_graphs: Callable[[], None]
    graph_report: Callable[..., GraphReport]
    graph_stats: GraphStats
    graph_manager: Any  # a CudaGraphManager, or None
    sleep: Callable[..., Any]  # returns a SleepReport
    wake: Callable[..., None]

    def __init__(
        self, function: Callable[P, R], wrapped: Any, again: Callable[..., GraphedFunction[Any, Any]] | None = None
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._wrapped, self._plain, self._again = wrapped, function, again
        self._grad_mode = decorated_mode(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if is_dynamo_compiling():
            self._wrapped._count_compiled()
            return self._plain(*args, **kwargs)
        if self._grad_mode is None:
            return self._wrapped(*args, **kwargs)  # type: ignore[no-any-return]
        with self._grad_mode():
            return self._wrapped(*args, **kwargs)  # type: ignore[no-any-return]

    @overload
    def __get__(self, instance: None, owner: Any = None) -> GraphedFunction[P, R]: ...
    @overload
    def __get__(
        self: GraphedFunction[Concatenate[Any, Q], R], instance: object, owner: Any = None
    ) -> GraphedFunction[Q, R]: ...
    def __get__(self, instance: Any, owner: Any = None) -> GraphedFunction[Any, R]:
        """Bind a method of a class body: each instance has its own graphs, kept in its ``__dict__``.

        Raises:
            ConfigError: the instance has no such dict.
        """
        function: Any = vars(self)["__wrapped__"]
        if instance is None or self._again is None or class_member(type(function), "__get__") is None:
            return self
        instance = original_of(instance)
        bound = function.__get__(instance, owner)
        if type(bound) is not types.MethodType or bound.__self__ is not instance:  # a static method
            return self
        attributes = own_dict(instance)
        if type(attributes) is not dict:
            kind = "a class" if issubclass(type(instance), type) else f"a {type(instance).__name__} without a __dict__"
            raise ConfigError(
                f"@simplegraph.wrap on {function.__qualname__} got {kind}, which has no place for graphs of its own. "
                'Name "__dict__" in its __slots__; for a class method, leave @simplegraph.wrap away and wrap the bound '
                "method: run = simplegraph.wrap(Class.method)."
            )
        name = function.__qualname__
        graphed = attributes.get(name)
        if graphed is None or vars(graphed)["__wrapped__"] != bound:  # it belongs to the original of a shallow copy
            runner = self._wrapped._graph_runner
            graphed = attributes[name] = self._again(bound, runner.settings, pool=runner._pool)
        return graphed

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle by name if the name leads to this object, as under a decorator; else with the settings."""
        if self._again is None:
            return super().__reduce_ex__(protocol)
        attributes = vars(self)
        named: Any = sys.modules.get(str(attributes.get("__module__")))
        name = str(attributes.get("__qualname__"))
        for part in name.split("."):
            named = (own_dict(named) or {}).get(part)
        return (
            name if named is self else (self._again, (attributes["__wrapped__"], self._wrapped._graph_runner.settings))
        )

    def __prepare_scriptable__(self) -> Callable[P, R]:
        """Return the function itself, which torch.jit.script compiles without graphs."""
        function: Callable[P, R] = vars(self)["__wrapped__"]
        return function

    def capture_graphs(self, *args: Any, **kwargs: Any) -> CaptureSummary:
        """Capture all sizes now, from example arguments; see `CudaGraphWrapper.capture_graphs`."""
        with self._grad_mode() if self._grad_mode else contextlib.nullcontext():
            return self._wrapped.capture_graphs(*args, **kwargs)  # type: ignore[no-any-return]

    def capture_next(self, *args: Any, **kwargs: Any) -> CaptureSummary:
        """Capture the next size, from example arguments; see `CudaGraphWrapper.capture_next`."""
        with self._grad_mode() if self._grad_mode else contextlib.nullcontext():
            return self._wrapped.capture_next(*args, **kwargs)  # type: ignore[no-any-return]

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if name not in GraphedFunction.__annotations__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self._wrapped, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *GraphedFunction.__annotations__})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._wrapped._get_name()})"


def check_function(function: Any, caller: str) -> None:
    """Refuse objects that are not functions, and functions that no graph can replace. Raises ConfigError."""
    if isinstance(function, nn.Module):
        expected = "expected a function that calls it, its backward and the optimizer"
        instead = "For graphs of its forward and backward alone: wrap(module, training=True)"
        raise ConfigError(f"{caller} got a {type(function).__name__}, a module; {expected}. {instead}.")
    if isinstance(function, type) or not callable(function):
        raise ConfigError(f"{caller} got {function!r}; expected a function, a bound method or another callable.")
    if isinstance(function, torch.jit.ScriptFunction):
        made_from = "the Python function it was made from, or a function that calls it"
        raise ConfigError(f"{caller} got a TorchScript function; wrap {made_from}.")
    kinds = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
    try:
        is_deferred = any(kind(function) for kind in kinds)
        inspect.signature(function)
    except Exception:  # a callable object may have no signature
        raise ConfigError(
            f"{caller} got {function!r}, whose arguments Python does not know; put it into a function of your own."
        ) from None
    if is_deferred:
        raise ConfigError(f"{caller} got {function!r}, whose body runs after the call returns; pass a plain function.")
