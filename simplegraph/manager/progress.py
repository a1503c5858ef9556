"""The progress bar of a capture session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from simplegraph.device.protocol import GraphDevice


class CaptureBar:
    """Shows the size being captured, the device memory that is left, and how many captures failed."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._started = self._failed = 0

    def next(self, size: int, device: GraphDevice) -> None:
        """Show the size that is captured next."""
        if not self._bar.disable:
            self.end()
            self._shown = {"size": size, "free": f"{device.free_memory() / 2**30:.1f} GiB"}
            emulated = " (emulated)" if device.emulated else ""
            self._bar.set_description(f"Capturing CUDA graphs{emulated}", refresh=False)
            self._bar.set_postfix(self._shown, refresh=False)
            self._started += 1

    def fail(self) -> None:
        """Show that the size came to no graph: it counts as none."""
        if not self._bar.disable:
            self._failed += 1
            self._bar.set_postfix(self._shown, failed=self._failed, refresh=False)

    def end(self) -> None:
        """Count what has been captured."""
        self._bar.update(self._started - self._failed - self._bar.n)


@contextlib.contextmanager
def capture_bar(total: int, show: bool) -> Iterator[CaptureBar]:
    """Show a bar over `total` captures, on the first rank only."""
    hidden = not show or os.environ.get("RANK", "") not in ("", "0")
    with tqdm(total=total, desc="Capturing graphs", unit="graph", leave=True, disable=hidden) as bar:
        shown = CaptureBar(bar)
        yield shown
        shown.end()
