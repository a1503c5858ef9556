"""The plain values that a call reads through Python, as a part of its key: two values, two graphs.

In a module's tree every plain value is guarded: attributes of modules and of objects that they hold, items of
containers. Of code, its functions are guarded, and the attributes of classes, globals and closures that it names.
Versions of dicts say when to read them again, so a call reads no value if nothing was set. Reading runs no user code.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from simplegraph.base.objects import own_dict
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.guard.holders import Holders, SearchRoot
from simplegraph.guard.place_history import Changes, Entries, HolderKind, PlaceHistory, PlacesInCode
from simplegraph.guard.set_by_break import HolderBefore, SetByBreak, find_edits
from simplegraph.guard.value_check import ValueCheck, ValueHolder
from simplegraph.guard.values import ALL, ORDER, Place, PlainValues, has_object, is_among, place_name
from simplegraph.program.breaks.marks import ACTIVE
from simplegraph.program.program import SegmentRecorder
from simplegraph.program.snapshot import ABSENT

_MAX_KEYS = 256  # keys that are remembered, so that returning to earlier values costs nothing
_Part = tuple[str, frozenset[Any]]  # a holder's name, and its entries as a part of a key
_LISTS = (list, collections.deque)


class PlainState:
    """Reads the plain values that calls of a module find, as a part of their key.

    The key has the values of guarded places. A place that every run changes is unguarded; such calls have no graph. It
    is guarded again once a run leaves it unchanged or other code changes it. A place with ever new values is unguarded
    if no code names it; else its calls run eagerly.

    Each step reads the values, tells the history who changed them, and makes the key.

    Args:
        breaks: True if values that eager breaks read are guarded as well, since graphs hold them.
        proves: True if graphs are compared with eager.

    Attributes:
        present: has the check that determines the values of a call while it holds and has a key.
        must_read: True if every call must read all values, since some of them are unguarded at present.
        calls: the number of calls since the first one was read, for windows of calls.
    """

    def __init__(self, *, breaks: bool, proves: bool = True) -> None:
        self._lock = threading.RLock()
        self._places = PlacesInCode()
        self._reader = HolderReader(self._places, breaks=breaks)
        self._history = PlaceHistory(self._places, proves=proves)
        self.present = self._reader.present
        self.must_read = False
        self.calls = 0
        self._values_read = self._reader.key  # what `read_values` returned last
        self._is_capture_or_proof = False  # captures and proofs are made
        self._entries_before: dict[str, Entries] = {}  # the entries before captures and proofs
        self._changed: set[Place] = set()  # places that the real run before the latest captures changed
        self._is_unread = False  # runs were not observed since the values were read last
        self._lengths: list[tuple[ValueHolder, int]] = []  # of the containers that runs fill, after the latest run

    @property
    def scripts(self) -> list[str]:
        """The names of the TorchScript modules and functions that calls lead to."""
        return self._reader.scripts

    def __call__(self, module: Any) -> PlainValues | None:
        """Return the values that a call finds, the same object as long as they are equal.

        Raises:
            CannotBind: a place takes new values all the time.
        """
        # While another thread captures, its runs change values: the call waits for it, and asks again.
        return None if self._is_capture_or_proof else self._values(module)

    def read_values(self, module: Any) -> PlainValues:
        """Return the values that a call finds, if no plan served it.

        Raises:
            CannotBind: a place takes new values all the time, or values change while they are read.
        """
        with self._lock:
            if self._history.own_changes:
                self._history.find_own_changes(self.calls)
            self._values_read = self._values(module)
            return self._values_read

    def reads(self, attribute: str) -> bool:
        """True if code below a call has the name of this attribute, other than to call it as a method."""
        return self._places.code is not None and attribute in self._places.code.values

    def names(self, any_of: Collection[str]) -> bool:
        """True if code below a call has one of these names."""
        return self._places.code is not None and not self._places.code.names.isdisjoint(any_of)

    def renew(self, versions: Mapping[int, int]) -> None:
        """Accept new versions of dicts by their old ones: a replay left no plain values there."""
        with self._lock:
            check = self.present.check
            if check is not None:
                self.present.keep(check.renewed(versions))

    def forget(self) -> None:
        """Find the holders of values again at the next call, and forget changes so far."""
        with self._lock:
            self.present.check = None
            self._history.new_values.forget()
            self._history.breaks.forget()
            self._lengths = []

    @contextlib.contextmanager
    def run(self, module: Any, *, is_read: bool = False) -> Iterator[None]:
        """Surround a run of the module, which makes all changes meanwhile; `is_read` if its call was just read."""
        if self.present.check is None and not self._is_capture_or_proof:  # no call of it was read
            yield
            return
        with self._lock:
            if self._is_unread and not self._is_capture_or_proof:
                self._catch_up(module)
            changes = {} if is_read else self._reader.read_changes(module)
            if not self._is_capture_or_proof:
                self._history.changed_by_others(changes, self.calls)
                self._reader.close(module, self._history.new_values.containers())
                self._make_key()
            before, is_complete = self._reader.entries, False
        try:
            yield
            is_complete = True
        finally:
            with self._lock:
                self._reader.read_changes(module)
                # Eager breaks do not run in captures.
                is_whole = is_complete and not isinstance(ACTIVE.recorder, SegmentRecorder)
                changes = changes_between(before, self._reader.entries)
                self._reader.guarded_again |= self._history.changed_by_run(changes, self.calls, is_whole=is_whole)
                self._make_key(only_places=self._is_capture_or_proof)
                names = {name for name, key in self._history.filled & self._history.effects if key is ALL}
                holders = self.present.holders if names else ()
                self._lengths = [(holder, holder.length()) for holder in holders if holder.name in names]

    @contextlib.contextmanager
    def unread_run(self) -> Iterator[None]:
        """Surround a run at which no value is read: what has changed by the next reading, runs may have changed."""
        self.calls += 1
        self._is_unread = True
        try:
            yield
        finally:
            self._lengths = [(holder, holder.length()) for holder, _ in self._lengths]

    def filled_by_others(self) -> set[str]:
        """Name the containers that runs fill, and whose lengths have changed since the latest run."""
        return {holder.name for holder, length in self._lengths if holder.length() != length}

    def attribute_to_breaks(self, module: Any, unread: Collection[Place] = ()) -> None:
        """Attribute changes since the key was read to eager breaks of a replay, and so to the module.

        `unread` are places that the graph was shown not to read.
        """
        with self._lock:
            self._note_set_by_break(self._reader.read_changes(module), unread)

    def undo_break_changes(self, module: Callable[[], Any], unread: Collection[Place]) -> SetByBreak | None:
        """Attribute changes since the key was read to an eager break of a replay, which has just run.

        What later segments may read is set back, so that the call can be finished by a run from its start. Then call
        `suspend`.

        Args:
            module: returns the module.
            unread: places that the graph was shown not to read.

        Returns:
            What was set back; None if the replay may go on.
        """
        thing = module()
        check = self.present.check
        if check is not None and check.holds(own_dict(thing) or {}):
            return None
        with self._lock:
            before, entries = HolderBefore.all_of(self.present.holders), self._reader.entries
            changes = self._reader.read_changes(thing)
            changed = self._places.by_place(changes)
            read = self._history.breaks.read_of(changed, unread)
            others = {place: it for place, it in changes.items() if not is_among(place, {*read})}
            self._note_set_by_break(others, unread)
            if not read:
                return None
            classes = self._places.code.classes.values() if self._places.code is not None else ()
            of_read = {place: changed[place] for place in read}
            found = find_edits(of_read, before, (entries, self._reader.entries), self.present.holders, classes)

            def are_equal() -> bool:
                self._reader.read_changes(thing)
                return not any(is_among(place, {*read}) for place in changes_between(entries, self._reader.entries))

            found.undo(are_equal)
            self._reader.read_changes(thing)
            return found

    def suspend(self, module: Any, found: SetByBreak) -> None:
        """Let calls run eagerly for a while, since an eager break set what code in graphs may read."""
        with self._lock:
            self._history.find_own_changes(self.calls)
            self._history.breaks.suspend(found.changed, self.calls)  # after its new values were noted
            self.attribute_to_breaks(module)

    def _note_set_by_break(self, changes: Changes, unread: Collection[Place] = ()) -> None:
        self._history.changed_by_breaks(changes, self.calls, unread)
        self._make_key(only_places=self._is_capture_or_proof)

    def note_equal(self, before: dict[Place, Any], unread: set[Place]) -> bool:
        """Note that a replay equalled the latest run, eager breaks included; see `BreakChanges.note_equal`."""
        return self._history.breaks.note_equal(before, unread, self._history.guarded)

    def set_by_latest_run(self, unread: Collection[Place]) -> list[str]:
        """Name what the latest run set and code in a graph may read; see `BreakChanges.set_by_latest_run`."""
        return self._history.breaks.set_by_latest_run(unread)

    @contextlib.contextmanager
    def capture_or_proof(self, module: Any, *, breaks: bool) -> Iterator[None]:
        """Surround captures and proofs, which undo the changes of their runs: those are no changes by other code.

        Args:
            module: the module.
            breaks: True to attribute changes meanwhile to the module, as with eager breaks, which replays run, too.

        Raises:
            CannotBind: another thread has changed the values of the call since `read_values` returned them.
        """
        with self._lock:
            if self._values(module) is not self._values_read:
                raise CannotBind(Reason.WARMUP, "other code changed what the call reads")
            before = self._entries_before = self._reader.entries
            self._is_capture_or_proof = True
        try:
            yield
        finally:
            with self._lock:
                self._is_capture_or_proof = False
                since = self._reader.read_changes(module)
                if breaks:
                    self._history.changed_by_breaks(since, self.calls)
                    self._make_key(only_places=True)
                self._history.changed_by_others(self._guarded_changes(before), self.calls)
                self._make_key()

    def refuse_changed_values(self, module: Any) -> None:
        """Refuse captures for a key whose values a run of the same call changed: no later call would find them.

        Raises:
            CannotBind: a run changed them for the first time; captures find values that change each time.
        """
        with self._lock:
            self._reader.read_changes(module)
            guarded_again = self._reader.guarded_again
            changes = self._guarded_changes(self._entries_before)
            changed = {place for place in changes if not is_among(place, guarded_again)}
            before, self._changed = self._changed, changed
            for place in changed - before:
                raise CannotBind(Reason.PYTHON_STATE, place_name(place))

    def set_by_others(self, module: Any) -> list[tuple[dict[Any, Any], Any, Any]]:
        """List the attributes that other code has set since `capture_or_proof` began: their dict, name and value.

        Those whose names code below the call sets are not listed, since a run may set them.
        """
        with self._lock:
            self._reader.read_changes(module)
            check = self.present.check
            holders = {holder.name: holder for holder in (() if check is None else check.holders)}
            code, found = self._places.code, []
            for name, key in self._guarded_changes(self._entries_before):
                if name not in holders or holders[name].is_container:
                    continue
                if type(key) is str and key.isidentifier() and not (code is not None and code.sets(key)):
                    attributes = holders[name].find()
                    if type(attributes) is dict and key in attributes:
                        found.append((attributes, key, attributes[key]))
            return found

    @contextlib.contextmanager
    def keeping_others(self, module: Any) -> Iterator[list[tuple[dict[Any, Any], Any, Any]]]:
        """Surround what restores Python state in `capture_or_proof`: what other code has set stays, and is listed."""
        others = self.set_by_others(module)
        yield others
        for attributes, name, value in others:
            attributes[name] = value

    def _values(self, module: Any) -> PlainValues:
        with self._lock:
            if self._is_unread:
                self._catch_up(module)
            for _ in range(2):  # an object may end while the values are read
                self._history.changed_by_others(self._reader.read_changes(module), self.calls)
                self._history.new_values.guard_again(self.calls)
                self._reader.close(module, self._history.new_values.containers())
                self._make_key()
                if self.present.check is not None:
                    break
            if self.present.check is None:
                raise CannotBind(Reason.PYTHON_STATE, "what the call reads changes while it is read")
            if self._reader.refused:
                raise CannotBind(Reason.PYTHON_STATE, self._reader.refused)
            if self._history.new_values.volatile:
                raise CannotBind(Reason.PYTHON_STATE, self._history.why_volatile())
            return self._reader.key

    def _make_key(self, *, only_places: bool = False) -> None:
        """Make the key of the present values, unless they have one; `only_places` just says what is unguarded."""
        self._reader.use_unguarded({*self._history.effects, *self._history.new_values.unguarded})
        if not only_places:
            self.must_read = bool(self._history.new_values.unguarded or self._history.new_values.volatile)
            self._reader.make_key()

    def _guarded_changes(self, before: Mapping[str, Entries]) -> Changes:
        """Return the changes since these entries at guarded places."""
        changes = changes_between(before, self._reader.entries)
        return {place: change for place, change in changes.items() if not is_among(place, self._reader.unguarded)}

    def _catch_up(self, module: Any) -> None:
        """Sort what changed since the values were read last, around runs at which none were read.

        Runs changed the places that every run changes; other code may have changed the others.
        """
        self._is_unread = False
        own: Changes = {}
        others: Changes = {}
        by_others = self.filled_by_others()
        for place, values in self._reader.read_changes(module).items():
            is_own = is_among(place, self._history.effects) and place[0] not in by_others
            (own if is_own else others)[place] = values
        self._history.changed_by_run(own, self.calls, is_whole=False)
        self._history.changed_by_others(others, self.calls)


@dataclasses.dataclass(eq=False)
class PresentCheck:
    """The check of the present values, until an object ends whose attributes are kept alive.

    Weak references call `end` then, in any thread, at any time: it takes no lock, and this leads to no reader, which
    they would keep alive.

    Attributes:
        check: the check; None if the values must be read. It has their key once that is made.
        has_ended: True if an object ended since the holders of values were last looked for.
    """

    check: ValueCheck | None = None
    has_ended: bool = False

    def keep(self, check: ValueCheck) -> None:
        """Keep a check for later calls, unless an object of it has ended."""
        self.check = check
        if self.has_ended:
            self.check = None

    def end(self, _: object) -> None:
        """Let go of the check, and of one that is being made."""
        self.has_ended = True
        self.check = None

    @property
    def holders(self) -> Sequence[ValueHolder]:
        """The holders of the check."""
        check = self.check
        return check.holders if check is not None else ()


class HolderReader:
    """Finds the holders of the plain values that calls read, reads those that moved, and makes the key of the values.

    Earlier keys are remembered, so that calls that find equal values have the same key.

    Args:
        places: told the code and the kinds of holders when these are found.
        breaks: True if values that eager breaks read are guarded as well, since graphs hold them.

    Attributes:
        entries: the values that were read last, by the holder's name; replaced by another dict once one changes.
        refused: why there is no key; else empty.
        scripts: names of the TorchScript modules and functions that calls lead to.
        present: has the check of the present values.
        key: the key that was made last.
        unguarded: the places whose values are no part of keys.
        guarded_again: places that are guarded again since the last key was made, as a run left them unchanged.
    """

    def __init__(self, places: PlacesInCode, *, breaks: bool) -> None:
        self._places, self._breaks = places, breaks
        self.entries: dict[str, Entries] = {}
        self.refused = ""
        self.scripts: list[str] = []
        self.present = PresentCheck()
        self.key = PlainValues({})
        self.unguarded: set[Place] = set()
        self.guarded_again: set[Place] = set()
        self._keys: dict[frozenset[_Part], PlainValues] = {}  # by the values of all holders; the latest comes last
        self._closed: frozenset[str] = frozenset()  # names of containers whose contents are not read
        self._opened: set[int] = set()  # ids of objects that were opened
        self._roots: list[int] = []  # ids of the modules that a function reaches
        self._deaths: list[weakref.ref[Any]] = []  # they call back when an object ends whose attributes are kept alive

    def read_changes(self, module: Any) -> Changes:
        """Read the holders that moved since the last time; return the changes."""
        before, attributes = self.entries, own_dict(module) or {}
        try:
            if not self._read_moved(module, attributes):
                self._find(module)
        except Exception:  # another thread changes them: the call runs eagerly
            self.present.check = None
            self.entries = {}
        return changes_between(before, self.entries) if before else {}

    def close(self, module: Any, containers: frozenset[str]) -> None:
        """Stop reading below containers that take new values all the time: each new item would be searched."""
        if containers != self._closed:
            self._closed = containers
            self.present.check = None
            self.entries = {}
            self.read_changes(module)

    def _read_moved(self, module: Any, attributes: dict[str, Any]) -> bool:
        """Read the holders that moved; False if there is a new object to open, or an object is no longer reached."""
        if getattr(type(module), "is_function", False) and list(map(id, module._modules.values())) != self._roots:
            return False
        check = self.present.check
        if check is None or check.holds(attributes):
            return check is not None
        moved = check.moved(attributes) if check.has_children(attributes) else []
        if not moved or not all(map(self._read_same_objects, moved)):
            return False
        entries = self.entries | {holder.name: holder.entries for holder in moved}
        before = ((holder.entries, self.entries[holder.name]) for holder in moved)
        is_same = all(list(new.items()) == list(old.items()) for new, old in before)
        # The version may move though nothing guarded did, such as when a file's other globals are set, or a run counts
        # its calls.
        is_key = is_same or self._has_values(check.key, moved)
        self.present.keep(check.after(moved, check.key if is_key else None))
        if not is_same:
            self.entries = entries
        return True

    def _read_same_objects(self, holder: ValueHolder) -> bool:
        """Read a holder; False if it is gone, if another thread changes it, or if it leads to other objects now."""
        inside = holder.inside
        try:
            empty = holder.read(self._opened)
        except Exception:
            return False
        before = self.entries[holder.name]
        changed = (entry for key, entry in holder.entries.items() if before.get(key) != entry)
        is_closed = holder.name in self._closed  # then it does not matter what is below
        is_same = is_closed or not (empty or holder.inside != inside or any(map(has_object, changed)))
        return is_same and holder.state is not None

    def _find(self, module: Any) -> None:
        """Find all holders of values, and read them."""
        roots, function = [SearchRoot("", module)], None
        if getattr(type(module), "is_function", False):
            roots = [SearchRoot(name, child) for name, child in module._modules.items() if child is not None]
            function = module.function
            self._roots = list(map(id, module._modules.values()))
        self._deaths = []  # earlier ones end no new check
        self.present.check, self.present.has_ended = None, False
        holders = Holders(roots, module, self.present.end, function, breaks=self._breaks, closed=self._closed)
        self._deaths, self._opened = holders.deaths, holders.opened
        self.refused, self.scripts = holders.refused, holders.scripts
        self.entries = {holder.name: holder.entries for holder in holders.all}
        self._places.code = holders.code
        self._places.kinds = {holder.name: _kind_of(holder) for holder in holders.all}
        self.present.keep(ValueCheck(holders.root, holders.all, None))

    def make_key(self) -> None:
        """Make the key of the present values, or take the key that they had before."""
        check = self.present.check
        if check is None or check.key is not None or self.refused:
            return
        parts = _parts((holder.name, holder.part(self.unguarded)) for holder in check.holders)
        values = self._keys.pop(parts, None)
        if values is None and self.guarded_again:  # while all runs changed these no graph was captured
            values = self._keys.pop(_parts(_without(self.guarded_again, part) for part in parts), None)
        self.guarded_again.clear()
        self.key = self._keys[parts] = values or PlainValues({})
        self.key.parts = dict(parts)
        while len(self._keys) > _MAX_KEYS:
            del self._keys[next(iter(self._keys))]
        self.present.keep(check.after((), self.key))

    def _has_values(self, key: PlainValues | None, holders: Sequence[Any]) -> bool:
        """True if a key has the present values of these holders, except at unguarded places."""
        return key is not None and all(
            key.parts.get(holder.name, frozenset()) == holder.part(self.unguarded) for holder in holders
        )

    def use_unguarded(self, places: set[Place]) -> None:
        """Leave the values of these places out of keys from now on, and no others."""
        if places == self.unguarded:
            return
        added, guarded = places - self.unguarded, self.unguarded - places
        self.unguarded = places
        if guarded - self.guarded_again:  # one that is empty by now is no part of a key, as when it was unguarded
            self._keys.clear()
        if added:  # values that differed only in these places are equal now
            keys, self._keys = self._keys, {}
            for parts, key in keys.items():
                self._keys.setdefault(_parts(_without(added, part) for part in parts), key)
        check = self.present.check  # another thread may clear it
        if check is not None:
            self.present.keep(check.after((), None))


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
        if old.keys() == new.keys() and list(old) != list(new):
            changes[name, ORDER] = tuple(old), tuple(new)
    return changes


def _kind_of(holder: ValueHolder) -> HolderKind:
    """Describe a holder without keeping it alive."""
    is_list = holder.is_container and issubclass(type(holder.find()), _LISTS)
    return HolderKind(holder.is_container, is_list, holder.owner is not None, holder.keys)


def _parts(parts: Iterable[_Part]) -> frozenset[_Part]:
    """Return the parts of a key that are not empty, in any order."""
    return frozenset(part for part in parts if part[1])


def _without(places: set[Place], part: _Part) -> _Part:
    """Return a holder's part of a key without some places."""
    name, entries = part
    if (name, ALL) in places:
        return name, frozenset()
    unguarded = {key for holder, key in places if holder == name}
    if not unguarded:
        return part
    guarded = dict(entry for entry in entries if entry[0] not in unguarded)
    order = tuple(key for key in guarded.pop(ORDER, ()) if key not in unguarded)
    return name, frozenset((*guarded.items(), *[(ORDER, order)] * (len(order) > 1)))
