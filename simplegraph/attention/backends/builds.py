"""Checks that an installed library has what a backend calls, by the signatures of its functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from simplegraph.base.errors import ConfigError


def missing_argument(module: Any, needed: Mapping[str, Iterable[str]]) -> str | None:
    """Say which of these functions, or of their arguments, a module lacks; None if it has all.

    Args:
        module: or a class.
        needed: functions, and the names of arguments of each.
    """
    for name, arguments in needed.items():
        function = getattr(module, name, None)
        if function is None:
            return f"has no {name}"
        try:
            known = inspect.signature(function).parameters
        except (TypeError, ValueError):  # a compiled function may not tell its arguments
            continue
        if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in known.values()):
            continue
        missing = next((argument for argument in arguments if argument not in known), None)
        if missing is not None:
            return f"has a {name} without the argument {missing}"
    return None


def check_arguments(module: Any, needed: Mapping[str, Iterable[str]]) -> None:
    """Refuse a module without these functions and arguments; see `missing_argument`.

    Raises:
        ConfigError: one is missing.
    """
    problem = missing_argument(module, needed)
    if problem is not None:
        raise ConfigError(f"the installed {module.__name__} {problem}; install a newer build, or use another backend.")
