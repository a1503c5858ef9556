"""Answers of functions in fresh processes, alone or side by side, as figures; an error is one, too."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from bench.tools import fresh
from bench.tools.measure import Figures, say
from bench.tools.side_by_side import K, SideBySide, Task


def answer(function: Callable[..., Figures], *args: Any, seconds: float) -> Figures:
    """Call a function in a fresh process; on an error return `failed`, and the `reason` in one line."""
    try:
        figures: Figures = fresh.call(function, *args, seconds=seconds)
    except (TimeoutError, fresh.ProcessFailed) as error:
        return _failure(error)
    return figures


def side_by_side(tasks: Mapping[K, Task], seconds: float) -> dict[K, Figures]:
    """Answer tasks by processes at once, which take turns at being timed; see `SideBySide`."""
    found = dict(SideBySide(workers=len(tasks), seconds=seconds, total=math.inf).run(tasks))
    return {name: _failure(found[name]) if isinstance(found[name], Exception) else found[name] for name in tasks}


def _failure(error: Exception) -> Figures:
    say(str(error))
    return {"failed": str(error), "reason": getattr(error, "reason", str(error))}
