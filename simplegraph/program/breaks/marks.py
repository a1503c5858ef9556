"""Mark eager breaks: calls that run between two segments of a captured forward instead of inside a segment.

A break is marked on a function, on modules by name, or by an operator's tag. The mark alone has no effect: it is read
only by the thread's active recorder of breaks, in a piecewise capture or in a warmup before it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import inspect
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol, TypeVar, overload

import torch
from torch import nn

from simplegraph.base.errors import ConfigError
from simplegraph.base.patches import subclass


class BreakRecorder(Protocol):
    """Serves the calls of breaks in a thread while it is active.

    Attributes:
        operators: operators that break by themselves.
    """

    operators: frozenset[Any]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Serve a call of a break, and return its result to the forward."""


class _ThreadBreaks(threading.local):
    recorder: BreakRecorder | None = None
    inlined: frozenset[Any] = frozenset()


ACTIVE = _ThreadBreaks()


def recorder_of(function: Any) -> BreakRecorder | None:
    """Return the recorder that serves calls of this break; None if the break is a plain call.

    A break is a plain call in a backward that the forward runs, since a GPU's backward runs in another thread, which
    cannot end a segment; and in a transform of torch.func, whose tensors have no memory.
    """
    recorder = ACTIVE.recorder
    if recorder is None or function in ACTIVE.inlined or torch._C._current_graph_task_id() >= 0:
        return None
    return None if torch._C._functorch.peek_interpreter_stack() else recorder


@contextlib.contextmanager
def recording_breaks(recorder: BreakRecorder | None) -> Iterator[None]:
    """Let `recorder` serve every break of this thread in the block; None makes breaks plain calls."""
    before = ACTIVE.recorder
    ACTIVE.recorder = recorder
    try:
        seen = recorder is not None and recorder.operators
        with torch._C._IncludeDispatchKeyGuard(_KEY) if seen else contextlib.nullcontext():
            yield
    finally:
        ACTIVE.recorder = before


@contextlib.contextmanager
def inlining(functions: Collection[Any]) -> Iterator[None]:
    """Make these functions and operators plain calls in the block, whatever marks they have."""
    before, ACTIVE.inlined = ACTIVE.inlined, frozenset(functions)
    try:
        yield
    finally:
        ACTIVE.inlined = before


# A dispatch mode would see every operator of a forward, at several microseconds each. Instead, operators that break
# have a kernel for a spare dispatch key, which a thread includes only while it captures. Other operators lose no time.
_KEY_NAME = "TESTING_ONLY_GenericMode"
_KEY: Any = torch._C._dispatch_key_parse(_KEY_NAME)
_library: Any = torch.library  # typed loosely because torch leaves it untyped
_libraries: list[Any] = []  # kept alive: the kernels end with their library
_intercepted: set[Any] = set()
_lock = threading.Lock()


def breaking_operators() -> frozenset[Any]:
    """Return the operators that break by themselves: those tagged ``torch.Tag.cudagraph_unsafe``."""
    operators = _tagged(frozenset(torch._C._dispatch_get_all_op_names()))
    with _lock:
        for operator in operators - _intercepted:
            _intercept(operator)
    return operators


@functools.lru_cache(maxsize=1)
def _tagged(names: frozenset[str]) -> frozenset[Any]:
    """Pick the operators with the tag. Cached, since each name takes microseconds."""
    operators: set[Any] = set()
    for name in names:
        packet, _, overload = name.partition(".")
        operation = torch._C._get_operation_overload(packet, overload)
        if operation is not None and _UNSAFE in operation[2]:
            operators.update(_overload(name))
    return frozenset(operators)


_UNSAFE = getattr(torch.Tag, "cudagraph_unsafe", None)


def _overload(name: str) -> list[Any]:
    """Find the operator with a registered name, such as ``aten::sort.stable``; empty if Python cannot call it."""
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    try:
        return [getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")]
    except (AttributeError, RuntimeError):
        return []


def _intercept(operator: Any) -> None:
    if not _intercepted:
        fallback = _library.Library("_", "IMPL")
        fallback.fallback(_library.fallthrough_kernel, _KEY_NAME)
        _libraries.append(fallback)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(operator)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            if recorder is None or operator not in recorder.operators:
                return operator(*args, **kwargs)
            return recorder.call(operator, args, kwargs)

    namespace, _, _ = operator._schema.name.partition("::")
    library = _library.Library(namespace, "IMPL")
    library.impl(operator, kernel, _KEY_NAME)
    _libraries.append(library)
    _intercepted.add(operator)


def name_of(function: Any) -> str:
    """Name a break for reports and messages."""
    if isinstance(function, functools.partial):
        return name_of(function.func)
    if isinstance(function, torch._ops.OpOverload):
        return str(function)
    return getattr(function, "__qualname__", None) or str(function)


FunctionType = TypeVar("FunctionType", bound=Callable[..., Any])


class PaddedBreak(functools.partial[Any]):
    """A break that is passed padding rows, too."""


@overload
def eager_break(function: FunctionType) -> FunctionType: ...


@overload
def eager_break(*, padded: bool) -> Callable[[FunctionType], FunctionType]: ...


def eager_break(function: Any = None, *, padded: bool = False) -> Any:
    """Run this function between two graph segments of a PIECEWISE capture, eagerly at every replay.

        @sg.eager_break
        def attention(q, k, v, metadata): ...

    The function is a plain call in FULL mode, in graphs for training, inside another break, a backward or a transform
    of torch.func, and outside a capture.

    Tensors among the arguments are graph memory: they are valid until the function returns, and must not be kept. Other
    objects are passed as they are, so that the function reads their present state at every replay. Returned tensors are
    copied to the memory that the next segment reads, unless the function writes into an argument and returns this
    argument or nothing. The result must have the same structure, shapes and dtypes at every replay: let the function
    include everything up to the point where shapes are fixed again. If the function leaves a tensor elsewhere that the
    forward reads, the size runs eagerly: return the tensor.

    In a padded batch of a wrapped module the function is passed the real rows only. If these cannot be distinguished
    from the padding rows, only exact sizes are replayed.

    Args:
        function: a function or method; its Python code runs at every replay.
        padded: True to pass padding rows, too, for attention that an engine plans for the padded batch.

    Raises:
        ConfigError: `function` is a class or a module, or its body does not run when it is called (a generator, async).
    """
    if function is None:
        return functools.partial(eager_break, padded=padded)
    _check_function(function)
    if getattr(function, "_simplegraph_break", False):
        return function

    body = PaddedBreak(function) if padded else function

    @functools.wraps(function)
    def breaking(*args: Any, **kwargs: Any) -> Any:
        recorder = recorder_of(body)
        return function(*args, **kwargs) if recorder is None else recorder.call(body, args, kwargs)

    breaking._simplegraph_break = True  # type: ignore[attr-defined]
    return breaking


def _check_function(function: Any) -> None:
    if isinstance(function, (type, nn.Module)):
        got = (
            f"the class {function.__name__}" if isinstance(function, type) else f"a {type(function).__name__} instance"
        )
        raise ConfigError(
            f"eager_break got {got}; expected a function. "
            'Mark its forward, or use simplegraph.break_at(model, "*.name").'
        )
    if isinstance(function, (staticmethod, classmethod)):
        raise ConfigError(f"eager_break got a {type(function).__name__}; put @{type(function).__name__} above it.")
    if not callable(function):
        raise ConfigError(f"eager_break got {function!r}; expected a function.")
    body = function.func if isinstance(function, functools.partial) else function
    for deferred in (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction):
        if deferred(body) or deferred(getattr(body, "__call__", None)):  # noqa: B004
            raise ConfigError(
                f"eager_break got {name_of(function)}, a generator or async function, whose body would run after the "
                "break; break in a plain function that returns its result."
            )


def break_at(module: nn.Module, *patterns: str) -> list[str]:
    """Make every call of the matching submodules an eager break, for models whose code you cannot edit.

        sg.break_at(model, "*.self_attn")

    The whole call breaks, hooks included. Copies and pickles of the module keep their breaks, unless its class defines
    how it is copied (`__deepcopy__`, torch.fx). Graphs that were captured before are not changed: mark breaks first.

    Args:
        module: the model; changed in place.
        *patterns: shell patterns of names, as `named_modules` gives them.

    Returns:
        The names that matched, in the model's order.

    Raises:
        ConfigError: a pattern matches nothing, or `module` is not a module.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"break_at got {module!r}; expected a torch.nn.Module instance first.")
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ConfigError(f"break_at got the patterns {patterns!r}; expected at least one, such as '*.self_attn'.")
    named = {name: child for name, child in module.named_modules(remove_duplicate=False) if name}
    matches = {pattern: fnmatch.filter(named, pattern) for pattern in patterns}
    for pattern, matched in matches.items():
        if not matched:
            kinds = ", ".join(sorted({"*." * ("." in name) + name.rsplit(".", 1)[-1] for name in named})[:12])
            there_are = f"there are, among others, {kinds}" if kinds else f"{type(module).__name__} has no submodules"
            raise ConfigError(f"break_at: no submodule is named {pattern!r}; {there_are}.")
    names = [name for name in named if any(name in matched for matched in matches.values())]
    for name in names:
        if isinstance(named[name], torch.jit.ScriptModule):
            raise ConfigError(f"break_at: {name} is a TorchScript module; break at the Python module around it.")
    for name in names:
        kind: Any = type(named[name])
        if not hasattr(kind, "_simplegraph_unbroken"):
            named[name].__class__ = _breaking_class(kind)
    return names


def _breaking_class(original: Any) -> Any:
    """Make a subclass whose calls are breaks, and whose instances are pickled by the original's name."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original.__call__(self, *args, **kwargs)

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        state = self.__getstate__() if hasattr(original, "__getstate__") else vars(self)
        return _rebuilt, (original,), state

    call.__qualname__ = original.__qualname__
    members = {"__call__": eager_break(call), "__reduce_ex__": reduce, "_simplegraph_unbroken": original}
    return subclass(original, members, mark="_simplegraph_unbroken")


def _rebuilt(original: Any) -> Any:
    return object.__new__(_breaking_class(original))
