"""Notes of what ran, kept outside the module that runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_log() -> Callable[..., list[tuple[Any, ...]]]:
    """Make a function that notes what it is passed, if anything, and returns all that it noted.

    A closure holds the notes: a module that counts its own runs has no graph, since no replay would count.
    """
    notes: list[tuple[Any, ...]] = []

    def log(*note: Any) -> list[tuple[Any, ...]]:
        notes.extend([note] if note else [])
        return notes

    return log
