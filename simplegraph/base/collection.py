"""Pauses of Python's garbage collector. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses: dict[object, bool] = {}  # running pauses, with the state before the first, which the last one restores


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Pause garbage collection in the block, in all threads, for code that makes many objects but little garbage.

    With torch loaded, a full collection takes 70 to 250 ms, and new objects trigger one from time to time. Without
    collections, imports and Triton's compiler take a tenth less time, and objects that a capture needs live until its
    end. If the collector destroyed a graph during the capture of another one, that capture would break (pytorch
    #161037).
    """
    pause = object()
    try:
        with _lock:
            _pauses[pause] = next(iter(_pauses.values()), gc.isenabled())
        gc.disable()
        yield
    finally:
        with _lock:
            if _pauses.pop(pause, False) and not _pauses:
                gc.enable()


def _end_all() -> None:
    """End all pauses in a forked child, which does not have the threads that made them."""
    global _lock
    _lock = threading.Lock()
    if any(_pauses.values()):
        gc.enable()
    _pauses.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)
