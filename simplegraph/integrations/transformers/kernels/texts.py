"""Functions that are known by what they do, and copies of them in which names mean something else."""

from __future__ import annotations

import dis
import inspect
from collections.abc import Mapping
from types import FunctionType
from typing import Any


def instructions(function: Any) -> tuple[Any, ...]:
    """What a function does, whatever its name, lines and docstring are; () for what is no plain function."""
    if not isinstance(function, FunctionType):
        return ()
    code = function.__code__
    rest = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, rest, code.co_varnames
    return *arguments, *((each.opname, each.argval) for each in dis.get_instructions(code))


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """The same code in a copy of its module's names, of which some mean something else: nobody else's are changed."""
    known = {**function.__globals__, **names}
    changed = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
