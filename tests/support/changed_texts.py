"""Functions with a changed text, whose source is known as if they came from a file."""

from __future__ import annotations

import inspect
import itertools
import linecache
import textwrap
from types import CodeType, FunctionType, ModuleType
from typing import Any

_numbers = itertools.count()


def changed(function: Any, old: str, new: str) -> Any:
    """Return a function whose source has `new` where that of another has `old`."""
    source = textwrap.dedent(inspect.getsource(function.__code__))
    if source.count(old) != 1:
        raise ValueError(f"{old!r} is {source.count(old)} times in the source of {function.__qualname__}")
    return from_source(source.replace(old, new), function)


def from_source(source: str, like: Any) -> FunctionType:
    """Return a function of this source, with the global names and defaults of another."""
    place = f"changed_text_{next(_numbers)}.py"
    # Methods of what a file imports are called by other instructions.
    imported = [name for name, value in like.__globals__.items() if isinstance(value, ModuleType)]
    source = f"import {','.join(imported)}\n{source}"
    linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place
    constants = compile(source, place, "exec").co_consts
    code = next(each for each in constants if isinstance(each, CodeType) and each.co_name != "<lambda>")
    return FunctionType(code, like.__globals__, code.co_name, like.__defaults__)
