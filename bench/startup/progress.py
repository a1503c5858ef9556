"""Shows a comparison's progress: a bar over its processes with the remaining time, or lines without a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable

from tqdm import tqdm

from bench.tools import torchrun
from bench.tools.measure import say

EVERY = 10.0  # seconds between two lines without a terminal


class Progress:
    """Shows the running process, the number of finished ones, and the estimated remaining time.

    Args:
        shares: estimated relative time of each process; nothing is shown if there are none.
    """

    def __init__(self, shares: Iterable[float] = ()) -> None:
        self._shares = list(shares)
        self._done, self._label = 0, ""
        self._began = self._process_began = self._spoke = time.monotonic()
        drawn = bool(self._shares) and sys.stderr.isatty() and torchrun.rank() == 0
        form = "{desc} |{bar}| {n_fmt} of {total_fmt}, {elapsed}{postfix}"
        self._bar = tqdm(total=len(self._shares), bar_format=form, disable=not drawn, leave=False)

    def close(self) -> None:
        """Remove the bar."""
        self._bar.close()

    def begin(self, label: str) -> None:
        """Start a process of this name."""
        self._label, self._process_began = label, time.monotonic()
        with tqdm.external_write_mode(file=sys.stderr):
            say(f"{label} ...")
        self._bar.set_description_str(label)

    def tick(self) -> None:
        """Refresh the display; called several times a second."""
        self._bar.set_postfix_str(self.left(), refresh=True)
        now = time.monotonic()
        if self._shares and self._bar.disable and now - max(self._spoke, self._process_began) >= EVERY:
            self._spoke = now
            took, done = now - self._process_began, f"{self._done} of {len(self._shares)} processes done"
            say(f"{self._label}: running for {took:.0f} s; {done}, {self.left()}")

    def end(self, skipped: int = 0) -> None:
        """Count the process as done, and `skipped` later ones that will not run."""
        self._done += 1 + skipped
        self._bar.update(1 + skipped)

    def left(self) -> str:
        """Estimate the time of the remaining processes."""
        done, rest = sum(self._shares[: self._done]), sum(self._shares[self._done :])
        if not done:
            return "time left unknown"
        now = time.monotonic()
        each = (self._process_began - self._began) / done
        return f"about {max(0.0, each * rest - (now - self._process_began)):.0f} s left"

    def write(self, text: str) -> None:
        """Print a process's output above the bar."""
        if text:
            with tqdm.external_write_mode(file=sys.stderr):
                sys.stderr.write(text)
