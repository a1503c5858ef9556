"""Python's garbage collector, and when it shall wait. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_pauses: dict[object, bool] = {}  # that last, with what was before the first: the last one to end puts it back


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile, in any thread: for what makes many objects, and hardly any garbage.

    With torch loaded a whole collection takes 70 to 250 ms, and what makes objects starts one every few times. Imports
    and Triton's compiler take a tenth less without, and what is remembered before a capture is gone after it. A graph
    that the collector destroyed during another's capture would break that one (pytorch #161037).
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
    """Begin anew in a child: the threads whose pauses these are were left behind."""
    global _lock
    _lock = threading.Lock()
    if any(_pauses.values()):
        gc.enable()
    _pauses.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_end_all)
