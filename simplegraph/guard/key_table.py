"""Make the keys of plain values, and remember them: calls that find equal values have the same key."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

from simplegraph.guard.comparison import Comparison
from simplegraph.guard.values import ALL, ORDER, Place, PlainValues

_MAX_KEYS = 256  # keys that are remembered, so that returning to earlier values costs nothing
_Part = tuple[str, frozenset[Any]]  # a holder's name, and its entries as a part of a key


def _parts(parts: Iterable[_Part]) -> frozenset[_Part]:
    """Return the parts of a key that are not empty, in any order."""
    return frozenset(part for part in parts if part[1])


def _without(places: set[Place], part: _Part) -> _Part:
    """Return a holder's part of a key without some places."""
    name, entries = part
    if (name, ALL) in places:
        return name, frozenset()
    left_out = {key for holder, key in places if holder == name}
    if not left_out:
        return part
    counted = dict(entry for entry in entries if entry[0] not in left_out)
    order = tuple(key for key in counted.pop(ORDER, ()) if key not in left_out)
    return name, frozenset((*counted.items(), *[(ORDER, order)] * (len(order) > 1)))


class KeyTable:
    """Makes the key of the present values, remembers earlier keys, and leaves places out of all keys.

    Attributes:
        comparisons: at most one, of the present values; it has their key once that is made. It is cleared once an
            object ends whose attributes are kept alive.
        alive: one item, cleared at that end, too, so that a comparison that is being made meanwhile is not kept.
        key: the key that was made last.
        left_out: the places that are left out of keys.
        counted_anew: places that count again since the last key was made, as a run left them unchanged.
    """

    def __init__(self) -> None:
        self.comparisons: list[Comparison] = []
        self.alive: list[bool] = []
        self.key = PlainValues({})
        self.left_out: set[Place] = set()
        self.counted_anew: set[Place] = set()
        self._keys: dict[frozenset[_Part], PlainValues] = {}  # by the values of all holders; the latest comes last

    def keep(self, comparison: Comparison) -> None:
        """Keep a comparison for later calls, unless an object of it has ended."""
        self.comparisons[:] = [comparison]
        if not self.alive:
            self.comparisons.clear()

    def make(self) -> None:
        """Make the key of the present values, or take the key that they had before."""
        for comparison in self.comparisons[:1]:
            if comparison.key is not None:
                return
            parts = _parts((holder.name, holder.part(self.left_out)) for holder in comparison.holders)
            values = self._keys.pop(parts, None)
            if values is None and self.counted_anew:  # while all runs changed these no graph was captured
                values = self._keys.pop(_parts(_without(self.counted_anew, part) for part in parts), None)
            self.counted_anew.clear()
            self.key = self._keys[parts] = values or PlainValues({})
            self.key.parts = dict(parts)
            while len(self._keys) > _MAX_KEYS:
                del self._keys[next(iter(self._keys))]
            self.keep(comparison.after((), self.key))

    def has_values(self, key: PlainValues | None, holders: Sequence[Any]) -> bool:
        """True if a key has the present values of these holders, except at places that are left out."""
        return key is not None and all(
            key.parts.get(holder.name, frozenset()) == holder.part(self.left_out) for holder in holders
        )

    def leaves_out(self, place: Place) -> bool:
        """True if a place, or the container that it is in, is left out of keys."""
        return not self.left_out.isdisjoint((place, (place[0], ALL)))

    def leave_out(self, places: set[Place], counted_anew: Set[Place] = frozenset()) -> None:
        """Leave these places out of keys from now on, and no others.

        Args:
            places: the places.
            counted_anew: places that count again since a run left them unchanged.
        """
        self.counted_anew |= counted_anew
        if places == self.left_out:
            return
        added, counted = places - self.left_out, self.left_out - places
        self.left_out = places
        if counted - self.counted_anew:  # one that is empty by now is no part of a key, as when it was left out
            self._keys.clear()
        if added:  # values that differed only in these places are equal now
            keys, self._keys = self._keys, {}
            for parts, key in keys.items():
                self._keys.setdefault(_parts(_without(added, part) for part in parts), key)
        for comparison in self.comparisons[:1]:
            self.keep(comparison.after((), None))
