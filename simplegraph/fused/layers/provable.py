"""Finds functions whose results examples can prove, and copies functions with other global names.

Examples show little of a function that branches: it may compute something else for more rows, in another dtype, or in
training. So a function of the user's own is proven by examples only if it can do none of that: straight Python, of a
small vocabulary. One that transformers, timm, torchvision or diffusers wrote may branch. None is known by its text.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Collection, Mapping
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from torch import nn

from simplegraph.base.nested import ATOMS

_LIBRARIES = frozenset({"transformers", "timm", "torchvision", "diffusers"})
# Files with decorators that pass calls on: for gradient checkpointing, and to rename an argument of old callers.
_DECORATORS = ("transformers.modeling_layers", "transformers.utils.deprecation")
# Prefixes of the instructions of straight Python, in Python 3.10 to 3.14. Others may branch, compare, cut or write.
_STRAIGHT = (
    *("BINARY_", "BUILD_CONST_KEY_MAP", "BUILD_MAP", "BUILD_TUPLE", "CACHE", "CALL", "COPY", "DICT_MERGE", "DUP_TOP"),
    *("EXTENDED_ARG", "KW_NAMES", "LOAD_ATTR", "LOAD_CONST", "LOAD_FAST", "LOAD_GLOBAL", "LOAD_METHOD"),
    *("LOAD_SMALL_INT", "NOP", "POP_TOP", "PRECALL", "PUSH_NULL", "RESUME", "RETURN_", "ROT_", "STORE_FAST", "SWAP"),
    *("UNARY_NEGATIVE", "UNPACK_SEQUENCE"),
)
_CUTS = ("BINARY_SUBSCR", "BINARY_SLICE")


def provable_code(kind: type, function: Any, words: Collection[str]) -> tuple[FunctionType, ...]:
    """List a function and those that it calls by name, if examples can prove their common result; else ().

    Args:
        kind: the class whose method the function is; `object` if it is none.
        function: any object.
        words: names of attributes and of torch's functions that a user's own function may read.
    """
    functions: list[FunctionType] = []
    waiting = [function] if _finds_attributes_as_usual(kind) else []
    while waiting:
        current = undecorated(waiting.pop())
        if not isinstance(current, FunctionType):
            return ()
        if current in functions:
            continue
        functions.append(current)
        trusted = is_of_library(current)
        if not trusted and not _is_straight(current):
            return ()
        for name in current.__code__.co_names:
            method = _found_in(kind, name)
            meanings = [getattr(method, "__func__", method), current.__globals__.get(name)]
            inner = [meaning for meaning in meanings if isinstance(meaning, FunctionType) and not _is_of_torch(meaning)]
            modules = [meaning for meaning in meanings if isinstance(meaning, ModuleType)]
            # Other meanings are properties, classes, and numbers that may change.
            plain = (FunctionType, ModuleType, type(None))
            meant = all(isinstance(meaning, plain) for meaning in meanings) and (name in words or inner or modules)
            if not (meant or trusted) or any(sys.modules.get(module.__name__) is not module for module in modules):
                return ()
            waiting += inner
    return tuple(functions)


def _finds_attributes_as_usual(kind: type) -> bool:
    own = _found_in(kind, "__getattr__"), _found_in(kind, "__getattribute__")
    return own in ((nn.Module.__getattr__, object.__getattribute__), (None, object.__getattribute__))


def _found_in(kind: type, name: str) -> Any:
    """Return an attribute of a class as it is written, without running code of a descriptor; None if it has none."""
    return next((vars(owner)[name] for owner in kind.__mro__ if name in vars(owner)), None)


def is_of_library(function: FunctionType) -> bool:
    """True if a function is written in a file of a library that is known for layers without surprises."""
    name = function.__globals__.get("__name__", "")
    file = getattr(sys.modules.get(name), "__file__", None)
    return name.partition(".")[0] in _LIBRARIES and function.__code__.co_filename == file


def _is_of_torch(function: FunctionType) -> bool:
    return function.__globals__.get("__name__", "").partition(".")[0] == "torch"  # type: ignore[no-any-return]


@functools.lru_cache(1024)
def _is_straight(function: FunctionType) -> bool:
    """True if a function runs the same operators for any arguments, and writes only to its own names."""
    code = function.__code__
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    plain = not (code.co_freevars or code.co_cellvars) and all(value is None or value is False for value in defaults)
    return plain and all(map(_goes_straight_on, dis.get_instructions(code)))


def _goes_straight_on(instruction: dis.Instruction) -> bool:
    name, how = instruction.opname, instruction.argrepr
    # From Python 3.11 on, one instruction stands for all operators, in-place ones included, and later for indexing,
    # too.
    cuts = name in _CUTS or (name == "BINARY_OP" and (how.endswith("=") or how == "[]"))
    return name.startswith(_STRAIGHT) and not cuts


def settings_read(module: nn.Module, code: Collection[FunctionType]) -> dict[str, Any] | None:
    """Return the attributes that a module's code reads, but for tensors and parts; None if one cannot be compared."""
    attributes = vars(module)
    names = {name for function in code for name in function.__code__.co_names}
    read = {name: attributes[name] for name in sorted(names.intersection(attributes)) if name not in _OF_MODULES}
    return read if all(map(_is_setting, read.values())) else None


_OF_MODULES = vars(nn.Module()).keys() - {"training"}
_SETTINGS = (*ATOMS, FunctionType, BuiltinFunctionType, functools.partial)


def _is_setting(value: Any) -> bool:
    """True for a plain value or a function: others may change and be equal still, and a cache would own them."""
    return issubclass(type(value), _SETTINGS) or (type(value) is tuple and all(map(_is_setting, value)))


def plain_class(module: Any) -> Any:
    """Return the class that a module had before `optimize` changed it."""
    return getattr(type(module), "_simplegraph_plain", type(module))


def undecorated(function: Any) -> Any:
    """Return the function inside transformers' decorators, which pass their arguments on."""
    while getattr(function, "__globals__", {}).get("__name__") in _DECORATORS and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Copy a function with some of its global names replaced; the original keeps its own."""
    named = {**function.__globals__, **names}
    copy = FunctionType(function.__code__, named, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class GlobalNames:
    """The global names of functions, and their values.

    Args:
        *functions: of Python.
    """

    def __init__(self, *functions: FunctionType) -> None:
        read = [(function.__globals__, name) for function in functions for name in function.__code__.co_names]
        self._meanings = [(names, name, names[name]) for names, name in read if name in names]

    def are_still(self) -> bool:
        """True if every name still has its meaning."""
        return all(names.get(name) is value for names, name, value in self._meanings)
