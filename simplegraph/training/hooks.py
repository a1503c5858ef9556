"""Torch's hooks of all modules and of all optimizers, for what one thread runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def calls_noted(register: Callable[[Callable[..., None]], Any], note: Callable[[Any], None]) -> Iterator[None]:
    """Call `note` with each module or optimizer that this thread calls in here.

    Args:
        register: registers a hook, which is called with what is called first, and returns its handle.
        note: called before each call.
    """
    thread = threading.get_ident()

    def hook(called: Any, *_: Any) -> None:
        if threading.get_ident() == thread:
            note(called)

    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()
