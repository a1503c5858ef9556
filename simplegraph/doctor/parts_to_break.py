"""Find, by trying, the parts of a module that must run eagerly so that the rest can be captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from torch import nn

from simplegraph.guard.functions import FunctionModule
from simplegraph.program.breaks.marks import break_at

_TRIES = 24
_NOT_CALLED = (nn.ModuleList, nn.ModuleDict)  # they only hold others


@contextlib.contextmanager
def broken_at(module: nn.Module, patterns: Sequence[str]) -> Iterator[None]:
    """Make these parts eager breaks in the block."""
    kinds: list[tuple[Any, Any]] = [(child, type(child)) for child in module.modules()]
    try:
        if patterns:
            break_at(module, *patterns)
        yield
    finally:
        for child, kind in kinds:
            if type(child) is not kind:
                child.__class__ = kind


class Obstacle(NamedTuple):
    """The obstacle to a capture.

    Attributes:
        part: the pattern of submodules that no graph can contain, or that cannot be breaks; empty for the whole module.
        problem: the problem, as a sentence.
    """

    part: str
    problem: str


def find_parts(
    module: nn.Module, find_obstacle: Callable[[], Obstacle | None]
) -> tuple[dict[str, tuple[str, ...]], str]:
    """Find the parts that must be eager breaks.

    If a capture fails, the failing part becomes a break, and the capture is tried again. If a part cannot be a break,
    the part around it becomes one instead.

    Args:
        module: the module, or the `FunctionModule` of a function.
        find_obstacle: captures the module with its present breaks in pieces, and returns the obstacle; None if none.

    Returns:
        Name of a module in the user's code -> patterns for `break_at`, in the order of the module; empty if the whole
        module would have to break. And the problem that remained; empty if there is none, or if no part was tried.
    """
    patterns: list[str] = []
    last = ""
    # No pattern may name these as a whole: of a module the root, of a function the modules that it reaches.
    wholes = [name for name, _ in module.named_children()] if isinstance(module, FunctionModule) else [""]
    for _ in range(_TRIES):
        with broken_at(module, patterns):
            obstacle = find_obstacle()
        if obstacle is None:
            return _by_model(module, patterns, wholes), ""
        part, last = obstacle
        covering = next((pattern for pattern in patterns if f"{part}.".startswith(f"{pattern}.")), None)
        if covering is not None:
            part = _around(module, covering)
        if not part or part in wholes:
            break
        patterns = [pattern for pattern in patterns if not pattern.startswith(f"{part}.")] + [part]
    return {}, last if patterns else ""


def _by_model(module: nn.Module, patterns: Sequence[str], wholes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Sort the patterns by their first match, and group them by the names that the user's code has for the models."""
    names = [name for name, _ in module.named_modules(remove_duplicate=False)]
    by_model: dict[str, tuple[str, ...]] = {}
    for pattern in sorted(patterns, key=lambda it: next(at for at, name in enumerate(names) if fnmatchcase(name, it))):
        whole = max((name for name in wholes if not name or pattern.startswith(f"{name}.")), key=len)
        model = whole.rstrip("'") or "model"
        by_model[model] = (*by_model.get(model, ()), pattern[len(whole) :].lstrip("."))
    return by_model


def _around(module: nn.Module, pattern: str) -> str:
    """Return the pattern of the parts that call these; empty if only the module itself does."""
    named = dict(module.named_modules(remove_duplicate=False))
    while pattern:
        pattern = pattern.rpartition(".")[0]
        matches = matching(named, pattern)
        if any(not isinstance(named[name], _NOT_CALLED) for name in matches):
            break
    return pattern
