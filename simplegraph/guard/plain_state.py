"""The plain values that a call reads through Python, as a part of its key: two values, two graphs.

In a module's tree every plain value counts: attributes of modules and of objects that they hold, items of containers.
Of code count functions, and the attributes of classes, globals and closures that it names. Versions of dicts say when
to look, so a call reads no value where nothing was set. Looking runs no code of the user's.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

from simplegraph.base.objects import own_dict
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.guard.code_below import CodeBelow
from simplegraph.guard.holders import ALL, Holders, Place, SearchRoot, has_object
from simplegraph.guard.reading import Comparison
from simplegraph.guard.values import ORDER, PlainValues, place_name, shown_entry
from simplegraph.program.breaks.marks import ACTIVE
from simplegraph.program.program import SegmentRecorder
from simplegraph.program.snapshot import ABSENT

_MAX_KEYS = 256  # that are remembered, so that going back costs nothing
_MOST_VALUES = 5  # new ones in a window of calls, from which on a place is let go, or calls run eagerly
_REMEDY = "pass it as a tensor, keep it in a buffer, or rename it if the code has its name for something else"
Entries = dict[Hashable, Any]  # by key, what tells a value from others, or what that was and is
Changes = dict[Place, tuple[Hashable, Hashable]]
_WINDOW, _QUIET = 32, 256  # calls; after so many without a new value a place counts again


def _parts(parts: Iterable[tuple[str, frozenset[Any]]]) -> frozenset[tuple[str, frozenset[Any]]]:
    """Return the parts of a key that hold something, in whichever order they were found."""
    return frozenset(part for part in parts if part[1])


def _without(places: set[Place], part: tuple[str, frozenset[Any]]) -> tuple[str, frozenset[Any]]:
    """Return the part of a key that a holder is, without some places."""
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
    """Return the places that hold something else, with what they held, and hold."""
    changes = {}
    for name in before.keys() | now.keys():
        old, new = before.get(name, {}), now.get(name, {})
        if old is not new:
            for key in old.keys() | new.keys():
                if old.get(key, ABSENT) != new.get(key, ABSENT):
                    changes[name, key] = old.get(key, ABSENT), new.get(key, ABSENT)
    return changes


class PlainState:
    """Reads the plain values that calls of a module find, as a part of their key.

    What every run of the module changes is left out of the key: a call that changes it has no graph. It counts as soon
    as a run leaves it as it was, such as a mode that another call is passed, or others change it. What takes new values
    all the time is left out if no code names it; else such calls run eagerly.

    Args:
        breaks: what eager breaks read counts as well, since graphs hold it.

    Attributes:
        held: one comparison at most, which tells the values of a call while it holds and has a key.
        must_look: it does not count what moves without it: every call has to look.
        calls: so far.
    """

    def __init__(self, *, breaks: bool) -> None:
        self._breaks = breaks
        self._lock = threading.RLock()
        self.held: list[Comparison] = []  # one; cleared once something is gone whose attributes are kept
        self._alive: list[bool] = []  # cleared then, too: a comparison that is being made must not come after that
        self._deaths: list[weakref.ref[Any]] = []
        self._roots: list[int] = []
        self._code: CodeBelow | None = None
        self._opened: set[int] = set()
        self._refused = ""  # why there is no key
        self._containers: set[str] = set()  # the names of the holders that are some
        self._keys_to: dict[str, tuple[Any, ...] | None] = {}  # the same holders: by which a module leads to each
        self._entries: dict[str, Entries] = {}  # by the holder's name
        self._keys: dict[frozenset[tuple[str, frozenset[Any]]], PlainValues] = {}
        self._key = PlainValues({})
        self.calls = 0
        self.must_look = False
        self._is_serving = False
        self._served: dict[str, Entries] = {}  # what there was before that
        self._changed: set[Place] = set()  # by the real run before the latest captures
        self._runs = 0  # that were observed to their end
        self._effects: set[Place] = set()  # what all of them changed, and nobody else; all of a container is one
        self._filled: set[Place] = set()  # of these what only grew, by keys that no code names
        self._counted: set[Place] = set()  # what others changed as well, or what some run left as it was
        self._found: set[Place] = set()  # what counts since the key was made
        self._own: Changes = {}  # what runs changed of what counts, that no call has found yet
        self._let_go: dict[Place, int] = {}  # since which call
        self._restless: dict[Place, int] = {}  # since which call: such calls run eagerly
        self._closed: frozenset[str] = frozenset()  # containers of these, by name: nothing below them is looked at
        self._left_out: set[Place] = set()
        self._seen: dict[Place, set[Hashable]] = {}
        self._news: dict[Place, collections.deque[tuple[int, str]]] = {}  # calls that found a new value, and it

    def __call__(self, module: Any) -> PlainValues | None:
        """Return the values that a call finds: the very same object for as long as they are the same.

        Raises:
            CannotBind: a place takes new values all the time.
        """
        # While another thread captures, values are as its runs leave them: the call waits for it, and asks again.
        return None if self._is_serving else self._values(module)

    def now(self, module: Any) -> PlainValues:
        """Return the values that a call finds which a graph might serve, outside of the way of replays.

        Raises:
            CannotBind: the same, or they change while they are looked at.
        """
        with self._lock:
            own, self._own = self._own, {}
            self._note(own)
            return self._values(module)

    def _values(self, module: Any) -> PlainValues:
        with self._lock:
            self._note(self._look(module))
            self._count_again()
            self._close(module)
            self._settle()
            if not self.held:
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
        """Take dicts of these versions for known by their new ones: what a replay left there is no plain value."""
        with self._lock:
            for comparison in self.held[:1]:
                self._hold(comparison.renewed(versions))

    def forget(self) -> None:
        """Find anew what holds values at the next call, and forget what changed so far."""
        self.held.clear()
        self._restless.clear()
        self._news.clear()

    @contextlib.contextmanager
    def run(self, module: Any) -> Iterator[None]:
        """Surround a run of the module: what changes meanwhile, it changes."""
        if not (self.held or self._is_serving):  # no call of it was read
            yield
            return
        with self._lock:
            changes = self._look(module)
            if not self._is_serving:
                self._note(changes)
                self._close(module)
                self._settle()
            before, is_complete = self._entries, False
        try:
            yield
            is_complete = True
        finally:
            with self._lock:
                self._look(module)
                # Eager breaks do not run in captures.
                is_whole = is_complete and not isinstance(ACTIVE.recorder, SegmentRecorder)
                self._sort(_changes(before, self._entries), is_whole=is_whole)
                if not self._is_serving:
                    self._settle()

    def claim(self, module: Any) -> None:
        """Take what changed since the key was asked for as done by eager breaks of a replay, and so by the module."""
        with self._lock:
            self._claim(self._look(module))
            if not self._is_serving:
                self._settle()

    @contextlib.contextmanager
    def serving(self, module: Any, *, claims: bool) -> Iterator[None]:
        """Surround captures and proofs, which put back what their runs change: that is no change by others.

        Args:
            module: it.
            claims: what changes meanwhile is the module's doing, as with eager breaks, which replays run as well.
        """
        with self._lock:
            before = self._served = self._entries
            self._is_serving = True
        try:
            yield
        finally:
            with self._lock:
                self._is_serving = False
                since = self._look(module)
                if claims:
                    self._claim(since)
                changes = _changes(before, self._entries)
                self._note({place: change for place, change in changes.items() if not self._is_left_out(place)})
                self._settle()

    def check(self, module: Any) -> None:
        """Refuse captures for a key whose values a run of the same call changed: no later call would find them.

        Raises:
            CannotBind: it did, and did not so before: what changes each time is found by the captures.
        """
        with self._lock:
            self._look(module)
            changed = {place for place in _changes(self._served, self._entries) if not self._is_left_out(place)}
            changed = {place for place in changed if self._found.isdisjoint((place, (place[0], ALL)))}
            before, self._changed = self._changed, changed
            for place in changed - before:
                raise CannotBind(Reason.PYTHON_STATE, place_name(place))

    # What there is.

    def _look(self, module: Any) -> Changes:
        """Read what moved since the last look; return the places that hold something else, what they held, and hold."""
        before, attributes = self._entries, own_dict(module) or {}
        if not self._read_moved(module, attributes):
            try:
                self._find(module)
            except Exception:  # another thread is at it: the call runs eagerly
                self.held.clear()
                self._entries = {}
        return _changes(before, self._entries) if before and self._entries is not before else {}

    def _close(self, module: Any) -> None:
        """Look no longer below containers that take new values all the time: each new item would be searched."""
        closed = frozenset(name for name, key in (*self._let_go, *self._restless) if key is ALL)
        if closed != self._closed:
            self._closed = closed
            self.held.clear()
            self._entries = {}
            self._look(module)

    def _read_moved(self, module: Any, attributes: dict[str, Any]) -> bool:
        """Read the holders that moved; False if there is something new to open, or a way to something is gone."""
        if getattr(type(module), "is_function", False) and list(map(id, module._modules.values())) != self._roots:
            return False
        for comparison in self.held[:1]:
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
                except Exception:  # gone, or another thread is at it
                    return False
                known = entries[holder.name]
                entries[holder.name] = holder.entries
                if holder.name in self._closed:
                    continue
                opened = (entry for key, entry in holder.entries.items() if known.get(key) != entry)
                if empty or holder.inside != inside or any(map(has_object, opened)):
                    return False
            if not moved or any(holder.mark is None for holder in moved):
                return False
            before = ((holder.entries, self._entries[holder.name]) for holder in moved)
            is_same = all(list(now.items()) == list(then.items()) for now, then in before)
            # As where a file's other globals are set: its version moved, and nothing that counts did.
            self._hold(comparison.after(moved, comparison.key if is_same else None))
            if not is_same:
                self._entries = entries
            return True
        return False

    def _find(self, module: Any) -> None:
        """Find all that holds values, and read it."""
        roots, function = [SearchRoot("", module)], None
        if getattr(type(module), "is_function", False):
            roots = [SearchRoot(name, child) for name, child in module._modules.items() if child is not None]
            function = module.function
            self._roots = list(map(id, module._modules.values()))
        held, alive = self.held, [True]
        held.clear()

        def gone(_: Any) -> None:
            alive.clear()
            held.clear()

        holders = Holders(roots, module, gone, function, breaks=self._breaks, closed=self._closed)
        self._deaths, self._opened, self._code = holders.deaths, holders.opened, holders.code
        self._refused = holders.refused
        self._entries = {holder.name: holder.entries for holder in holders.all}
        self._containers = {holder.name for holder in holders.all if holder.is_container}
        self._keys_to = {holder.name: holder.keys for holder in holders.all}
        self._alive = alive
        self._hold(Comparison(holders.root, holders.all, None))

    def _hold(self, comparison: Comparison) -> None:
        self.held[:] = [comparison]
        if not self._alive:
            self.held.clear()

    def _settle(self) -> None:
        """Make the key of the values that there are now, or take the one that these had before."""
        self.must_look = bool(self._let_go or self._restless)
        for comparison in self.held[:1]:
            if comparison.key is not None or self._refused:
                return
            parts = _parts((holder.name, holder.part(self._left_out)) for holder in comparison.holders)
            found = self._keys.pop(parts, None)
            if found is None and self._found:  # while all runs changed these no graph was captured
                found = self._keys.pop(_parts(_without(self._found, part) for part in parts), None)
            self._found.clear()
            self._key = self._keys[parts] = found or PlainValues({})  # the latest comes last
            self._key.parts = dict(parts)
            while len(self._keys) > _MAX_KEYS:
                del self._keys[next(iter(self._keys))]
            self._hold(comparison.after((), self._key))

    # What changes.

    def _note(self, changes: Changes) -> None:
        """Note what others changed: places that take many values are let go, or make calls run eagerly."""
        for place, values in self._by_effect(changes).items():
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
            news = self._news.setdefault(place, collections.deque(maxlen=_MOST_VALUES - 1))
            news.append((self.calls, shown_entry(next(iter(values.values()))[1])))
            if len(news) == _MOST_VALUES - 1 and news[0][0] > self.calls - _WINDOW:
                (self._restless if self._is_named(place) else self._let_go)[place] = self.calls
        self._leave_out()

    def _by_effect(self, changes: Changes) -> dict[Place, Entries]:
        """Group changes by place; all of a container is one."""
        grouped: dict[Place, Entries] = {}
        for (name, key), change in changes.items():
            grouped.setdefault((name, ALL if name in self._containers else key), {})[key] = change
        return grouped

    def _count_again(self) -> None:
        """Let places count again that kept their value for long."""
        for places in (self._let_go, self._restless):
            for place, since in list(places.items()):
                if self.calls - since > _QUIET:
                    del places[place]
                    self._news.pop(place, None)
        self._leave_out()

    def _leave_out(self) -> None:
        """Leave out of the key what does not count."""
        left_out = {*self._effects, *self._let_go}
        if left_out == self._left_out:
            return
        added, self._left_out = left_out - self._left_out, left_out
        if added:  # values that were told apart by these alone are the same by now
            keys, self._keys = self._keys, {}
            for parts, key in keys.items():
                self._keys.setdefault(_parts(_without(added, part) for part in parts), key)
        for comparison in self.held[:1]:
            self._hold(comparison.after((), None))

    def _sort(self, changes: Changes, *, is_whole: bool) -> None:
        """Leave out what every run changed so far; the key stays the one of the values before.

        Args:
            changes: what one run changed.
            is_whole: it ran to its end, eager breaks included, so that the rest counts from now on.
        """
        changed = self._by_effect(changes)
        for place, values in changed.items():
            was_filled = place in self._filled
            is_filled = self._fills(values) and (was_filled or place not in self._effects)
            if place not in self._counted and (is_filled or not self._runs):
                self._effects.add(place)
            elif place not in self._effects or was_filled:
                self._effects.discard(place)
                self._counted.add(place)
                self._own |= {(place[0], key): change for key, change in values.items()}
            (self._filled.add if is_filled else self._filled.discard)(place)
        if is_whole:
            self._runs += 1
            found = self._effects - changed.keys() - self._filled
            self._effects -= found
            self._counted |= found
            self._found |= found
        self._leave_out()

    def _claim(self, changes: Changes) -> None:
        """Leave out what eager breaks of a replay change, and nobody else; the key stays the one before."""
        counted: Changes = {}
        for place, values in self._by_effect(changes).items():
            if place in self._counted:
                counted |= {(place[0], key): change for key, change in values.items()}
            else:
                self._effects.add(place)
        self._note(counted)

    def _fills(self, values: Entries) -> bool:
        """True for what is new by keys that no code names, as of a cache that is filled for each shape."""
        names = self._code.names if self._code is not None else ()
        return all(before is ABSENT and not (type(key) is str and key in names) for key, (before, _) in values.items())

    def _is_left_out(self, place: Place) -> bool:
        return not self._left_out.isdisjoint((place, (place[0], ALL)))

    def _is_named(self, place: Place) -> bool:
        """True if code may lead to a place: it names it, or a key on the way to it."""
        names, keys = self._code.names if self._code is not None else (), self._keys_to.get(place[0], ())
        return keys is None or any(
            part in names for part in (*keys, *place[0].split(".")[-1:], place[1]) if type(part) is str
        )

    def _why(self, place: Place) -> str:
        values = ", ".join(dict.fromkeys(value for _, value in self._news[place]))
        name = place[0] if place[1] is ALL else place_name(place)
        return f"{name} takes new values all the time ({values}): {_REMEDY}"
