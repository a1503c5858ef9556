"""Adds up what parts of a longer piece of work took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Stopwatch(dict[str, float]):
    """Seconds of wall time by part; parts may come again, but not within each other."""

    @contextlib.contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds that a block takes, whatever happens in it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self[part] = self.get(part, 0.0) + time.perf_counter() - started
