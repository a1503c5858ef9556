"""A timer for pytest-benchmark that shows the seconds that were measured elsewhere, such as in a fresh process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any


class ReportedClock:
    """A timer that stands still until it is told how long a round took.

    pytest-benchmark would time a whole process, its imports and its comparisons with eager included.
    """

    __name__ = "reported_seconds"  # which pytest-benchmark notes as the timer

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def record(self, benchmark: Any, seconds: Sequence[float]) -> None:
        """Give a benchmark, whose timer this is, these seconds as its rounds."""
        left: Iterator[float] = iter(seconds)

        def advance() -> None:
            self._now += next(left)

        def restart() -> None:
            self._now = 0.0  # so that no rounding of a long sum is in the difference

        benchmark.pedantic(advance, setup=restart, rounds=len(seconds))


CLOCK = ReportedClock()
