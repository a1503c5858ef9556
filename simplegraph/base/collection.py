"""Python's garbage collector, and when it shall wait. Imports no torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Collect no garbage meanwhile: for what makes many objects, and hardly any garbage.

    With torch loaded a whole collection takes 70 to 250 ms, and what makes objects starts one every few times. Imports
    and Triton's compiler take a tenth less without, and what is remembered before a capture is gone after it. A graph
    that the collector destroyed during another's capture would break that one (pytorch #161037).
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
