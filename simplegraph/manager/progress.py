"""The progress bar of a capture session."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from simplegraph.graph.device import GraphDevice


class CaptureBar:
    """Shows the size being captured and the device memory that is left."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._started = False

    def next(self, size: int, device: GraphDevice) -> None:
        """Show the size that is captured next."""
        if self._bar is not None:
            self._bar.update(self._started)
            self._bar.set_postfix(size=size, free=f"{device.free_memory() / 2**30:.1f} GiB", refresh=False)
            self._started = True


@contextlib.contextmanager
def capture_bar(total: int, show: bool) -> Iterator[CaptureBar]:
    """Show a bar over `total` captures, on the first rank only."""
    if not show or os.environ.get("RANK", "") not in ("", "0"):
        yield CaptureBar(None)
        return
    with tqdm(total=total, desc="Capturing CUDA graphs", unit="graph", leave=True) as bar:
        yield CaptureBar(bar)
        bar.update(total - bar.n)
