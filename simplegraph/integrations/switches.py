"""Python switches of other people's modules, which a forward reads and a graph would freeze.

Which adapter is active, disabled or merged, and how much it counts, are plain attributes of peft's layers; a UNet's
attention processors and FreeU factors are plain attributes of diffusers' blocks. Writing to them moves no tensor,
so they are compared at every call of a module that has any.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn

# By the package that a class, or one that it is derived from, comes from. Absent ones count as None.
_SWITCHES: dict[str, tuple[str, ...]] = {
    "peft": ("_active_adapter", "active_adapter", "_disable_adapters", "merged_adapters", "scaling"),
    "diffusers": ("processor", "s1", "s2", "b1", "b2"),
}
# Those of diffusers that may appear after the capture are of these classes.
_LATE = "UpBlock"


def known_switches(module: nn.Module) -> Switches | None:
    """Find the switches of a module and of all below it; None if there are none. Imports no package."""
    places: list[tuple[dict[str, Any], str]] = []
    for child in module.modules():
        packages = {base.__module__.partition(".")[0] for base in type(child).__mro__}
        names = [name for package in sorted(packages & _SWITCHES.keys()) for name in _SWITCHES[package]]
        if _LATE in type(child).__name__ or not vars(child).keys().isdisjoint(names):
            places += [(vars(child), name) for name in names]
    return Switches(places) if places else None


class Switches:
    """A `state_key`: the same key for as long as no switch is set to something else.

    Args:
        places: the attributes of a module, and the name of a switch among them, for every switch.
    """

    def __init__(self, places: list[tuple[dict[str, Any], str]]) -> None:
        self._holders, self._names = zip(*places, strict=True)
        self._last: tuple[list[Any], Hashable] = ([], None)  # together, since other threads read them

    def __call__(self, module: nn.Module) -> Hashable:
        found = list(map(dict.get, self._holders, self._names))  # no loop in Python: this runs at every call
        known, key = self._last
        if found != known:
            key = tuple(map(_frozen, found))
            self._last = list(map(_copied, found)), key
        return key


def _copied(value: Any) -> Any:
    """Lists and dicts are changed in place; what they hold is not."""
    return value.copy() if isinstance(value, (list, dict)) else value


def _frozen(value: Any) -> Hashable:
    if isinstance(value, list):
        return list, tuple(map(_frozen, value))
    if isinstance(value, dict):
        return dict, tuple((key, _frozen(item)) for key, item in value.items())
    return value if isinstance(value, (str, bool, int, float, type(None))) else ById(value)


class ById:
    """Puts an object into a key: equal to itself alone, and kept alive, so that its id is not reused."""

    def __init__(self, value: Any) -> None:
        self.leaf = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.leaf is self.leaf

    def __hash__(self) -> int:
        return id(self.leaf)
