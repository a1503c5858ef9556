"""Knows functions by their instructions, and copies them with names that mean something else."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

Found = TypeVar("Found")


def recognize(model: nn.Module, known: Callable[[Any], Found | None]) -> dict[nn.Module, Found]:
    """List the modules below a model whose class `known` returns something true for, with what it returned."""
    modules = list(model.modules())
    found = {kind: known(kind) for kind in set(map(type, modules))}
    return {module: what for module in modules if (what := found[type(module)])}


def instructions(function: Any) -> tuple[Any, ...]:
    """Return what a function does, whatever its name, lines and docstring are; () for what is no plain function."""
    if not isinstance(function, FunctionType):
        return ()
    code = function.__code__
    rest = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, rest, code.co_varnames
    return *arguments, *((each.opname, each.argval) for each in dis.get_instructions(code))


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Copy a function, and the names of its module, of which some mean something else in the copy only."""
    known = {**function.__globals__, **names}
    changed = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
