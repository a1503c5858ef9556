"""Undo what an eager break set in a replay and later segments may read, and set it again while the call is finished."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from simplegraph.base.objects import class_dict
from simplegraph.base.walk import held_by
from simplegraph.guard.place_history import IN_BREAK, Changes, Entries, shown_place, why_set_by_break
from simplegraph.guard.value_check import ValueHolder
from simplegraph.guard.values import ALL, CLASS, Place, SameObject, place_name, value_key
from simplegraph.program.snapshot import ABSENT, put, restore, value_at


class _Lost(Exception):
    """An earlier value is not known any more."""


class HolderBefore(NamedTuple):
    """A holder before it is read again after a break.

    Attributes:
        holder: the holder.
        identity: what distinguishes its container or object from others.
        plain: its plain values, and plain keys.
    """

    holder: ValueHolder
    identity: Any
    plain: Sequence[Any]

    @classmethod
    def all_of(cls, holders: Iterable[ValueHolder]) -> dict[str, HolderBefore]:
        """Note holders by name."""
        return {it.name: cls(it, _identity(it), it.plain_values) for it in holders}


def _identity(holder: ValueHolder) -> Any:
    if holder.owner is not None:
        owner = holder.owner()
        return object() if owner is None else id(owner)
    return object() if holder.state is None else holder.state.container or id(holder.cell)


@dataclasses.dataclass(eq=False)
class SetByBreak:
    """Holds what a break set, to undo it and to set it again.

    Attributes:
        changed: the changed places that later segments may read, as `PlacesInCode.by_place` groups them.
        undo_edits, redo_edits: functions that undo the changes, and that make them again; empty if that is impossible.
        is_undone: True if the places were set to what they held before.
    """

    changed: Mapping[Place, Entries]
    undo_edits: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    redo_edits: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    is_undone: bool = False
    remedy = IN_BREAK[:1].upper() + IN_BREAK[1:]

    @property
    def names(self) -> str:
        """The names of the places, for messages."""
        return ", ".join(map(shown_place, self.changed))

    @property
    def why(self) -> str:
        """Why the call runs eagerly."""
        return why_set_by_break(self.names)

    @property
    def hindrance(self) -> str:
        """Why the call cannot be finished; empty if the places were set to what they held before."""
        lost = f"the code before the break may read {self.names}, and what that was is not known any more"
        return "" if self.is_undone else lost

    def undo(self, are_equal: Callable[[], bool]) -> None:
        """Set the places to what they held before the break, if that is known, and `are_equal` says that it is so."""
        try:
            for undo in self.undo_edits:
                undo()
            self.is_undone = are_equal()
        except Exception:  # another thread changes them
            self.is_undone = False
        if not self.is_undone:
            self.redo()

    def redo(self) -> None:
        """Set the places to what the break set, once."""
        edits, self.redo_edits = self.redo_edits, []
        for redo in edits:
            redo()


def find_edits(
    changed: Mapping[Place, Entries],
    before: Mapping[str, HolderBefore],
    entries: tuple[Mapping[str, Entries], Mapping[str, Entries]],
    holders: Iterable[ValueHolder],
    classes: Iterable[type],
) -> SetByBreak:
    """Find how to undo what a break set.

    Args:
        changed: the changed places, by place.
        before: the holders before the break.
        entries: the entries of all holders, before the break and now.
        holders: the holders now.
        classes: the classes whose attributes are guarded.
    """
    found = SetByBreak(changed)
    changes: Changes = {(name, key): change for (name, _), values in changed.items() for key, change in values.items()}
    try:
        undoing = _Undoing(before, {it.name: it for it in holders}, entries, classes)
        for undo, redo in undoing.edits(changes):
            found.undo_edits.append(undo)
            found.redo_edits.append(redo)
    except Exception:  # it is lost, or another thread changes it
        found.undo_edits, found.redo_edits = [], []
    return found


_Edit = tuple[Callable[[], object], Callable[[], object]]  # undoes a change, and makes it again


class _Undoing:
    """Finds the places and the earlier values of changes; see `find_edits`."""

    def __init__(
        self,
        before: Mapping[str, HolderBefore],
        now: Mapping[str, ValueHolder],
        entries: tuple[Mapping[str, Entries], Mapping[str, Entries]],
        classes: Iterable[type],
    ) -> None:
        self._before, self._now, self._entries = before, now, entries
        self._classes = list(classes)

    def edits(self, changes: Changes) -> Iterator[_Edit]:
        """Yield how to undo each change, and how to make it again. Raises _Lost."""
        done: set[Place] = set()
        for name, key in sorted(changes, key=lambda place: place[0].count(".")):  # outer ones first
            if name not in self._before or name not in self._now:
                continue  # what leads to it was set, and is undone
            above = next(filter(self._is_replaced, _names_above(name)), None)
            place = (name, key) if above is None else self._place_of_holder(above)
            where = self._where(place[0])
            is_list = isinstance(held_by(where), tuple)
            is_mapping = above is None and self._has_other_keys(name, where)
            place = (place[0], ALL) if is_list or is_mapping else place
            if place in done:
                continue
            done.add(place)
            if is_mapping:
                yield self._mapping(name, where)
            else:
                yield self._items(name if above is None else place[0], where) if is_list else self._entry(*place, where)

    def _has_other_keys(self, name: str, where: Any) -> bool:
        """True if a dict got or lost keys: then the order of all of them is put back, too."""
        if not issubclass(type(where), dict):
            return False
        old, present = (entries.get(name, {}) for entries in self._entries)
        return list(old) != list(present) and {_key_of(key) for key in held_by(where)} == present.keys() - {CLASS}

    def _mapping(self, name: str, where: Any) -> _Edit:
        """Return the edit of a dict as a whole."""
        now, (old, present) = held_by(where), (entries[name] for entries in self._entries)
        keys = {_key_of(key): key for key in now}
        earlier = {}
        for key, entry in old.items():
            if key == CLASS:
                continue
            at = keys.get(key, key if type(key) is str else ABSENT)
            at = self._plain(name, key) if at is ABSENT else at
            is_there = key in keys and present.get(key) == entry and not self._is_replaced(place_name((name, key)))
            earlier[at] = now[at] if is_there else self._earlier(name, key, entry)
        return functools.partial(restore, where, earlier), functools.partial(restore, where, now)

    def _is_replaced(self, name: str) -> bool:
        """True if the holder of this name is of another container or object than before."""
        before, now = self._before.get(name), self._now.get(name)
        return before is not None and now is not None and before.identity != _identity(now)

    def _place_of_holder(self, name: str) -> Place:
        """Return the place at which a container or object lies. Raises _Lost."""
        parent, _, _ = name.rpartition(".")
        if parent not in self._now or parent not in self._before:
            raise _Lost
        keys = (key for key in self._entries[0][parent] if place_name((parent, key)) == name)
        return parent, next(keys, name.rpartition(".")[2])

    def _where(self, name: str) -> Any:
        """Return what `put` changes for a holder. Raises _Lost."""
        holder = self._now[name]
        if holder.cell is not None:
            return holder.cell
        found = holder.find()
        if holder.state is None or holder.is_wide:
            raise _Lost
        if holder.state.container is None:  # `found` is a copy
            if holder.owner is None:
                raise _Lost
            return holder.owner()
        return next((kind for kind in self._classes if class_dict(kind) is found), found)

    def _entry(self, name: str, key: Hashable, where: Any) -> _Edit:
        """Return the edit of one attribute or item."""
        if key == CLASS:
            raise _Lost
        at = next((it for it in held_by(where) if _key_of(it) == key), ABSENT)
        if at is ABSENT:
            at = key if type(key) is str else self._plain(name, key)
        earlier = self._earlier(name, key, self._entries[0][name].get(key, ABSENT))
        return functools.partial(_put, where, at, earlier), functools.partial(_put, where, at, value_at(where, at))

    def _items(self, name: str, where: Any) -> _Edit:
        """Return the edit of all items of a list or set."""
        now = held_by(where)
        old, present = (entries[name] for entries in self._entries)
        is_set, earlier = issubclass(type(where), set), list[Any]()
        for key, entry in old.items():
            at = next((at for at, item in enumerate(now) if _key_of(item if is_set else at) == key), None)
            is_there = at is not None and present.get(key, ABSENT) == entry
            if at is not None and is_there and not self._is_replaced(place_name((name, key))):
                earlier.append(now[at])
            elif key != CLASS:
                earlier.append(self._plain(name, key) if is_set else self._earlier(name, key, entry))
        return functools.partial(restore, where, tuple(earlier)), functools.partial(restore, where, now)

    def _earlier(self, name: str, key: Hashable, entry: Any) -> Any:
        """Return the value that was at a place, whose entry this is. Raises _Lost."""
        if entry is ABSENT:
            return ABSENT
        before = self._before.get(place_name((name, key)))
        if before is not None:
            thing = before.holder.container if before.holder.owner is None else before.holder.owner()
        else:
            thing = entry.thing() if type(entry) is SameObject else None
        return self._plain(name, entry) if thing is None else thing

    def _plain(self, name: str, entry: Any) -> Any:
        """Return the plain value or key that an entry stands for. Raises _Lost."""
        for value in self._before[name].plain:
            if value_key(value) == entry:
                return value
        raise _Lost


def _names_above(name: str) -> Iterator[str]:
    """Yield the names of all that leads to a holder, the outermost first, and its own."""
    parts = name.split(".")
    return (".".join(parts[:count]) for count in range(1, len(parts) + 1))


def _put(place: Any, key: Any, value: Any) -> None:
    if value is not ABSENT or value_at(place, key) is not ABSENT:
        put(place, key, value)


def _key_of(key: Any) -> Any:
    """Return the key that stands for a key of a dict, or for an item of a set, in entries."""
    return key if type(key) is str else value_key(key)
