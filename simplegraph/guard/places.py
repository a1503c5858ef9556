"""Group changes of plain values by place, and ask how the code below a call uses a place."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simplegraph.guard.code_below import CodeBelow
from simplegraph.guard.values import ALL, Place
from simplegraph.program.snapshot import ABSENT

Entries = dict[Hashable, Any]  # by key, the key of a value, or the keys of its old and new value
Changes = dict[Place, tuple[Hashable, Hashable]]  # the keys of the old and new value


class HolderKind(NamedTuple):
    """Describes a holder. It is kept in place of the holder, which keeps objects alive.

    Attributes:
        is_container: True for a container of the user's; is_list: True for a list or deque among these.
        is_object: True for the attributes of an object.
        keys: the keys that lead from a module to it; None if code leads to it.
    """

    is_container: bool = False
    is_list: bool = False
    is_object: bool = False
    keys: tuple[Any, ...] | None = ()


_UNKNOWN = HolderKind()


@dataclass
class PlacesInCode:
    """Answers how the code below a call uses a place.

    Attributes:
        code: the code; None before holders are found.
        kinds: the descriptions of the holders, by name.
    """

    code: CodeBelow | None = None
    kinds: dict[str, HolderKind] = field(default_factory=dict)

    def by_place(self, changes: Changes) -> dict[Place, Entries]:
        """Group changes by place; a container counts as one place."""
        grouped: dict[Place, Entries] = {}
        for (name, key), change in changes.items():
            is_container = self.kinds.get(name, _UNKNOWN).is_container
            grouped.setdefault((name, ALL if is_container else key), {})[key] = change
        return grouped

    def is_named(self, place: Place) -> bool:
        """True if code may lead to a place: it names the place, or a key that leads to it.

        Of a module, and of an object that code leads to, only attributes count that the code names, other than to call
        them as methods: no plain value is one.
        """
        name, key = place
        kind, code = self.kinds.get(name, _UNKNOWN), self.code
        above, _, attribute = name.rpartition(".")
        if code is None:
            return False
        if kind.keys is None:
            is_attribute = kind.is_container and self.kinds.get(above, _UNKNOWN).is_object
            return not is_attribute or code.computes_names or attribute in code.values
        if not kind.keys and not kind.is_container and not code.computes_names:
            return key in code.values
        return any(part in code.names for part in (*kind.keys, attribute, key) if type(part) is str)

    def fills(self, place: Place, values: Entries) -> bool:
        """True if all values are new, by keys that no code names, such as in a cache that is filled for each shape.

        Code asks a list for its length and all its items, so a list is filled only if code does nothing but add to it.
        A list in another container is an item of that: its name in code is none of its own.
        """
        name, code = place[0], self.code
        above, _, attribute = name.rpartition(".")
        is_in_container = self.kinds.get(above, _UNKNOWN).is_container
        is_named_list = self.kinds.get(name, _UNKNOWN).is_list and not is_in_container
        if is_named_list and attribute.isidentifier() and not (code is not None and code.only_fills(attribute)):
            return False
        names = code.names if code is not None else ()
        return all(before is ABSENT and not (type(key) is str and key in names) for key, (before, _) in values.items())
