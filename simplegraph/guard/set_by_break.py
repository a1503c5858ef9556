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
from simplegraph.guard.values import CLASS, Place, SameObject, dotted, value_key
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
    """What a break set.

    Attributes:
        changed: the changed places that later segments may read, as `PlacesInCode.by_place` groups them.
        undone, done: functions that undo the changes, and that make them again; empty if that is impossible.
        hindrance: why the changes cannot be undone; empty if they can.
    """

    changed: Mapping[Place, Entries]
    undone: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    done: list[Callable[[], object]] = dataclasses.field(default_factory=list)
    hindrance: str = ""
    remedy = IN_BREAK[:1].upper() + IN_BREAK[1:]

    @property
    def names(self) -> str:
        """The names of the places, for messages."""
        return ", ".join(map(shown_place, self.changed))

    @property
    def why(self) -> str:
        """Why the call runs eagerly."""
        return why_set_by_break(self.names)

    def undo(self) -> None:
        """Set the places to what they held before the break."""
        for undo in self.undone:
            undo()

    def redo(self) -> None:
        """Set the places to what the break set, once."""
        for redo in self.done:
            redo()
        self.done.clear()


def set_by_break(
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
            found.undone.append(undo)
            found.done.append(redo)
    except Exception:  # it is lost, or another thread changes it
        found.hindrance = f"the code before the break may read {found.names}, and what that was is not known any more"
    if found.hindrance:
        found.undone, found.done = [], []
    return found


_Edit = tuple[Callable[[], object], Callable[[], object]]  # undoes a change, and makes it again


class _Undoing:
    """Finds the places and the earlier values of changes; see `set_by_break`."""

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
        replaced: set[str] = set()  # names of containers and objects that another one replaced
        lists: set[str] = set()
        for name, key in sorted(changes, key=lambda place: place[0].count(".")):  # outer ones first
            above = self._replaced_above(name)
            if above is not None:
                if above not in replaced:
                    replaced.add(above)
                    yield self._link(above)
            elif isinstance(held_by(self._place(name)), tuple):
                if name not in lists:
                    lists.add(name)
                    yield self._items(name)
            else:
                yield self._entry(name, key)

    def _replaced_above(self, name: str) -> str | None:
        """Return the outermost holder on the way to a name, itself included, that is another object than before."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            above = ".".join(parts[:count])
            before, now = self._before.get(above), self._now.get(above)
            if before is None and now is None:
                continue
            if before is None or now is None or before.identity != _identity(now):
                return above
        return None

    def _place(self, name: str) -> Any:
        """Return what `put` changes for a holder."""
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

    def _link(self, name: str) -> _Edit:
        """Return the edit that puts the earlier container or object back in place of the present one."""
        parent, _, key = name.rpartition(".")
        if parent not in self._now:
            raise _Lost
        place, before = self._place(parent), self._before.get(name)
        contents = held_by(place)
        at = next((it for it in (contents if isinstance(contents, dict) else ()) if dotted("", it) == key), key)
        entry, earlier = self._entries[0].get(parent, {}).get(_key_of(at), ABSENT), None
        if before is not None:
            earlier = before.holder.container if before.holder.owner is None else before.holder.owner()
        return _edit(place, at, self._value(parent, entry) if earlier is None else earlier)

    def _entry(self, name: str, key: Hashable) -> _Edit:
        """Return the edit of one attribute or item."""
        if key == CLASS:
            raise _Lost
        place = self._place(name)
        at = next((it for it in held_by(place) if _key_of(it) == key), ABSENT)
        if at is ABSENT:
            at = key if type(key) is str else self._value(name, key)
        return _edit(place, at, self._value(name, self._entries[0][name].get(key, ABSENT)))

    def _items(self, name: str) -> _Edit:
        """Return the edit of all items of a list or set."""
        place = self._place(name)
        now = held_by(place)
        old, present = (entries[name] for entries in self._entries)
        is_set, earlier = issubclass(type(place), set), list[Any]()
        for key, entry in old.items():
            at = next((at for at, item in enumerate(now) if _key_of(item if is_set else at) == key), None)
            if at is not None and (is_set or present.get(key, ABSENT) == entry):
                earlier.append(now[at])
            elif key != CLASS:
                earlier.append(self._value(name, key if is_set else entry))
        return functools.partial(restore, place, tuple(earlier)), functools.partial(restore, place, now)

    def _value(self, name: str, entry: Any) -> Any:
        """Return the value or key that an entry stands for. Raises _Lost."""
        if entry is ABSENT:
            return ABSENT
        thing = entry.thing() if type(entry) is SameObject else None
        found = next((it for it in self._before[name].plain if value_key(it) == entry), thing)
        if found is None and entry != value_key(None):
            raise _Lost
        return found


def _edit(place: Any, key: Any, earlier: Any) -> _Edit:
    return functools.partial(put, place, key, earlier), functools.partial(put, place, key, value_at(place, key))


def _key_of(key: Any) -> Any:
    """Return the key that stands for a key of a dict, or for an item of a set, in entries."""
    return key if type(key) is str else value_key(key)
