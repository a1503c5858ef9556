"""Recognizes functions by a digest of their text, and copies them with some global names replaced.

A library has one text under many names: a decoder layer of transformers is that of sixty families. A function is known
if its digest is: its syntax tree is that of a known one, and its global names mean the same.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import linecache
import operator
import sys
import tokenize
import warnings
from collections.abc import Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

from torch import nn

from simplegraph.fused.layers.digests import DIGESTS

Found = TypeVar("Found")
# Wrappers of transformers, for gradient checkpointing and for arguments that have a new name.
_WRAPPERS = ("transformers.modeling_layers", "transformers.utils.deprecation")
_LEFT_OUT = ("ctx", "kind", "type_comment")  # fields of a syntax tree that say nothing that others do not
_instructions = operator.attrgetter("co_name", "co_code", "co_consts", "co_names", "co_varnames")


class _Text(NamedTuple):
    """A function's arguments and statements without layout, and the names that it reads from its module."""

    written: str
    names: tuple[str, ...]


def recognize(model: nn.Module, known: Mapping[str, Found]) -> dict[nn.Module, Found]:
    """Map the modules of a model whose class has a known forward to what is known of it, by its name."""
    modules = list(model.modules())
    kinds: set[Any] = set(map(type, modules))
    found = {kind: known.get(known_name(kind.forward)) for kind in kinds}
    return {module: what for module in modules if (what := found[type(module)]) is not None}


def known_name(function: Any) -> str:
    """Return the name in its library of the known function that has a function's text; "" if it is unknown."""
    return DIGESTS.get(digest(function), "").rpartition(":")[2]


def digest(function: Any, *callers: Any) -> str:
    """Return the digest of a function's arguments and statements, and of what its global names mean.

    Its name, defaults, annotations, decorators and docstring are no part of it.

    Args:
        function: any object.
        callers: functions whose digests need this one's.

    Returns:
        Hexadecimal digits; "" if it is no function, has no source, or reads other globals than modules and functions.
    """
    function = unwrapped(function)
    if not isinstance(function, FunctionType) or function in callers:
        return ""
    code, names = function.__code__, function.__globals__
    linecache.lazycache(code.co_filename, names)  # finds sources in archives
    modules = tuple(name for name in code.co_names if isinstance(names.get(name), ModuleType))
    text = _read(code, code.co_filename, modules)
    if text is None:
        return ""
    meanings = [_meaning(name, function, callers) for name in text.names]
    return hashlib.sha256("\n".join([text.written, *meanings]).encode()).hexdigest()[:16] if all(meanings) else ""


def _meaning(name: str, function: FunctionType, callers: tuple[Any, ...]) -> str:
    """Describe a global name: a function of the same module by its digest, what is imported by its own name."""
    if name not in function.__globals__:
        return f"{name}: builtin"
    value = function.__globals__[name]
    if isinstance(value, ModuleType):
        return f"{name}: {value.__name__}" if sys.modules.get(value.__name__) is value else ""
    if not isinstance(value, FunctionType):
        return ""
    if value.__module__ == function.__module__:
        inner = digest(value, *callers, function)
        return f"{name}: {inner}" if inner else ""
    imported = getattr(sys.modules.get(value.__module__), value.__name__, None) is value
    return f"{name}: {value.__module__}.{value.__name__}" if imported else ""


@functools.lru_cache(512)
def _read(code: CodeType, file: str, modules: tuple[str, ...]) -> _Text | None:
    """Read a function's text; None if it has no source, or if the source is not what runs.

    Args:
        code: of the function; equal codes can be from several files.
        file: of its source.
        modules: global names that are modules.
    """
    # Methods of what the same file imports are called by other instructions.
    head = f"import {','.join(modules)}\n" if modules else ""
    try:
        block = "".join(inspect.getblock(linecache.getlines(file)[code.co_firstlineno - 1 :]))
        with warnings.catch_warnings():  # of the compiler, which gave them before
            warnings.simplefilter("ignore")
            tree = ast.parse(f"{head}if True:\n{block}" if block[:1].isspace() else f"{head}{block}")
            compiled = compile(tree, file, "exec").co_consts
    except (SyntaxError, ValueError, tokenize.TokenError):  # the file is another one by now
        return None
    node = next((each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)), None)
    same = any(_instructions(each) == _instructions(code) for each in compiled if isinstance(each, CodeType))
    if node is None or node.name != code.co_name or not same:
        return None
    rest = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, rest
    arguments = [each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)]
    loaded = {each.id for part in node.body for each in ast.walk(part) if isinstance(each, ast.Name)}
    names = loaded.difference(code.co_varnames, code.co_cellvars)
    return _Text(f"{counts} {arguments} {_written(node.body)}", tuple(sorted(names)))


def _written(node: Any) -> str:
    """Write out a syntax tree without docstrings, the same on every version of Python."""
    if isinstance(node, list):
        computing = (each for each in node if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)))
        return f"[{','.join(map(_written, computing))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, getattr(node, name, None)) for name in node._fields if name not in _LEFT_OUT)
    parts = (f"{name}={_written(value)}" for name, value in fields if value is not None and value != [])
    return f"{type(node).__name__}({','.join(parts)})"


def unwrapped(function: Any) -> Any:
    """Return the function inside transformers' wrappers, which call it with what they get, under its present names."""
    while getattr(function, "__globals__", {}).get("__name__") in _WRAPPERS and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def with_names(function: FunctionType, names: Mapping[str, Any]) -> FunctionType:
    """Copy a function with some of its global names replaced; the original keeps its own."""
    known = {**function.__globals__, **names}
    changed = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    changed.__kwdefaults__ = function.__kwdefaults__
    return changed


class GlobalNames:
    """The global names of functions, and what they mean.

    Args:
        *functions: of Python.
    """

    __slots__ = ("_known",)

    def __init__(self, *functions: FunctionType) -> None:
        read = [(each.__globals__, name) for each in functions for name in each.__code__.co_names]
        self._known = [(names, name, names[name]) for names, name in read if name in names]

    def are_still(self) -> bool:
        """True if none means something else by now."""
        return all(names.get(name) is value for names, name, value in self._known)
