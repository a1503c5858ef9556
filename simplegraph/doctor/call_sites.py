"""Find the user's line that makes a call, and the name of the called object in its code."""

from __future__ import annotations

import ast
import contextlib
import inspect
import linecache
import os
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from simplegraph.base.failures import is_own

_OWN, _TORCH = (str(Path(file).parent.resolve()) + os.sep for file in (Path(__file__).parent, torch.__file__))
_DOORS = (_OWN + "__main__.py", str(Path(__file__).parent) + os.sep)


_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR  # a call runs nothing of it yet


class Method(NamedTuple):
    """A method of a module's class."""

    kind: type
    name: str


class Site(NamedTuple):
    """A user's line that makes a call.

    Attributes:
        called: the called expression, such as "self.policy"; empty if it cannot be read.
        direct: False if a library is between the line and the call.
        file, number: the file and the number of the line.
        code: the code of the line's function; codes: (code, line) of all functions up to the call, innermost first.
        methods: the methods of modules up to the call, innermost first.
        scaled: True if torch's GradScaler is between the line and the call.
    """

    called: str
    direct: bool
    file: str
    number: int
    code: types.CodeType
    codes: Mapping[types.CodeType, int]
    methods: Sequence[Method]
    scaled: bool

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.number}"


def find_site(frame: types.FrameType | None) -> Site | None:
    """Find the user's line nearest to a frame that makes a call; None if this library makes it."""
    frames = [caller for caller, _ in traceback.walk_stack(frame)]
    files = [caller.f_code.co_filename for caller in frames]
    if any(file.startswith(_OWN) and not file.startswith(_DOORS) for file in files):
        return None
    others = [
        caller
        for caller, file in zip(frames, files, strict=True)
        if not file.startswith((_OWN, _TORCH, "<frozen")) and "runpy" not in file
    ]
    if not others:
        return None
    users = next((caller for caller in others if is_own(caller.f_code.co_filename)), others[0])
    codes = {caller.f_code: caller.f_lineno for caller in reversed(others)}
    scaled, direct = any("grad_scaler" in file for file in files), users is others[0]
    methods = [method for caller in others if (method := _method(caller)) is not None]
    line = users.f_code.co_filename, users.f_lineno, users.f_code
    return Site(_called(users), direct, *line, codes, methods, scaled)


def _method(frame: types.FrameType) -> Method | None:
    """Return the method of a module that a frame runs; None if it runs other code, or only a part of a call."""
    code = frame.f_code
    owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if not isinstance(owner, nn.Module) or code.co_flags & _LATER:
        return None
    function: Any = inspect.unwrap(inspect.getattr_static(type(owner), code.co_name, None))
    return Method(type(owner), code.co_name) if getattr(function, "__code__", None) is code else None


def _called(frame: types.FrameType) -> str:
    """Return the source of the expression that a frame is calling, such as "self.policy"; empty if unreadable."""
    code: Any = frame.f_code
    if not hasattr(code, "co_positions"):  # before Python 3.11
        return ""
    start, end, left, right = list(code.co_positions())[frame.f_lasti // 2]
    lines = [line.encode() for line in linecache.getlines(code.co_filename)[(start or 1) - 1 : end]]
    if not lines or left is None or right is None:
        return ""
    lines[-1] = lines[-1][:right]
    lines[0] = lines[0][left:]
    with contextlib.suppress(SyntaxError, UnicodeDecodeError):
        call = ast.parse(b"(" + b"".join(lines) + b")", mode="eval").body
        return ast.unparse(call.func) if isinstance(call, ast.Call) else ""
    return ""
