"""A function for tests in the place of torch's, which no walk through Python state follows."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any


def unfollowed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls another one by a weak reference. The caller keeps that, or its object, alive."""
    reference: Any = weakref.WeakMethod(function) if inspect.ismethod(function) else weakref.ref(function)

    def calling(*args: Any, **kwargs: Any) -> Any:
        called: Any = reference()
        return called(*args, **kwargs)

    return calling
