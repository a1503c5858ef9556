"""Notes of what a module's forward was run with, and values that it reads where nothing looks."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any


class Values:
    """Has attributes."""

    def end(self) -> None:
        """Let go of them."""
        vars(self).clear()


class _Notes(list[tuple[Any, ...]]):
    """May have weak references, as a list may not."""


def unwatched(**values: Any) -> Callable[[], Any]:
    """Return a weak reference to an object with these attributes, which stays: what changes there is not noticed."""
    holder = Values()
    vars(holder).update(values)
    atexit.register(holder.end)  # keeps it, where no walk comes
    return weakref.ref(holder)


def run_log() -> Callable[..., list[tuple[Any, ...]]]:
    """Make a function that notes what it is passed, if anything, and returns all that it noted.

    A module that writes a log that is noticed has no graph, since no replay would write it.
    """
    notes = _Notes()
    atexit.register(notes.clear)  # keeps it, where no walk comes
    reference = weakref.ref(notes)

    def log(*note: Any) -> list[tuple[Any, ...]]:
        found = reference()
        assert found is not None
        found.extend([note] if note else [])
        return found

    return log
