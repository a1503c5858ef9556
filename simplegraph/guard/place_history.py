"""Note who changes which places, and so which places are guarded, and which make calls run eagerly.

Much depends on how the code below a call uses a place, which `PlacesInCode` answers.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from simplegraph.guard.code_below import CodeBelow
from simplegraph.guard.values import ALL, CLASS, Place, is_of_tensor, place_name, shown_entry
from simplegraph.program.snapshot import ABSENT

Entries = dict[Hashable, Any]  # by key, the key of a value, or the keys of its old and new value
Changes = dict[Place, tuple[Hashable, Hashable]]  # the keys of the old and new value

IN_BREAK = "let the break do what depends on it, or rename it if the forward only names something else like it"
_REMEDY = "pass it as a tensor, keep it in a buffer, or rename it if the code has its name for something else"
_MAX_SEEN = 256  # values that are remembered of a place
_NEW_VALUES = 4  # new values within a window of calls after which a place is unguarded, or calls run eagerly
_WINDOW = 32  # calls
_QUIET = 256  # calls without a new value after which a place is guarded again
_TAKING_TURNS = 8  # values of a place; after no more than these, a window of calls without a new value is enough
# The same after an eager break set the place: for the first time, the second, and later.
_SUSPENDED_CALLS = (1, _WINDOW, _QUIET)


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

        Of a module, and of an object that code leads to, those attributes are named that the code does not only call
        as methods: no plain value is one.
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


def shown_place(place: Place) -> str:
    """Name a place, for messages."""
    return place[0] if place[1] is ALL else place_name(place)


def why_set_by_break(names: str) -> str:
    """Return why calls run eagerly after an eager break set these places, with a remedy."""
    return f"{names}, which an eager break set and the forward may read: {IN_BREAK}"


class NewValues:
    """Finds the places that take new values all the time.

    Attributes:
        unguarded: places that no code names, each with the last call at which it stays unguarded.
        volatile: places that make calls run eagerly, each with the last such call.
    """

    def __init__(self, places: PlacesInCode) -> None:
        self._places = places
        self.unguarded: dict[Place, int] = {}
        self.volatile: dict[Place, int] = {}
        self._seen: dict[Place, set[Hashable]] = {}  # the values that were found in a place
        self._news: dict[Place, collections.deque[tuple[int, str]]] = {}  # calls that found a new value, and it

    def note(self, place: Place, values: Entries, call: int) -> None:
        """Note that a call found other values in a place."""
        before = frozenset((key, change[0]) for key, change in values.items())
        now = frozenset((key, change[1]) for key, change in values.items())
        seen = self._seen.setdefault(place, {before})
        if now in seen:
            return
        if len(seen) >= _MAX_SEEN:
            seen.clear()
        seen.add(now)
        quiet = _WINDOW if len(seen) <= _TAKING_TURNS else _QUIET
        if place in self.volatile:
            self.volatile[place] = call + quiet
        news = self._news.setdefault(place, collections.deque(maxlen=_NEW_VALUES))
        news.append((call, shown_entry(next(iter(values.values()))[1])))
        if len(news) == _NEW_VALUES and news[0][0] > call - _WINDOW:
            if self._places.is_named(place):
                self.volatile[place] = call + quiet
            else:
                self.unguarded[place] = call + _QUIET

    def guard_again(self, call: int) -> None:
        """Guard places again that kept their value for long."""
        for places in (self.unguarded, self.volatile):
            for place, last in list(places.items()):
                if call > last:
                    del places[place]
                    self._news.pop(place, None)

    def containers(self) -> frozenset[str]:
        """Return the names of the containers among these places."""
        return frozenset(name for name, key in (*self.unguarded, *self.volatile) if key is ALL)

    def forget(self) -> None:
        """Let calls have graphs again until new values are found."""
        self.volatile.clear()
        self._news.clear()

    def shown(self, place: Place) -> str:
        """List the latest new values in a place, for messages."""
        return ", ".join(dict.fromkeys(value for _, value in self._news[place]))


class BreakChanges:
    """Makes calls run eagerly if eager breaks set what code in graphs may read: a graph would go on with the old value.

    Args:
        places: how code uses places.
        volatile: as of `NewValues`; added to.
        proves: True if graphs are compared with eager, which shows that code in graphs does not read such a place.
    """

    def __init__(self, places: PlacesInCode, volatile: dict[Place, int], *, proves: bool) -> None:
        self._places, self._volatile, self._proves = places, volatile, proves
        self._set_by_run: dict[Place, Entries] = {}  # the changes of the latest run
        self._set_by_breaks: set[Place] = set()  # places that breaks set, and code in graphs may read
        self._suspensions: dict[Place, int] = {}  # how often these have made calls run eagerly, beyond the first time

    def __contains__(self, place: Place) -> bool:
        """True if a break set the place, and so made calls run eagerly."""
        return place in self._set_by_breaks

    def note_run(self, changed: dict[Place, Entries], call: int) -> None:
        """Note the changes of a run. If no proof follows, each may be one by a break that code in graphs reads."""
        self._set_by_run = changed
        if not self._proves and self._places.code is not None and self._places.code.has_breaks:
            self.suspend(self.read_of(changed, ()), call)

    def suspend(self, places: Iterable[Place], call: int) -> None:
        """Let the next calls run eagerly, since code in graphs may read these places."""
        for place in places:
            if (
                place not in self._volatile or place not in self._suspensions
            ):  # new values alone may make calls run eagerly
                self._suspensions[place] = self._suspensions.get(place, -1) + 1
            quiet = _SUSPENDED_CALLS[min(self._suspensions[place], len(_SUSPENDED_CALLS) - 1)]
            self._volatile[place] = call + quiet
            self._set_by_breaks.add(place)

    def read_of(self, changed: Mapping[Place, Entries], unread: Collection[Place]) -> list[Place]:
        """Return the changed places that code in a graph may read, except those that it was shown not to read.

        A tensor that a break leaves is found by captures.
        """
        read = []
        for place, values in changed.items():
            is_opened = place[1] == CLASS and ABSENT in values[CLASS]  # an object got its first attribute, or lost it
            if not (is_opened or all(is_of_tensor(now) for _, now in values.values())) and self._is_read(place, unread):
                read.append(place)
        return read

    def note_equal(self, before: dict[Place, Any], unread: set[Place], guarded: set[Place]) -> bool:
        """Note that a replay of a graph equalled the latest run, eager breaks included.

        The graph's code does not read what breaks set in two such runs that found different values. If a value is part
        of the key, all runs of a graph find the same one, and code before the breaks may read it.

        Args:
            before: what runs found in the places that they set, if replays of this graph equalled them; added to here.
            unread: the places that breaks set, and this graph does not read; added to here. Other graphs may read them.
            guarded: the places that are guarded.

        Returns:
            True if the next run need not be compared as well.
        """
        found = {place: {key: was for key, (was, _) in values.items()} for place, values in self._set_by_run.items()}
        may_be_read = {place: values for place, values in found.items() if self._is_read(place, unread)}
        met = {place for place, values in may_be_read.items() if place in before}
        unread |= {place for place in met if place in guarded or before[place] != may_be_read[place]}
        before |= {place: values for place, values in may_be_read.items() if place not in met}
        return may_be_read.keys() <= unread

    def set_by_latest_run(self, unread: Collection[Place]) -> list[str]:
        """Name what the latest run set and code in a graph may read, except those that it was shown not to read."""
        return [shown_place(place) for place in self._set_by_run if self._is_read(place, unread)]

    def forget(self) -> None:
        """Forget what breaks set so far."""
        self._set_by_breaks.clear()
        self._suspensions.clear()

    def _is_read(self, place: Place, unread: Collection[Place]) -> bool:
        computes = self._places.code is not None and self._places.code.computes_names
        return place not in unread and (computes or self._places.is_named(place))


class PlaceHistory:
    """Notes who changed which places: runs of the module, other code, or eager breaks of replays.

    A place is an effect of runs, or nothing has changed it yet, or it is in `guarded`. A container is one place.

    Args:
        places: how code uses places.
        proves: True if graphs are compared with eager.

    Attributes:
        effects: places that every run changes, and nothing else. They are unguarded.
        guarded: places that other code changed as well, or that some run left unchanged.
        filled: places to which a run only added, by keys that no code names, when it changed them last.
        own_changes: changes by runs of guarded places, which no call has found yet.
        new_values: the places that take new values all the time.
        breaks: what eager breaks set.
    """

    def __init__(self, places: PlacesInCode, *, proves: bool) -> None:
        self._places = places
        self._runs = 0  # runs that were observed to their end
        self.effects: set[Place] = set()
        self.guarded: set[Place] = set()
        self.filled: set[Place] = set()
        self.own_changes: Changes = {}
        self.new_values = NewValues(places)
        self.breaks = BreakChanges(places, self.new_values.volatile, proves=proves)

    def changed_by_others(self, changes: Changes, call: int) -> None:
        """Note changes by other code; places that take many values are unguarded, or make calls run eagerly."""
        unguarded = self.new_values.unguarded
        for place, values in self._places.by_place(changes).items():
            if place in unguarded:
                unguarded[place] = call
                continue
            self.effects.discard(place)
            self.guarded.add(place)
            self.new_values.note(place, values, call)

    def find_own_changes(self, call: int) -> None:
        """Note the changes by runs of guarded places like changes by other code, once a call finds them."""
        own_changes, self.own_changes = self.own_changes, {}
        self.changed_by_others(own_changes, call)

    def changed_by_run(self, changes: Changes, call: int, *, is_whole: bool) -> Set[Place]:
        """Stop guarding places that every run changed so far; the key stays that of the values before the run.

        Args:
            changes: the changes of one run.
            call: the number of the call.
            is_whole: True if it ran to its end, eager breaks included: all other places are guarded from now on.

        Returns:
            The places that are guarded again since the run left them unchanged.
        """
        changed = self._places.by_place(changes)
        for place, values in changed.items():
            was_filled = place in self.filled
            is_filled = self._places.fills(place, values) and (was_filled or place not in self.effects)
            if place not in self.guarded and (is_filled or not self._runs):
                self.effects.add(place)
            elif place not in self.effects or was_filled:
                self.effects.discard(place)
                self.guarded.add(place)
                self.own_changes |= {(place[0], key): change for key, change in values.items()}
            (self.filled.add if is_filled else self.filled.discard)(place)
        self.breaks.note_run(changed, call)
        if not is_whole:
            return frozenset()
        self._runs += 1
        unchanged = self.effects - changed.keys() - self.filled
        self.effects -= unchanged
        self.guarded |= unchanged
        return unchanged

    def changed_by_breaks(self, changes: Changes, call: int, unread: Collection[Place] = ()) -> None:
        """Stop guarding places that only eager breaks of a replay change, unless code in graphs may read them.

        The key stays that of the values before. `unread` are places that code in the graph was shown not to read.
        """
        guarded: Changes = {}
        changed = self._places.by_place(changes)
        self.breaks.suspend(self.breaks.read_of(changed, unread), call)
        for place, values in changed.items():
            if place in self.guarded or (place not in self.effects and self._places.is_named(place)):
                guarded |= {(place[0], key): change for key, change in values.items()}
            else:
                self.effects.add(place)
        self.changed_by_others(guarded, call)

    def why_volatile(self) -> str:
        """Return why calls run eagerly: the place that makes them, and a remedy."""
        place = next(iter(self.new_values.volatile))
        if place in self.breaks:
            return why_set_by_break(shown_place(place))
        news = f"took {_NEW_VALUES} new values within {_WINDOW} calls ({self.new_values.shown(place)})"
        return f"{shown_place(place)} {news}: {_REMEDY}"
