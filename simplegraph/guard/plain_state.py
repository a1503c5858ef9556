"""The plain values that a call reads through Python, as a part of its key: two values, two graphs.

In a module's tree every plain value counts: attributes of modules and of objects that they hold, items of containers.
For code, its functions count, and the attributes of classes, globals and closures that it names. Versions of dicts say
when to read them again, so a call reads no value if nothing was set. Reading runs no user code.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import operator
import threading
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

from simplegraph.base.objects import own_dict
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.guard.code_below import CodeBelow
from simplegraph.guard.holders import Holders, SearchRoot, ValueHolder
from simplegraph.guard.reading import Comparison
from simplegraph.guard.values import (
    ALL,
    CLASS,
    ORDER,
    Place,
    PlainValues,
    has_object,
    is_of_tensor,
    place_name,
    shown_entry,
)
from simplegraph.program.breaks.marks import ACTIVE
from simplegraph.program.program import SegmentRecorder
from simplegraph.program.snapshot import ABSENT

_MAX_KEYS = 256  # keys that are remembered, so that returning to earlier values costs nothing
_NEW_VALUES = 4  # new values within a window of calls after which a place is let go, or calls run eagerly
IN_BREAK = "let the break do what depends on it, or rename it if the forward only names something else like it"
_REMEDY = "pass it as a tensor, keep it in a buffer, or rename it if the code has its name for something else"
Entries = dict[Hashable, Any]  # by key, the key of a value, or the keys of its old and new value
Changes = dict[Place, tuple[Hashable, Hashable]]
_LISTS = (list, collections.deque)
_WINDOW = 32  # calls
_QUIET = 256  # calls without a new value after which a place counts again
_RESTS = (1, _WINDOW, _QUIET)  # the same after an eager break set the place: for the first time, the second, and later


def _parts(parts: Iterable[tuple[str, frozenset[Any]]]) -> frozenset[tuple[str, frozenset[Any]]]:
    """Return the parts of a key that are not empty, in any order."""
    return frozenset(part for part in parts if part[1])


def _is_part(key: PlainValues, holder: Any, left_out: set[Place]) -> bool:
    """True if a key has a holder's present values, but those at places that are left out."""
    return bool(key.parts.get(holder.name, frozenset()) == holder.part(left_out))


def _without(places: set[Place], part: tuple[str, frozenset[Any]]) -> tuple[str, frozenset[Any]]:
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


def _changes(before: Mapping[str, Entries], now: Mapping[str, Entries]) -> Changes:
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


class PlainState:
    """Reads the plain values that calls of a module find, as a part of their key.

    A place that every run changes is left out of the key; such calls have no graph. It counts again once a run leaves
    it unchanged or other code changes it. A place with ever new values is left out if no code names it; else its calls
    run eagerly.

    Args:
        breaks: True if values that eager breaks read count as well, since graphs hold them.
        proves: True if graphs are compared with eager.

    Attributes:
        comparisons: at most one, which determines the values of a call while it holds and has a key.
        must_look: True if every call must read all values, since some of them do not count at present.
        calls: the number of calls since the first one was read, for windows of calls.
        scripts: names of the TorchScript modules and functions that calls lead to.
    """

    def __init__(self, *, breaks: bool, proves: bool = True) -> None:
        self._breaks, self._proves = breaks, proves
        self._lock = threading.RLock()
        self.comparisons: list[Comparison] = []  # one; cleared once an object ends whose attributes are kept
        self._alive: list[bool] = []  # also cleared then, so that a comparison being made meanwhile is not kept
        self._deaths: list[weakref.ref[Any]] = []
        self._roots: list[int] = []
        self._code: CodeBelow | None = None
        self._opened: set[int] = set()
        self._refused = ""  # why there is no key
        self.scripts: list[str] = []
        self._containers: set[str] = set()  # the names of holders that are containers
        self._lists: set[str] = set()  # the names of those that are lists or deques
        self._objects: set[str] = set()  # the names of holders that are the attributes of objects
        self._keys_to: dict[str, tuple[Any, ...] | None] = {}  # by the holder's name, the keys from a module to it
        self._entries: dict[str, Entries] = {}  # by the holder's name
        self._keys: dict[frozenset[tuple[str, frozenset[Any]]], PlainValues] = {}
        self._key = PlainValues({})
        self._asked = self._key  # what `now` returned last
        self.calls = 0
        self.must_look = False
        self._is_serving = False
        self._is_unread = False  # runs were not looked at since the last look
        self._served: dict[str, Entries] = {}  # the entries before captures and proofs
        self._changed: set[Place] = set()  # places that the real run before the latest captures changed
        self._runs = 0  # runs that were observed to their end
        # Places that every run changes, and nothing else. Here and below, a container counts as one place.
        self._effects: set[Place] = set()
        self._filled: set[Place] = set()  # those of them that only grew, by keys that no code names
        self._lengths: list[tuple[ValueHolder, int]] = []  # of containers among these, after the latest run
        self._counted: set[Place] = set()  # places that other code changed as well, or that some run left unchanged
        self._counted_anew: set[Place] = set()  # places that count since the key was made
        self._own_changes: Changes = {}  # changes by runs of places that count, which no call has found yet
        self._let_go: dict[Place, int] = {}  # places that are left out, and the call since which they are
        self._restless: dict[Place, int] = {}  # places that make calls run eagerly, and the call since which they do
        self._set_by_breaks: set[Place] = set()  # places that eager breaks of replays set, and graphs may read
        self._set_by_run: dict[Place, Entries] = {}  # the changes of the latest run, by place
        self._rests: dict[Place, int] = {}  # how often these have made calls run eagerly so far
        self._harmless: set[Place] = set()  # places that eager breaks set, and no graph reads
        self._closed: frozenset[str] = frozenset()  # names of containers in these two, whose contents are not read
        self._left_out: set[Place] = set()
        self._seen: dict[Place, set[Hashable]] = {}
        self._news: dict[Place, collections.deque[tuple[int, str]]] = {}  # calls that found a new value, and it

    def __call__(self, module: Any) -> PlainValues | None:
        """Return the values that a call finds, the same object as long as they are equal.

        Raises:
            CannotBind: a place takes new values all the time.
        """
        # While another thread captures, its runs change values: the call waits for it, and asks again.
        return None if self._is_serving else self._values(module)

    def now(self, module: Any) -> PlainValues:
        """Return the values that a call finds, if no plan served it.

        Raises:
            CannotBind: a place takes new values all the time, or values change while they are read.
        """
        with self._lock:
            own_changes, self._own_changes = self._own_changes, {}
            self._note_changes_by_others(own_changes)
            self._asked = self._values(module)
            return self._asked

    @contextlib.contextmanager
    def unread_run(self) -> Iterator[None]:
        """Surround a run at which nothing is looked: what has changed by the next look, runs may have changed."""
        self.calls += 1
        self._is_unread = True
        try:
            yield
        finally:
            self._lengths = [(holder, holder.length()) for holder, _ in self._lengths]

    def _note_lengths_of_filled(self) -> None:
        """Note the lengths of containers that runs fill, after a run."""
        names = {name for name, key in self._filled & self._effects if key is ALL}
        holders = (holder for comparison in self.comparisons[:1] for holder in comparison.holders)
        self._lengths = [(holder, holder.length()) for holder in holders if holder.name in names]

    def filled_by_others(self) -> set[str]:
        """Name the containers that runs fill, and whose lengths have changed since the latest run."""
        return {holder.name for holder, length in self._lengths if holder.length() != length}

    def _catch_up(self, module: Any) -> None:
        """Sort what changed since the last look, around runs at which nothing was looked.

        Runs changed the places that every run changes; other code may have changed the others.
        """
        self._is_unread = False
        own: Changes = {}
        others: Changes = {}
        by_others = self.filled_by_others()
        for place, values in self._look(module).items():
            (own if self._is_effect(place) and place[0] not in by_others else others)[place] = values
        self._note_changes_of_run(own, is_whole=False)
        self._note_changes_by_others(others)

    def _values(self, module: Any) -> PlainValues:
        with self._lock:
            if self._is_unread:
                self._catch_up(module)
            self._note_changes_by_others(self._look(module))
            self._count_again()
            self._close(module)
            self._make_key()
            if not self.comparisons:
                raise CannotBind(Reason.PYTHON_STATE, "what the call reads changes while it is looked at")
            if self._refused:
                raise CannotBind(Reason.PYTHON_STATE, self._refused)
            if self._restless:
                raise CannotBind(Reason.PYTHON_STATE, self._why(next(iter(self._restless))))
            return self._key

    def reads(self, attribute: str) -> bool:
        """True if code below a call has the name of this attribute, other than to call it as a method."""
        return self._code is not None and attribute in self._code.values

    def names(self, any_of: Collection[str]) -> bool:
        """True if code below a call has one of these names."""
        return self._code is not None and not self._code.names.isdisjoint(any_of)

    def renew(self, versions: Mapping[int, int]) -> None:
        """Accept new versions of dicts by their old ones: a replay left no plain values there."""
        with self._lock:
            for comparison in self.comparisons[:1]:
                self._keep(comparison.renewed(versions))

    def forget(self) -> None:
        """Find the holders of values again at the next call, and forget changes so far."""
        with self._lock:
            self.comparisons.clear()
            self._restless.clear()
            self._set_by_breaks.clear()
            self._rests.clear()
            self._harmless.clear()
            self._news.clear()
            self._lengths = []

    @contextlib.contextmanager
    def run(self, module: Any, *, is_read: bool = False) -> Iterator[None]:
        """Surround a run of the module, which makes all changes meanwhile; `is_read` if its call was just read."""
        if not (self.comparisons or self._is_serving):  # no call of it was read
            yield
            return
        with self._lock:
            if self._is_unread and not self._is_serving:
                self._catch_up(module)
            changes = {} if is_read else self._look(module)
            if not self._is_serving:
                self._note_changes_by_others(changes)
                self._close(module)
                self._make_key()
            before, is_complete = self._entries, False
        try:
            yield
            is_complete = True
        finally:
            with self._lock:
                self._look(module)
                # Eager breaks do not run in captures.
                is_whole = is_complete and not isinstance(ACTIVE.recorder, SegmentRecorder)
                self._note_changes_of_run(_changes(before, self._entries), is_whole=is_whole)
                if not self._is_serving:
                    self._make_key()
                self._lengths = []
                if self._filled:
                    self._note_lengths_of_filled()

    def claim(self, module: Any) -> None:
        """Attribute changes since the key was read to eager breaks of a replay, and so to the module."""
        with self._lock:
            self._note_changes_by_breaks(self._look(module))
            if not self._is_serving:
                self._make_key()

    @contextlib.contextmanager
    def serving(self, module: Any, *, claims: bool) -> Iterator[None]:
        """Surround captures and proofs, which undo the changes of their runs: those are no changes by other code.

        Args:
            module: the module.
            claims: True to attribute changes meanwhile to the module, as with eager breaks, which replays run, too.

        Raises:
            CannotBind: another thread has changed the values of the call since `now` returned them.
        """
        with self._lock:
            if self._values(module) is not self._asked:
                raise CannotBind(Reason.WARMUP, "other code changed what the call reads")
            before = self._served = self._entries
            self._is_serving = True
        try:
            yield
        finally:
            with self._lock:
                self._is_serving = False
                since = self._look(module)
                if claims:
                    self._note_changes_by_breaks(since)
                changes = _changes(before, self._entries)
                self._note_changes_by_others(
                    {place: change for place, change in changes.items() if not self._is_left_out(place)}
                )
                self._make_key()

    def check(self, module: Any) -> None:
        """Refuse captures for a key whose values a run of the same call changed: no later call would find them.

        Raises:
            CannotBind: a run changed them for the first time; captures find values that change each time.
        """
        with self._lock:
            self._look(module)
            changed = {place for place in _changes(self._served, self._entries) if not self._is_left_out(place)}
            changed = {place for place in changed if self._counted_anew.isdisjoint((place, (place[0], ALL)))}
            before, self._changed = self._changed, changed
            for place in changed - before:
                raise CannotBind(Reason.PYTHON_STATE, place_name(place))

    def set_by_others(self, module: Any) -> list[tuple[dict[Any, Any], Any, Any]]:
        """List the attributes that other code than the runs has set since `serving` began: their dict, name and value.

        Only those count whose names no code below the call sets, since a run may set others.
        """
        with self._lock:
            self._look(module)
            holders = {holder.name: holder for comparison in self.comparisons for holder in comparison.holders}
            found = []
            for name, key in _changes(self._served, self._entries):
                if name not in holders or name in self._containers or self._is_left_out((name, key)):
                    continue
                if type(key) is str and key.isidentifier() and not (self._code and self._code.sets(key)):
                    attributes = holders[name].find()
                    if type(attributes) is dict and key in attributes:
                        found.append((attributes, key, attributes[key]))
            return found

    # Reading values.

    def _look(self, module: Any) -> Changes:
        """Read the holders that moved since the last time; return the changes."""
        before, attributes = self._entries, own_dict(module) or {}
        try:
            if not self._read_moved(module, attributes):
                self._find(module)
        except Exception:  # another thread changes them: the call runs eagerly
            self.comparisons.clear()
            self._entries = {}
        return _changes(before, self._entries) if before and self._entries is not before else {}

    def _close(self, module: Any) -> None:
        """Stop reading below containers that take new values all the time: each new item would be searched."""
        closed = frozenset(name for name, key in (*self._let_go, *self._restless) if key is ALL)
        if closed != self._closed:
            self._closed = closed
            self.comparisons.clear()
            self._entries = {}
            self._look(module)

    def _read_moved(self, module: Any, attributes: dict[str, Any]) -> bool:
        """Read the holders that moved; False if there is a new object to open, or an object is no longer reached."""
        if getattr(type(module), "is_function", False) and list(map(id, module._modules.values())) != self._roots:
            return False
        for comparison in self.comparisons[:1]:
            if comparison.holds(attributes):
                return True
            if not comparison.has_children(attributes):
                return False
            entries = dict(self._entries)
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
            before = ((holder.entries, self._entries[holder.name]) for holder in moved)
            is_same = all(list(new.items()) == list(old.items()) for new, old in before)
            # The version may move though nothing that counts did, such as when a file's other globals are set, or a
            # run counts its calls.
            key, left_out = comparison.key, self._left_out
            is_key = is_same or (key is not None and all(_is_part(key, holder, left_out) for holder in moved))
            self._keep(comparison.after(moved, key if is_key else None))
            if not is_same:
                self._entries = entries
            return True
        return False

    def _find(self, module: Any) -> None:
        """Find all holders of values, and read them."""
        roots, function = [SearchRoot("", module)], None
        if getattr(type(module), "is_function", False):
            roots = [SearchRoot(name, child) for name, child in module._modules.items() if child is not None]
            function = module.function
            self._roots = list(map(id, module._modules.values()))
        comparisons, alive = self.comparisons, [True]
        comparisons.clear()

        def gone(_: Any) -> None:
            alive.clear()
            comparisons.clear()

        holders = Holders(roots, module, gone, function, breaks=self._breaks, closed=self._closed)
        self._deaths, self._opened, self._code = holders.deaths, holders.opened, holders.code
        self._refused, self.scripts = holders.refused, holders.scripts
        self._entries = {holder.name: holder.entries for holder in holders.all}
        self._containers = {holder.name for holder in holders.all if holder.is_container}
        lists = (holder for holder in holders.all if holder.is_container and issubclass(type(holder.find()), _LISTS))
        self._lists = {holder.name for holder in lists}
        self._objects = {holder.name for holder in holders.all if holder.owner is not None}
        self._keys_to = {holder.name: holder.keys for holder in holders.all}
        self._alive = alive
        self._keep(Comparison(holders.root, holders.all, None))

    def _keep(self, comparison: Comparison) -> None:
        self.comparisons[:] = [comparison]
        if not self._alive:
            self.comparisons.clear()

    def _make_key(self) -> None:
        """Make the key of the present values, or take the key that they had before."""
        self.must_look = bool(self._let_go or self._restless)
        for comparison in self.comparisons[:1]:
            if comparison.key is not None or self._refused:
                return
            parts = _parts((holder.name, holder.part(self._left_out)) for holder in comparison.holders)
            values = self._keys.pop(parts, None)
            if values is None and self._counted_anew:  # while all runs changed these no graph was captured
                values = self._keys.pop(_parts(_without(self._counted_anew, part) for part in parts), None)
            self._counted_anew.clear()
            self._key = self._keys[parts] = values or PlainValues({})  # the latest comes last
            self._key.parts = dict(parts)
            while len(self._keys) > _MAX_KEYS:
                del self._keys[next(iter(self._keys))]
            self._keep(comparison.after((), self._key))

    # Changes.

    def _note_changes_by_others(self, changes: Changes) -> None:
        """Note changes by other code; places that take many values are let go, or make calls run eagerly."""
        for place, values in self._by_place(changes).items():
            if place in self._let_go:
                self._let_go[place] = self.calls
                continue
            self._effects.discard(place)
            self._counted.add(place)
            before = frozenset((key, change[0]) for key, change in values.items())
            now = frozenset((key, change[1]) for key, change in values.items())
            seen = self._seen.setdefault(place, {before})
            if now in seen:
                continue
            if len(seen) >= _MAX_KEYS:
                seen.clear()
            seen.add(now)
            if place in self._restless:
                self._restless[place] = self.calls
            news = self._news.setdefault(place, collections.deque(maxlen=_NEW_VALUES))
            news.append((self.calls, shown_entry(next(iter(values.values()))[1])))
            if len(news) == _NEW_VALUES and news[0][0] > self.calls - _WINDOW:
                (self._restless if self._is_named(place) else self._let_go)[place] = self.calls
        self._leave_out()

    def _by_place(self, changes: Changes) -> dict[Place, Entries]:
        """Group changes by place; a container counts as one place."""
        grouped: dict[Place, Entries] = {}
        for (name, key), change in changes.items():
            grouped.setdefault((name, ALL if name in self._containers else key), {})[key] = change
        return grouped

    def _count_again(self) -> None:
        """Count places again that kept their value for long."""
        for places in (self._let_go, self._restless):
            for place, since in list(places.items()):
                if self.calls - since > _QUIET:
                    del places[place]
                    self._news.pop(place, None)
        self._leave_out()

    def _leave_out(self) -> None:
        """Leave places that do not count out of the key."""
        left_out = {*self._effects, *self._let_go}
        if left_out == self._left_out:
            return
        added, counted = left_out - self._left_out, self._left_out - left_out
        self._left_out = left_out
        if counted - self._counted_anew:  # one that is empty by now is no part of a key, as when it was left out
            self._keys.clear()
        if added:  # values that differed only in these places are equal now
            keys, self._keys = self._keys, {}
            for parts, key in keys.items():
                self._keys.setdefault(_parts(_without(added, part) for part in parts), key)
        for comparison in self.comparisons[:1]:
            self._keep(comparison.after((), None))

    def _note_changes_of_run(self, changes: Changes, *, is_whole: bool) -> None:
        """Leave out places that every run changed so far; the key stays that of the values before the run.

        Args:
            changes: the changes of one run.
            is_whole: True if it ran to its end, eager breaks included, so that all other places count from now on.
        """
        changed = self._by_place(changes)
        for place, values in changed.items():
            was_filled = place in self._filled
            is_filled = self._fills(place, values) and (was_filled or place not in self._effects)
            if place not in self._counted and (is_filled or not self._runs):
                self._effects.add(place)
            elif place not in self._effects or was_filled:
                self._effects.discard(place)
                self._counted.add(place)
                self._own_changes |= {(place[0], key): change for key, change in values.items()}
            (self._filled.add if is_filled else self._filled.discard)(place)
        self._set_by_run = changed
        if not self._proves and self._code is not None and self._code.has_breaks:
            self._rest_after_breaks(changed)
        if is_whole:
            self._runs += 1
            unchanged = self._effects - changed.keys() - self._filled
            self._effects -= unchanged
            self._counted |= unchanged
            self._counted_anew |= unchanged
        self._leave_out()

    def note_equal(self, before: dict[Place, Any]) -> bool:
        """Note that a replay of a graph equalled the latest run, eager breaks included.

        Code in graphs does not read what breaks set in two such runs that found different values. If a value is part
        of the key, all runs of a graph find the same one, and code before the breaks may read it.

        Args:
            before: what runs found in the places that they set, if replays of this graph equalled them; added to here.

        Returns:
            True if the next run need not be compared as well.
        """
        found = {place: {key: was for key, (was, _) in values.items()} for place, values in self._set_by_run.items()}
        may_be_read = {place: values for place, values in found.items() if self._may_be_read(place)}
        met = {place for place, values in may_be_read.items() if place in before}
        self._harmless |= {place for place in met if place in self._counted or before[place] != may_be_read[place]}
        before |= {place: values for place, values in may_be_read.items() if place not in met}
        return may_be_read.keys() <= self._harmless

    def set_by_latest_run(self) -> list[str]:
        """Name what the latest run set and code in graphs may read."""
        return [_shown_place(place) for place in self._set_by_run if self._may_be_read(place)]

    def _may_be_read(self, place: Place) -> bool:
        computes = self._code is not None and self._code.computes_names
        return place not in self._harmless and (computes or self._is_named(place))

    def _rest_after_breaks(self, changed: Mapping[Place, Entries]) -> None:
        """Let the next calls run eagerly if eager breaks set what code in graphs may read.

        A graph would go on with the value from before. A tensor that a break leaves is found by captures.
        """
        for place, values in changed.items():
            is_opened = place[1] == CLASS and ABSENT in values[CLASS]  # an object got its first attribute, or lost it
            if is_opened or all(is_of_tensor(now) for _, now in values.values()) or not self._may_be_read(place):
                continue
            if place not in self._restless:
                self._rests[place] = self._rests.get(place, -1) + 1
            quiet = _RESTS[min(self._rests[place], len(_RESTS) - 1)]
            self._restless[place] = self.calls - (_QUIET - quiet)
            self._set_by_breaks.add(place)

    def _note_changes_by_breaks(self, changes: Changes) -> None:
        """Leave out places that only eager breaks of a replay change, unless code in graphs may read them.

        The key stays that of the values before.
        """
        counted: Changes = {}
        changed = self._by_place(changes)
        self._rest_after_breaks(changed)
        for place, values in changed.items():
            if place in self._counted or (place not in self._effects and self._is_named(place)):
                counted |= {(place[0], key): change for key, change in values.items()}
            else:
                self._effects.add(place)
        self._note_changes_by_others(counted)

    def _fills(self, place: Place, values: Entries) -> bool:
        """True if all values are new, by keys that no code names, such as in a cache that is filled for each shape.

        Code asks a list for its length and all its items, so a list is filled only if code does nothing but add to it.
        A list in another container is an item of that: its name in code is none of its own.
        """
        (name, _), code = place, self._code
        above, _, attribute = name.rpartition(".")
        is_named_list = name in self._lists and above not in self._containers
        if is_named_list and attribute.isidentifier() and not (code is not None and code.only_fills(attribute)):
            return False
        names = code.names if code is not None else ()
        return all(before is ABSENT and not (type(key) is str and key in names) for key, (before, _) in values.items())

    def _is_effect(self, place: Place) -> bool:
        return not self._effects.isdisjoint((place, (place[0], ALL)))

    def _is_left_out(self, place: Place) -> bool:
        return not self._left_out.isdisjoint((place, (place[0], ALL)))

    def _is_named(self, place: Place) -> bool:
        """True if code may lead to a place: it names the place, or a key that leads to it.

        Of a module, and of an object that code leads to, only attributes count that the code names, other than to call
        them as methods: no plain value is one.
        """
        name, key = place
        code, keys, attribute = self._code, self._keys_to.get(name, ()), name.split(".")[-1]
        if code is None:
            return keys is None
        if keys is None:
            is_attribute = name in self._containers and name.rpartition(".")[0] in self._objects
            return not is_attribute or code.computes_names or attribute in code.values
        if not keys and name not in self._containers and not code.computes_names:
            return key in code.values
        return any(part in code.names for part in (*keys, attribute, key) if type(part) is str)

    def _why(self, place: Place) -> str:
        name = _shown_place(place)
        if place in self._set_by_breaks:
            return f"{name}, which an eager break set and the forward may read: {IN_BREAK}"
        values = ", ".join(dict.fromkeys(value for _, value in self._news[place]))
        return f"{name} takes new values all the time ({values}): {_REMEDY}"


def _shown_place(place: Place) -> str:
    return place[0] if place[1] is ALL else place_name(place)
