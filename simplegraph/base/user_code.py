"""Finds in a traceback the user's line, what it asked for, and the submodule that it belongs to."""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

# Operations whose results have as many elements as the values say.
_DYNAMIC = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
# Functions of torch.linalg that look if they succeeded, and have a form, named with _ex, that does not.
_CHECKED = {"solve", "inv", "cholesky", "lu_factor", "ldl_factor"}
_COMPARISONS = {"isnan", "isinf", "isfinite", "isin", "eq", "ne", "lt", "le", "gt", "ge", "bool", "logical_not"}
_OF_MASKS = (ast.Compare, ast.BitAnd, ast.BitOr, ast.BitXor, ast.Invert)
_MASKS = (torch.bool, torch.uint8)
_TEXT = {"__repr__", "__str__", "__format__"}  # of a tensor, called by print, str and f-strings


class CalledLine(NamedTuple):
    """One line of a traceback, and the frame that was running it."""

    frame: FrameType
    summary: traceback.FrameSummary

    @property
    def is_users(self) -> bool:
        """True if it is neither torch's nor this library's."""
        return _is_users(self.summary.filename)

    @property
    def is_own(self) -> bool:
        """True if it is the user's and in no installed package, so that its functions can be decorated."""
        return self.is_users and _package_path(self.summary.filename) is None

    @property
    def module(self) -> nn.Module | None:
        """The module whose method this is."""
        found = self.frame.f_locals.get("self")
        return found if isinstance(found, nn.Module) else None

    def __str__(self) -> str:
        return _described(self.summary)


def called_lines(*errors: BaseException) -> list[CalledLine]:
    """Return the lines of errors' tracebacks, each error raised while handling the next: outermost first."""
    lines: list[CalledLine] = []
    for error in errors:
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        lines += map(CalledLine, frames, traceback.extract_tb(error.__traceback__))
    return lines


def users_line(lines: Sequence[CalledLine]) -> str | None:
    """Describe the innermost line that is the user's; one in a package with the line of their own that led there."""
    users = [line for line in lines if line.is_users]
    own = next((line for line in reversed(users) if line.is_own), None)
    if not users or own in (None, users[-1]):
        return str(users[-1]) if users else None
    return f"{users[-1]}, called at {own}"


def running_lines() -> list[CalledLine]:
    """Return the lines that are running, outermost first."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    return [CalledLine(*pair) for pair in zip(reversed(frames), traceback.extract_stack(frames[0]), strict=True)]


def running_line() -> tuple[str, int] | None:
    """Find the innermost line that is running and the user's: its file and its number."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def described_line(filename: str, number: int) -> str:
    """Describe a line: its file, its number and its text."""
    return _described(traceback.FrameSummary(filename, number, ""))


def is_printing(lines: Sequence[CalledLine]) -> bool:
    """True if what failed was to make text of a tensor."""
    inside = (
        line.summary
        for line in lines[_innermost_users(lines) + 1 :]
        if os.path.abspath(line.summary.filename).startswith(_TORCH)
    )
    return any(line.name in _TEXT or line.filename.endswith("_tensor_str.py") for line in inside)


def is_inside(lines: Sequence[CalledLine], path: str, name: str) -> bool:
    """True if a line below the user's own is in a file of this path, in the function of this name if one is given."""
    own = max((index for index, line in enumerate(lines) if line.is_own), default=-1)
    inside = (line.summary for line in lines[own + 1 :] if path in line.summary.filename.replace(os.sep, "/"))
    return any(name in ("", line.name) for line in inside)


def checked_solver(lines: Sequence[CalledLine]) -> str | None:
    """Name the function of torch.linalg that the failing line calls if it looks at the device."""
    index = _innermost_users(lines)
    for node in _expressions(lines[index].summary) if index >= 0 else ():
        if isinstance(node, ast.Call) and _name(node.func) in _CHECKED and "linalg" in ast.unparse(node.func):
            return f"torch.linalg.{_name(node.func)}"
    return None


def dynamic_shape(lines: Sequence[CalledLine]) -> str | None:
    """Name the operation whose result's shape depends on values if the failing line holds one."""
    index = _innermost_users(lines)
    for node in _expressions(lines[index].summary) if index >= 0 else ():
        if isinstance(node, ast.Call) and _name(node.func) in _DYNAMIC:
            return _name(node.func)
        if isinstance(node, ast.Call) and _name(node.func) == "where" and len(node.args) == 1:
            return "torch.where of one argument"
        if isinstance(node, ast.Subscript) and _is_mask(node.slice, lines[index].frame):
            return "a boolean mask"
    return None


class FailingPart(NamedTuple):
    """The submodule that a failing line belongs to.

    Attributes:
        root: the outermost module that was called.
        name: the submodule's dotted name in it; empty for the root itself.
        decorable: True if code of the user's own ran inside it.
    """

    root: nn.Module
    name: str
    decorable: bool

    @property
    def pattern(self) -> str:
        """Its name for `break_at`: a layer of a list stands for all of them."""
        steps = self.name.split(".")
        holders = [self.root.get_submodule(".".join(steps[:index])) for index in range(len(steps))]
        return ".".join("*" if isinstance(it, nn.ModuleList) else step for it, step in zip(holders, steps, strict=True))


def failing_part(lines: Sequence[CalledLine]) -> FailingPart | None:
    """Find the submodule that failed; None if no module was called."""
    modules = [(index, line.module) for index, line in enumerate(lines) if line.module is not None]
    if not modules:
        return None
    root: Any = modules[0][1]
    names = {id(module): name for name, module in root.named_modules()}
    name = next(names[id(module)] for _, module in reversed(modules) if id(module) in names)
    start = next(index for index, module in modules if names.get(id(module)) == name)
    generated = (line.summary.filename.startswith("<") for line in lines[start:])
    return FailingPart(root, name, any(generated) or any(line.is_own for line in lines[start:]))


def _innermost_users(lines: Sequence[CalledLine]) -> int:
    return max((index for index, line in enumerate(lines) if line.is_users), default=-1)


def _expressions(line: traceback.FrameSummary) -> Iterator[ast.AST]:
    """Yield the expression that failed, or, before Python 3.11, all that its line holds."""
    source = linecache.getline(line.filename, line.lineno or 0)
    start, end = getattr(line, "colno", None), getattr(line, "end_colno", None)
    whole = start is None or getattr(line, "end_lineno", None) != line.lineno
    text = source.strip() if whole else source.encode()[start:end].decode(errors="replace")
    for complete in (text, f"{text} pass"):
        with contextlib.suppress(SyntaxError):
            body = ast.parse(complete).body
            yield from itertools.chain(*map(ast.walk, body)) if whole else (vars(it).get("value", it) for it in body)
            return


def _is_mask(index: ast.expr, frame: FrameType) -> bool:
    """True if an index is made of boolean masks, as its text or present values say."""
    for node in ast.walk(index):
        value = _value(node, frame)
        compares = isinstance(node, ast.Call) and _name(node.func) in _COMPARISONS
        if compares or isinstance(node, _OF_MASKS) or (isinstance(value, Tensor) and value.dtype in _MASKS):
            return True
    return False


def _value(node: ast.AST, frame: FrameType) -> Any:
    """Look up a name, or an attribute that needs no code to run."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if not isinstance(node, ast.Attribute):
        return None
    attributes = getattr(_value(node.value, frame), "__dict__", {})
    return attributes.get(node.attr, attributes.get("_buffers", {}).get(node.attr))


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_TYPED_IN = ("<stdin>", "<ipython-input", "<python-input")
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep


def _described(line: traceback.FrameSummary) -> str:
    source = linecache.getline(line.filename, line.lineno or 0).strip()
    typed_in = line.filename.startswith("<")
    path = _package_path(line.filename) or (line.filename if typed_in else os.path.relpath(line.filename))
    return f"{path}:{line.lineno} `{source}`"


@functools.lru_cache(maxsize=4096)
def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return filename.startswith(_TYPED_IN)
    path = os.path.abspath(filename)
    if path.startswith(_STDLIB) and _package_path(path) is None:
        return False
    return not path.startswith((_OWN, _TORCH))


def _package_path(filename: str) -> str | None:
    """Return the path of a file inside the folder of installed packages; None for other files."""
    for folder in ("site-packages", "dist-packages"):
        _, found, path = filename.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return path
    return None
