"""Finds the holders of the plain values that calls read, and reads those that moved."""

from __future__ import annotations

import collections
import itertools
import operator
import weakref
from collections.abc import Mapping
from typing import Any

from simplegraph.base.objects import own_dict
from simplegraph.guard.comparison import Comparison
from simplegraph.guard.holders import Holders, SearchRoot, ValueHolder
from simplegraph.guard.key_table import KeyTable
from simplegraph.guard.places import Changes, Entries, HolderKind, PlacesInCode
from simplegraph.guard.values import has_object
from simplegraph.program.snapshot import ABSENT

_LISTS = (list, collections.deque)


def changes_between(before: Mapping[str, Entries], now: Mapping[str, Entries]) -> Changes:
    """Return the places whose values changed, with the old and the new key of the value."""
    changes: Changes = {}
    if before is now:
        return changes
    moved = itertools.compress(before, map(operator.is_not, before.values(), map(now.get, before)))
    for name in (*moved, *(now.keys() - before.keys())):
        old, new = before.get(name, {}), now.get(name, {})
        for key in old.keys() | new.keys():
            if old.get(key, ABSENT) != new.get(key, ABSENT):
                changes[name, key] = old.get(key, ABSENT), new.get(key, ABSENT)
    return changes


def _kind_of(holder: ValueHolder) -> HolderKind:
    """Describe a holder without keeping it alive."""
    is_list = holder.is_container and issubclass(type(holder.find()), _LISTS)
    return HolderKind(holder.is_container, is_list, holder.owner is not None, holder.keys)


class HolderReader:
    """Finds the holders of the plain values that calls read, and reads those that moved.

    Args:
        places: told the code and the kinds of holders when these are found.
        keys: the table that keeps the comparison of the holders.
        breaks: True if values that eager breaks read count as well, since graphs hold them.

    Attributes:
        entries: the values of the latest look, by the holder's name; replaced by another dict once one changes.
        refused: why there is no key; else empty.
        scripts: names of the TorchScript modules and functions that calls lead to.
    """

    def __init__(self, places: PlacesInCode, keys: KeyTable, *, breaks: bool) -> None:
        self._places, self._keys, self._breaks = places, keys, breaks
        self.entries: dict[str, Entries] = {}
        self.refused = ""
        self.scripts: list[str] = []
        self._closed: frozenset[str] = frozenset()  # names of containers whose contents are not read
        self._opened: set[int] = set()  # ids of objects that were opened
        self._roots: list[int] = []  # ids of the modules that a function reaches
        self._deaths: list[weakref.ref[Any]] = []  # they call back when an object ends whose attributes are kept alive

    def look(self, module: Any) -> Changes:
        """Read the holders that moved since the last time; return the changes."""
        before, attributes = self.entries, own_dict(module) or {}
        try:
            if not self._read_moved(module, attributes):
                self._find(module)
        except Exception:  # another thread changes them: the call runs eagerly
            self._keys.comparisons.clear()
            self.entries = {}
        return changes_between(before, self.entries) if before else {}

    def close(self, module: Any, containers: frozenset[str]) -> None:
        """Stop reading below containers that take new values all the time: each new item would be searched."""
        if containers != self._closed:
            self._closed = containers
            self._keys.comparisons.clear()
            self.entries = {}
            self.look(module)

    def _read_moved(self, module: Any, attributes: dict[str, Any]) -> bool:
        """Read the holders that moved; False if there is a new object to open, or an object is no longer reached."""
        if getattr(type(module), "is_function", False) and list(map(id, module._modules.values())) != self._roots:
            return False
        for comparison in self._keys.comparisons[:1]:
            if comparison.holds(attributes):
                return True
            if not comparison.has_children(attributes):
                return False
            entries = dict(self.entries)
            moved = comparison.moved(attributes)
            for holder in moved:
                inside = holder.inside
                try:
                    empty = holder.read(self._opened)
                except Exception:  # the object is gone, or another thread changes it
                    return False
                entries_before = entries[holder.name]
                entries[holder.name] = holder.entries
                if holder.name in self._closed:
                    continue
                opened = (entry for key, entry in holder.entries.items() if entries_before.get(key) != entry)
                if empty or holder.inside != inside or any(map(has_object, opened)):
                    return False
            if not moved or any(holder.mark is None for holder in moved):
                return False
            before = ((holder.entries, self.entries[holder.name]) for holder in moved)
            is_same = all(list(new.items()) == list(old.items()) for new, old in before)
            # The version may move though nothing that counts did, such as when a file's other globals are set, or a
            # run counts its calls.
            is_key = is_same or self._keys.has_values(comparison.key, moved)
            self._keys.keep(comparison.after(moved, comparison.key if is_key else None))
            if not is_same:
                self.entries = entries
            return True
        return False

    def _find(self, module: Any) -> None:
        """Find all holders of values, and read them."""
        roots, function = [SearchRoot("", module)], None
        if getattr(type(module), "is_function", False):
            roots = [SearchRoot(name, child) for name, child in module._modules.items() if child is not None]
            function = module.function
            self._roots = list(map(id, module._modules.values()))
        comparisons, alive = self._keys.comparisons, [True]
        comparisons.clear()

        def gone(_: Any) -> None:  # called in any thread, at any time, so it takes no lock
            alive.clear()
            comparisons.clear()

        holders = Holders(roots, module, gone, function, breaks=self._breaks, closed=self._closed)
        self._deaths, self._opened = holders.deaths, holders.opened
        self.refused, self.scripts = holders.refused, holders.scripts
        self.entries = {holder.name: holder.entries for holder in holders.all}
        self._places.code = holders.code
        self._places.kinds = {holder.name: _kind_of(holder) for holder in holders.all}
        self._keys.alive = alive
        self._keys.keep(Comparison(holders.root, holders.all, None))
