"""Subclasses made at run time that go by the original's name, in messages, pickles and reprs."""

from __future__ import annotations

from typing import Any


def subclass(original: Any, members: dict[str, Any], *mixins: type) -> Any:
    """Make a subclass of `original` with these members, and with `mixins` before it."""
    named = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(original)(original.__name__, (*mixins, original), named | members)
