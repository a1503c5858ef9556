"""Recognizes functions by their text, and copies them with some global names replaced.

A library has one text under many names: a decoder layer of transformers is that of sixty families. A function is known
if it equals a known one, instruction for instruction, and its global names mean the same; a changed one is unknown.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeVar

from torch import nn

Found = TypeVar("Found")
_CHECKPOINTING = "transformers.modeling_layers"


class KnownTexts(Mapping[Any, Found]):
    """Maps functions to what is known of their text.

    Args:
        texts: known functions and what is known of them.
    """

    def __init__(self, texts: Sequence[tuple[Any, Found]]) -> None:
        self._known = {instructions(text): (text, _global_names(text), found) for text, found in texts}

    def __getitem__(self, function: Any) -> Found:
        function = _without_checkpointing(function)
        text, names, found = self._known[instructions(function)]
        if any(function.__globals__.get(name) is not text.__globals__[name] for name in names):
            raise KeyError(function)
        return found

    def __iter__(self) -> Iterator[Any]:
        return iter(text for text, _, _ in self._known.values())

    def __len__(self) -> int:
        return len(self._known)


def recognize(model: nn.Module, known: Mapping[Any, Found]) -> dict[nn.Module, Found]:
    """Map the modules of a model whose class has a known forward to what is known of it."""
    modules = list(model.modules())
    kinds: set[Any] = set(map(type, modules))
    found = {kind: known.get(kind.forward) for kind in kinds}
    return {module: what for module in modules if (what := found[type(module)]) is not None}


def instructions(function: Any) -> tuple[Any, ...]:
    """Return a function's signature and instructions, without names, lines and docstring; () if it is no function."""
    if not isinstance(function, FunctionType):
        return ()
    return _read(function.__code__)


@functools.lru_cache(512)
def _read(code: CodeType) -> tuple[Any, ...]:
    rest = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    arguments = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, rest, code.co_varnames
    return *arguments, *((each.opname, each.argval) for each in dis.get_instructions(code))


def _without_checkpointing(function: Any) -> Any:
    """Return the function in transformers' wrapper for gradient checkpointing, which calls it with what it gets."""
    while getattr(function, "__globals__", {}).get("__name__") == _CHECKPOINTING and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _global_names(text: FunctionType) -> list[str]:
    """List the global names of a known text that its module defines: builtins mean the same everywhere."""
    used = {each.argval for each in dis.get_instructions(text) if each.opname == "LOAD_GLOBAL"}
    return sorted(used & text.__globals__.keys())


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Copy a function with some of its global names replaced; the original keeps its own."""
    known = {**function.__globals__, **names}
    changed = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed
