"""Save the contents of Python objects without running their code, find and name changes, and undo them.

A capture executes nothing on the device, but its Python code runs. The run belongs to no call of the user's, so its
changes of modules, and tensors that it left anywhere, are undone. If it left a tensor of the capture, no replay can
serve the call. Other values in containers and objects stay, since another thread may have put them there, with two
exceptions: values that the forward changes at every run, and done flags, which tell later calls that work is done.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import gc
import operator
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.collection import without_collections
from simplegraph.base.nested import ATOMS, constant_key
from simplegraph.base.objects import by_class, own_dict
from simplegraph.base.tensors import has_address, lies_at, parts
from simplegraph.base.walk import (
    DEPTH,
    DICTS,
    LRU,
    MAX_BEYOND_CODE,
    REGISTERED,
    Policy,
    Walk,
    held_by,
    is_globals,
    items_of,
    kind_of,
    names_in,
    referring_kind,
    slots_of,
    tensors_in,
)

ABSENT = object()
_KEPT = (nn.Module, BaseException)  # objects that may lead to tensors
_FIXED = (*ATOMS, decimal.Decimal, fractions.Fraction, datetime.date, datetime.time, datetime.timedelta)
_FIXED += uuid.UUID, pathlib.PurePath
_FLAGS = (bool, type(None))


def put(place: Any, key: Any, value: Any) -> None:
    """Set `place[key]`, or delete it if the value is `ABSENT`.

    Args:
        place: a list, a set, or any object whose contents `held_by` returns as a dict.
        key: a key of these contents; an index of a list, an item of a set.
        value: the new value.
    """
    kind, gone = type(place), value is ABSENT
    base: Any = next((base for base in (*DICTS, list, set, type) if issubclass(kind, base)), object)
    if base is set:
        (base.discard if gone else base.add)(place, key)
        return
    if base is object and kind is not types.CellType and key not in slots_of(kind):
        place, base = own_dict(place), dict
    if base in (type, object):
        base.__delattr__(place, key) if gone else base.__setattr__(place, key, value)
    else:
        base.__delitem__(place, key) if gone else base.__setitem__(place, key, value)


def value_at(place: Any, key: Any) -> Any:
    """Return `place[key]`, with a key as for `put`; `ABSENT` if there is no such key."""
    contents = held_by(place)
    if isinstance(contents, dict):
        return contents.get(key, ABSENT)
    return (
        (key in contents or ABSENT) if kind_of(type(place)) is set else contents[key] if key < len(contents) else ABSENT
    )


def restore(place: Any, before: Any, keys: Collection[Any] | None = None) -> None:
    """Restore these keys of a place, or all keys in their order, from contents that `held_by` returned before."""
    if isinstance(before, tuple):
        base = kind_of(type(place))
        others = [] if keys is None else [value for at, value in enumerate(base.__iter__(place)) if at not in keys]
        # If all earlier items are still there, only the added ones are removed: another thread's items stay.
        complete = keys is not None and {*map(id, before)} <= {*map(id, others)}
        base.clear(place)
        (base.update if base is set else base.extend)(place, others if complete else before)
        return
    now = held_by(place)
    if keys is None:
        keys = [*(now.keys() - before.keys()), *before]
        kept = [key for key in now if key in before]
        # Other threads may read an object's attributes meanwhile, so that one comes back behind the others.
        earlier = [key for key in before if key in now or kind_of(type(place)) in DICTS]
        if kept != earlier[: len(kept)]:
            for key in now:
                put(place, key, ABSENT)
            now = {}
    for key in keys:
        if not is_same(now.get(key, ABSENT), before.get(key, ABSENT)):
            put(place, key, before.get(key, ABSENT))


def is_untouched(place: Any, before: Any) -> bool:
    """True if a place holds the very same objects in the same order."""
    now = place if type(place) in (dict, collections.OrderedDict) else held_by(place)
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        return False
    return isinstance(now, tuple) or all(map(operator.is_, now.values(), before.values()))


def is_same(now: Any, before: Any) -> bool:
    """True for the same object, and for equal immutable values."""
    if now is before:
        return True
    if isinstance(now, tuple) and type(now) is type(before) and len(now) == len(before):
        return all(map(is_same, now, before))
    fixed = type(now) is type(before) and is_fixed(now) and is_fixed(before)
    return fixed and constant_key(now) == constant_key(before)


@by_class
def _is_fixed_kind(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic):
        return not issubclass(kind, (numpy.void, numpy.object_))  # `void` is mutable, `object_` may hold any object
    return issubclass(kind, _FIXED)


def is_fixed(value: Any) -> bool:
    """True for immutable values."""
    for base in (tuple, frozenset):
        if issubclass(type(value), base):
            return all(map(is_fixed, base.__iter__(value)))
    return _is_fixed_kind(type(value))


def is_equal(now: Any, before: Any) -> bool:
    """True if `is_same`, and for lists of the same values: a forward may make an equal list at each run."""
    if type(now) is list and type(before) is list and len(now) == len(before):
        return all(map(is_equal, now, before))
    return is_same(now, before)


def in_memory(is_wanted: Callable[[Tensor], bool], thing: Any) -> bool:
    """True if a thing is a tensor, or wraps a tensor, whose memory is wanted."""
    return issubclass(type(thing), Tensor) and any(has_address(part) and is_wanted(part) for part in parts(thing))


class DoneFlag(NamedTuple):
    """A plain value that replaced another plain value in a place; `ABSENT` stands for no value.

    Attributes:
        name: the name of the place.
        place, key: the place, and the key in it.
        now, before: the new value and the earlier one.
    """

    name: str
    place: Any
    key: Any
    now: Any
    before: Any

    @property
    def tells(self) -> bool:
        """True if the value may say that work is done; texts and other numbers are results."""
        kinds = {type(self.now), type(self.before)}
        changes = ABSENT in (self.now, self.before) or type(self.place) is list or not kinds.isdisjoint(_FLAGS)
        return changes and all(value is ABSENT or type(value) in (int, *_FLAGS) for value in (self.now, self.before))

    def exchange(self, expected: Any, value: Any) -> None:
        """Set the value if the place still holds the `expected` one."""
        if is_same(value_at(self.place, self.key), expected):
            put(self.place, self.key, value)


class Snapshot:
    """Saves the contents of objects, and of containers and users' objects below them, and the place of each tensor.

    Values of tensors are not copied: a capture does not write them.

    Args:
        *roots: modules, functions and other objects.
        tensors: False leaves out the addresses of tensors, and dispatches no operator.
        code: True follows code, too.
        breaks: False leaves out the code of eager breaks.

    Attributes:
        walk: the walk that found the objects.
    """

    @without_collections()
    def __init__(self, *roots: Any, tensors: bool = True, code: bool = False, breaks: bool = True) -> None:
        self.walk = walk = Walk(roots, Policy(code=DEPTH if code else 0, breaks=breaks))
        # By id: the place, its contents, and True if no code is on the way to it.
        self._places: dict[int, tuple[Any, Any, bool]] = {id(opened[0]): opened for opened in walk}
        near = (thing for thing, _, is_near in self._places.values() if is_near)
        self._modules = [(thing, type(thing)) for thing in near if issubclass(type(thing), nn.Module)]
        walked = walk.tensors if tensors else ()
        storages = [(tensor, part) for tensor in walked for part in parts(tensor) if has_address(part)]
        self._tensors = [(part, part.detach(), lies_at(part), tensor) for tensor, part in storages]

    def changes(self, *, code: bool = False) -> dict[str, Any]:
        """Return changed values by name, and tensors that were moved, in places that are reached without code.

        A dict or an object is compared key by key; a list, a set or a deque is one place. Equal numbers, texts, and
        tuples and lists of them count as unchanged. A list whose items changed counts as a changed place.

        Args:
            code: True adds places that code leads to: numbers, texts and lists of them, and new items of containers.
                Of a file's globals, only those that the code names count.
        """
        changed: dict[str, Any] = {}
        named = {
            name
            for thing, *_ in self.walk.ways.values()
            if code and type(thing) is types.FunctionType
            for name in names_in(thing.__code__)
        }
        for holder, before in self._touched(code=code):
            now, is_near = held_by(holder), self._places[id(holder)][2]
            if isinstance(now, dict):
                keys = [
                    key
                    for key in now | before
                    if (is_near or (_counts_beyond(now, before, key) and (key in named or not is_globals(now))))
                    and not is_equal(now.get(key, ABSENT), before.get(key, ABSENT))
                ]
                changed |= {self.walk.path_of(key, holder): now.get(key) for key in keys}
                if code and _has_other_keys(holder, now, before) and (keys or now.keys() == before.keys()):
                    changed[self.walk.path(holder)] = now
            elif not is_same(now, before) and (is_near or _gained(now, before)):
                changed[self.walk.path(holder)] = now
        return changed | {self.walk.path(tensor): part for part, _, _, tensor in self._moved()}

    def put_back(self, names: Collection[str] = ()) -> None:
        """Restore the contents of modules, the tensors in all places, and the memory of tensors.

        Args:
            names: names of places, as `changes` returns them, that are restored whatever they held. Other places that
                code leads to stay as they are.
        """
        for module, kind in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
        for holder, before in self._touched(code=bool(names)):
            (above, key), is_near = self.walk.way_to(holder), self._places[id(holder)][2]
            of_module = issubclass(type(holder), nn.Module) or (
                issubclass(type(above), nn.Module) and key in REGISTERED
            )
            if (is_near and (of_module or next(tensors_in(_exchanged(holder, before)), None) is not None)) or (
                names and self.walk.path(holder) in names and _is_container(holder)
            ):
                restore(holder, before)
            else:
                for key, _, old in _changed_entries(holder, before) if names else ():
                    if self.walk.path_of(key, holder) in names:
                        put(holder, key, old)
        for tensor, memory, *_ in self._moved():
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = memory

    def take_done_flags(self) -> list[DoneFlag]:
        """Restore the plain values of containers and objects, and return them, if one of them may be a done flag.

        A done flag is a flag or a whole number that was added or removed: it may say that memory is filled, but a
        capture, or a run that is undone, fills none. Deques, and lists that grew or shrank, stay as they are: another
        thread may wait for their items.
        """
        flags = [
            DoneFlag(self.walk.path_of(key, place), place, key, now, old)
            for place, before in self._touched(code=True)
            for key, now, old in _changed_entries(place, before)
            if all(value is ABSENT or is_fixed(value) for value in (now, old))
        ]
        if not any(flag.tells for flag in flags):
            return []
        for flag in flags:
            flag.exchange(flag.now, flag.before)
        return flags

    def _touched(self, *, code: bool = False) -> list[tuple[Any, Any]]:
        """List the places that hold other objects now, with their earlier contents; `code` adds those beyond code."""
        for holder, is_near in self.walk.filled():
            self._places[id(holder)] = holder, {}, is_near
        return [
            (holder, before)
            for holder, before, is_near in self._places.values()
            if (is_near or code) and not is_untouched(holder, before)
        ]

    def _moved(self) -> list[tuple[Tensor, Tensor, tuple[Any, ...], Tensor]]:
        return [entry for entry in self._tensors if lies_at(entry[0]) != entry[2]]

    def release(self, unwanted: Callable[[Any], bool], *, caches: bool = True) -> list[str]:
        """Restore every place that now holds, or leads to, something unwanted.

        Args:
            unwanted: returns True for objects that no place may hold.
            caches: True to clear caches of functools that hold such objects.

        Returns:
            The names of these places.
        """
        names = []
        for holder, contents in self._touched(code=True):
            before = dict(items_of(contents))
            keys = [
                key
                for key, value in items_of(held_by(holder))
                if value is not before.get(key, ABSENT) and self._leads_to(value, unwanted)
            ]
            if keys:
                names.append(self.walk.path_of(keys[0], holder))
                restore(holder, contents, keys)
        for cache in [thing for thing, *_ in self._places.values() if caches and type(thing) is LRU]:
            if any(self._leads_to(item, unwanted) for item in gc.get_referents(cache)):
                names.append(f"the cache of {cache.__qualname__}")
                cache.cache_clear()
        return list(dict.fromkeys(names))

    def _leads_to(self, value: Any, unwanted: Callable[[Any], bool]) -> bool:
        """True if a value is unwanted, or holds something unwanted; known places inside it are checked separately."""
        walk = Walk([value], Policy(referring_kind, objects=MAX_BEYOND_CODE), self._places)
        return unwanted(value) or any(unwanted(item) for _, contents, _ in walk for item in contents)


def _counts_beyond(now: dict[Any, Any], before: dict[Any, Any], key: Any) -> bool:
    """True if a changed key of a dict beyond code counts: it has an immutable value, or is new and holds no tensor."""
    value = now.get(key)
    return is_fixed(value) if key in before else not _keeps_tensors(value)


def _gained(now: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """True if a list or set beyond code holds other plain values, or gained items that hold no tensor."""
    ids_before = set(map(id, before))
    gained = [item for item in now if id(item) not in ids_before]
    if len(now) > len(before):
        return not any(map(_keeps_tensors, gained))
    return all(map(is_fixed, gained or now))


def _keeps_tensors(value: Any) -> bool:
    """True for tensors and objects that hold some: a place with them is a cache, or is refused as an escape."""
    return issubclass(type(value), _KEPT) or next(tensors_in(value), None) is not None


def _has_other_keys(holder: Any, now: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """True for a dict with other keys, such as a log, or with its keys in another order, such as an LRU cache."""
    of_users = kind_of(type(holder)) in DICTS and not is_globals(holder)
    return of_users and not (len(now) == len(before) and all(map(operator.is_, now, before)))


def _is_container(holder: Any) -> bool:
    """True for places that are restored as a whole: lists, sets and dicts."""
    return kind_of(type(holder)) in DICTS or isinstance(held_by(holder), tuple)


def _changed_entries(place: Any, before: Any) -> list[tuple[Any, Any, Any]]:
    """List (key, new value, old value) of the changed keys of a place; of a set, its added and removed items.

    The list is empty for deques, and for lists that grew or shrank: they may hand items to another thread.
    """
    now, base = held_by(place), kind_of(type(place))
    if base is set:
        return [(it, *((ABSENT, True) if lost else (True, ABSENT))) for it, lost in _exchanged(place, before)]
    if base is list and len(now) == len(before):
        now, before = dict(enumerate(now)), dict(enumerate(before))
    return [
        (key, now.get(key, ABSENT), before.get(key, ABSENT))
        for key in (now | before if isinstance(now, dict) else ())
        if not is_same(now.get(key, ABSENT), before.get(key, ABSENT))
    ]


def _exchanged(container: Any, before: Any) -> list[tuple[Any, bool]]:
    """List (item, True if it was removed) of the items that a container gained or lost."""
    now, old = ({id(item): item for _, item in items_of(contents)} for contents in (held_by(container), before))
    both = now | old
    return [(both[key], key in old) for key in now.keys() ^ old.keys()]
