"""Python's garbage collector, and when it shall wait. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_LOCK = threading.Lock()
_collected: list[bool] = []  # before each pause that lasts: the last one to end puts back what was before the first


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile, in any thread: for what makes many objects, and hardly any garbage.

    With torch loaded a whole collection takes 70 to 250 ms, and what makes objects starts one every few times. Imports
    and Triton's compiler take a tenth less without, and what is remembered before a capture is gone after it. A graph
    that the collector destroyed during another's capture would break that one (pytorch #161037).
    """
    with _LOCK:
        _collected.append(gc.isenabled() if not _collected else _collected[0])
    try:
        gc.disable()
        yield
    finally:
        with _LOCK:
            if _collected.pop() and not _collected:
                gc.enable()
