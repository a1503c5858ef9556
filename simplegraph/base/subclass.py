"""Subclasses made at run time that go by the original's name, in messages, pickles and reprs."""

from __future__ import annotations

from typing import Any


def subclass(original: Any, members: dict[str, Any], *mixins: type, name: str | None = None) -> Any:
    """Make a subclass of `original` with these members, and with `mixins` before it.

    Args:
        original: any class.
        members: its own methods and attributes.
        *mixins: classes that come before the original in its method resolution order.
        name: another name for it.
    """
    named = {attribute: getattr(original, attribute) for attribute in ("__module__", "__qualname__", "__doc__")}
    return type(original)(name or original.__name__, (*mixins, original), named | members)


def plain(module: Any) -> Any:
    """Return the object that a wrapper was made around, as its forward sees it; others as they are.

    A class that was changed since by way of the wrapper, as for a parametrization, is the wrapper's alone.
    """
    return module._graph_original if "_graph_original" in vars(type(module)) else module
