"""Other forwards for modules, while one thread runs them; and functions known by what they do."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@contextlib.contextmanager
def other_forwards(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """In here these modules run these forwards when this thread calls them; a module is no argument of its own."""
    thread = threading.get_ident()
    taken = []
    try:
        for module, forward in forwards.items():
            attributes = vars(module)
            if "forward" not in attributes:  # else somebody gave it another
                attributes["forward"] = _Swapped(_forward, module, forward, thread)
                taken.append(attributes)
        yield
    finally:
        for attributes in taken:
            attributes.pop("forward", None)


class _Swapped(functools.partial[Any]):
    """A module's other forward; copies and pickles that are made meanwhile have the module's own."""

    def __reduce__(self) -> tuple[Any, ...]:
        module = self.args[0]
        return functools.partial, (type(module).forward, module)


def _forward(module: Any, forward: Forward, thread: int, *args: Any, **kwargs: Any) -> Any:
    if threading.get_ident() != thread:
        return type(module).forward(module, *args, **kwargs)
    return forward(*args, **kwargs)


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
