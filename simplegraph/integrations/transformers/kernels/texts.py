"""Recognizes functions by their instructions, and copies them with some global names replaced."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

Found = TypeVar("Found")


def recognize(model: nn.Module, known: Callable[[Any], Found | None]) -> dict[nn.Module, Found]:
    """Map the modules of a model to the result of `known` for their class, if that result is true."""
    modules = list(model.modules())
    found = {kind: known(kind) for kind in set(map(type, modules))}
    return {module: what for module in modules if (what := found[type(module)])}


def instructions(function: Any) -> tuple[Any, ...]:
    """Return a function's signature and instructions, without names, lines and docstring; () if it is no function."""
    if not isinstance(function, FunctionType):
        return ()
    code = function.__code__
    rest = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, rest, code.co_varnames
    return *arguments, *((each.opname, each.argval) for each in dis.get_instructions(code))


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Copy a function with some of its global names replaced; the original keeps its own."""
    known = {**function.__globals__, **names}
    changed = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
