"""Finds and compares the holders of plain values: objects, containers, classes, files and closures of a module."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.objects import by_class, own_dict
from simplegraph.base.patches import plain, replaced
from simplegraph.base.walk import (
    DEPTH,
    DICTS,
    OPAQUE,
    Policy,
    Walk,
    held_by,
    is_break,
    is_library,
    items_in_order,
    keys_in_order,
    kind_of,
    shown,
    slots_of,
)
from simplegraph.guard.code_below import CodeBelow
from simplegraph.guard.values import (
    MAX_WIDTH,
    NOT_PLAIN,
    ORDER,
    SameObject,
    can_be_referenced,
    class_key,
    is_small_array,
    value_key,
)
from simplegraph.guard.versions import dict_version

_OF_TORCH = frozenset(vars(nn.Module())) | {"_simplegraph", "_simplegraph_optimized"}  # compared in other ways
_ELSEWHERE = (Tensor, nn.Module, torch.Generator)  # as are these
_OURS = "_simplegraph"  # what the library keeps at a module begins so, and is no value of the user's
_LEADING = frozenset({types.FunctionType, types.MethodType, dict, list, tuple})  # to code
_ITERATED = frozenset({list, set, collections.deque})
_chain = itertools.chain.from_iterable
ALL = object()  # in place of a key: all that a container holds
Place = tuple[str, Hashable]  # the name of what holds a value, and the key there


def _bound(method: types.MethodType) -> dict[str, Any]:
    """Return what a method is bound to, by name."""
    return {"__self__": method.__self__}


@by_class
def _opens(kind: type) -> Any:
    """Return the kind that walks open, as `kind_of` does; tensors lead to no plain values."""
    if kind is types.MethodType:
        return _bound
    base = kind_of(kind)
    return None if base is Tensor else base


@by_class
def _opens_captured(kind: type) -> Any:
    """Return the same, but for modules that run eagerly between segments."""
    return None if is_break(kind) else _opens(kind)


_POLICY = Policy(_opens, depth=DEPTH, width=MAX_WIDTH, objects=20_000)
_WITHOUT_BREAKS = dataclasses.replace(_POLICY, opens=_opens_captured)


class ValueHolder:
    """Holds values: an object's attributes, a container's items, a file's globals or a closure's variable.

    Args:
        name: dotted from the module, or as code has it.
        held: the dict, list, set or deque; None for one that is not kept, since it may hold a tensor.
        find: returns it then, by its way from an object.
        counts: returns True for the keys that count.
        is_container: of a long one nothing but its length and version counts.
        is_ordered: the order of keys counts.
        is_view: what `find` returns is another object each time.
        owner: returns the object whose attributes `held` is, which may be given others.
        has_tensors: tensors count by identity, too, which no survey of the module sees.
        cell: of a closure, whose content is the only value, in place of all these.

    Attributes:
        entries: by key, what tells a value from others.
        inside: ids of what is opened below it; mark: what moves when an entry does.
        arrays: small ones among the values.
        gone: called once an item of a list or the like ends, whose id another one may get.
    """

    def __init__(
        self,
        name: str,
        held: Any = None,
        find: Callable[[], Any] | None = None,
        counts: Callable[[Any], bool] | None = None,
        *,
        is_container: bool = False,
        is_ordered: bool = False,
        is_view: bool = False,
        owner: Callable[[], Any] | None = None,
        has_tensors: bool = False,
        cell: types.CellType | None = None,
    ) -> None:
        self.cell, self.has_tensors = cell, has_tensors
        self.gone: Callable[[Any], object] | None = None
        if cell is not None:
            find, is_view = functools.partial(held_by, cell), True
        self.name, self.held, self._find, self._counts, self.owner = name, held, find, counts, owner
        self.is_container, self._is_view, self.is_wide = is_container, is_view, False
        self._is_ordered = is_container or is_ordered
        self.entries: dict[Hashable, Hashable] = {}
        self._part: tuple[set[Place], frozenset[Any]] | None = None
        self.inside: list[int] = []
        self.arrays: list[Any] = []
        self.mark: Any = None
        self._kept: list[Any] = []  # plain values, so that their ids stay theirs, and references to others

    def find(self) -> Any:
        """Return what holds the values now. Raises whatever a way that is gone raises."""
        return self.held if self._find is None else self._find()

    def counts(self, key: Any) -> bool:
        """True for keys that count."""
        return self._counts is None or self._counts(key)

    def marked(self) -> Any:
        """Return the mark now; None if what holds the values is gone. Take it before the values are read."""
        try:
            held = self.find()
            if self.owner is not None and own_dict(self.owner()) is not held:
                return None
            is_dict = issubclass(type(held), dict)
            has_own_order = issubclass(type(held), collections.OrderedDict) and dict.__len__(held) > 1
            items: Any
            if is_dict and dict.__len__(held) and not self._is_view and dict_version is not None:
                items = dict_version(held)  # of an empty one it does not move where another dict's items are taken
                if has_own_order:  # nor where `move_to_end` is called
                    items = items, list(map(id, keys_in_order(held)))
            elif self.is_wide:
                items = _length(held)
            else:
                values = list(dict.values(held) if is_dict else kind_of(type(held)).__iter__(held))
                keys = list(map(id, keys_in_order(held))) if is_dict else None
                items = list(map(id, values)), list(map(type, values)), keys
        except Exception:  # another thread may be at it
            return None
        return not self._is_view and id(held), items, [array.tobytes() for array in self.arrays]

    def read(self, opened: Collection[int]) -> list[tuple[Any, Any]]:
        """Read the entries anew; return the empty dicts among them, which no walk opens, with their keys."""
        held = self.find()
        self.is_wide = self.is_container and _length(held) > MAX_WIDTH
        mark = self.marked()
        by_ids = not issubclass(type(held), dict) or dict_version is None or self._is_view
        self.inside, self.arrays, self._kept = [], [], []
        entries: dict[Hashable, Hashable] = {}
        empty = []
        for key, value in (
            [("its length", _length(held)), ("its version", repr(mark))] if self.is_wide else _items(held)
        ):
            if not self.counts(key):
                continue
            entry = value_key(value)
            if entry is not NOT_PLAIN:
                self._kept.append(value)
            elif issubclass(type(value), _ELSEWHERE):
                is_told = self.has_tensors and issubclass(type(value), Tensor)
                if not (is_told or issubclass(type(held), dict)):
                    continue  # a log of tensors, say; guards compare those that graphs read
                # By a name that code may ask for it counts that one is there. Which one, guards compare.
                entry = _identity(value) if is_told else class_key(type(value))
            elif id(value) in opened:
                self.inside.append(id(value))
                entry = _identity(value) if type(value) is types.MethodType else class_key(type(value))
            elif is_small_array(value):
                array: Any = value
                self.arrays.append(array)
                entry = str(array.dtype), array.shape, array.tobytes()
            elif type(value) in DICTS and not value:
                self.inside.append(id(value))
                entry = class_key(type(value))
                empty.append((key, value))
            elif issubclass(type(value), tuple) and (told := _tuple_entry(value)) is not None:
                entry = told
            else:
                entry = _identity(value)
            at = key if type(key) is str else value_key(key)
            entries[_identity(key) if at is NOT_PLAIN else at] = entry
            if by_ids and type(entry) is SameObject and can_be_referenced(type(value)):
                self._kept.append(weakref.ref(value, self.gone))
        self.mark = mark and (*mark[:2], [array.tobytes() for array in self.arrays])
        self.entries = entries
        self._part = None
        return empty

    def is_as(self, before: dict[Hashable, Hashable]) -> bool:
        """True if the entries are these, in the same order if that counts."""
        return self.entries == before and (not self._is_ordered or list(self.entries) == list(before))

    def part(self, left_out: Collection[Place]) -> frozenset[Any]:
        """Return the entries as a part of a key, but for those at some places."""
        if self._part is None or self._part[0] != left_out:
            counted = {} if (self.name, ALL) in left_out else self.entries
            counted = {key: entry for key, entry in counted.items() if (self.name, key) not in left_out}
            ordered = [(ORDER, tuple(counted))] * (self._is_ordered and len(counted) > 1)
            self._part = set(left_out), frozenset((*counted.items(), *ordered))
        return self._part[1]


def _identity(value: Any) -> Hashable:
    """Return what tells an object from all others.

    A tensor is kept alive by the graphs that read it, and a weak reference would keep torch from swapping it.
    """
    return (Tensor, id(value)) if issubclass(type(value), Tensor) else SameObject(replaced(value))


def _length(container: Any) -> int:
    """Return how long a container is, past what its class says."""
    length: int = kind_of(type(container)).__len__(container)
    return length


def _items(held: Any) -> list[tuple[Any, Any]]:
    """List the keys and values of what a holder finds; of a set its items, each being there."""
    if issubclass(type(held), dict):
        return items_in_order(held)
    items = kind_of(type(held)).__iter__(held)
    return [(item, True) for item in items] if issubclass(type(held), set) else list(enumerate(items))


def _tuple_entry(value: Any) -> Hashable | None:
    """Return what tells a tuple of plain values, tensors and modules from others; None if it holds anything else."""
    items = [(item, value_key(item)) for item in tuple.__iter__(value)]
    if any(key is NOT_PLAIN and not issubclass(type(item), _ELSEWHERE) for item, key in items):
        return None
    return class_key(type(value)), tuple(None if key is NOT_PLAIN else key for _, key in items)


class Comparison:
    """Compares what holders hold with what they held, with as little Python as possible.

    Args:
        root: the holder of the module's own attributes, which are not kept; None for a function.
        holders: all.
        key: of the values for as long as nothing moves; None if that is not known yet.
    """

    def __init__(self, root: ValueHolder | None, holders: Sequence[ValueHolder], key: Any) -> None:
        self.root, self.holders, self.key = root, holders, key
        rest = [holder for holder in holders if holder is not root or dict_version is None or holder.arrays]
        by_version = [
            holder
            for holder in rest
            if issubclass(type(holder.held), dict) and type(holder.mark[1]) is int and not holder.arrays
        ]
        quick = [holder for holder in rest if not (holder.is_wide or holder.arrays)]
        by_items = [
            holder
            for holder in quick
            if type(holder.held) in _ITERATED or (type(holder.held) is dict and not holder.held)
        ]
        cells = [holder for holder in quick if holder.cell is not None]
        known = {*map(id, by_version), *map(id, by_items), *map(id, cells)}
        self._others = [holder for holder in rest if id(holder) not in known]
        self._marks = [holder.mark for holder in self._others]
        self._version = root.mark[1] if root is not None and root not in rest else None
        self._owners = [(holder.owner, holder.held) for holder in by_version if holder.owner is not None]
        self._by_version = by_version
        self._dicts = [holder.held for holder in by_version]
        self._versions = [holder.mark[1] for holder in by_version]
        self._lists = [holder.held for holder in by_items]
        self._lengths = [len(holder.mark[1][0]) for holder in by_items]
        self._ids = list(_chain(holder.mark[1][0] for holder in by_items))
        self._kinds = list(_chain(holder.mark[1][1] for holder in by_items))
        self._cells = [holder.cell for holder in cells]
        self._content_ids = list(_chain(holder.mark[1][0] for holder in cells))
        self._content_kinds = list(_chain(holder.mark[1][1] for holder in cells))

    def holds(self, attributes: dict[str, Any]) -> bool:
        """True if nothing moved; `attributes` are the module's own. Changes nothing, so that no lock is needed."""
        if self._version is not None and dict_version(attributes) != self._version:  # type: ignore[misc]
            return False
        if self._dicts and list(map(dict_version, self._dicts)) != self._versions:  # type: ignore[arg-type]
            return False
        for owner, held in self._owners:
            if own_dict(owner()) is not held:
                return False
        if self._lists:
            items = list(_chain(self._lists))
            if list(map(id, items)) != self._ids or list(map(type, items)) != self._kinds:
                return False
            if list(map(len, self._lists)) != self._lengths:
                return False
        if self._cells:
            contents = gc.get_referents(*self._cells)  # an empty one has none
            if list(map(id, contents)) != self._content_ids or list(map(type, contents)) != self._content_kinds:
                return False
        return not self._others or [holder.marked() for holder in self._others] == self._marks

    def moved(self, attributes: dict[str, Any]) -> list[ValueHolder]:
        """List the holders that moved, those with versions alone where these alone did."""
        if dict_version is None:
            return self._moved_otherwise()
        later = copy.copy(self)
        later._versions = list(map(dict_version, self._dicts))
        moved = [
            holder
            for holder, now, before in zip(self._by_version, later._versions, self._versions, strict=True)
            if now != before
        ]
        if self.root is not None and self._version is not None:
            later._version = dict_version(attributes)
            moved += [self.root] * (later._version != self._version)
        return moved if later.holds(attributes) else self._moved_otherwise()

    def _moved_otherwise(self) -> list[ValueHolder]:
        return [holder for holder in self.holders if holder.marked() != holder.mark]

    def after(self, moved: Sequence[ValueHolder], key: Any) -> Comparison:
        """Return the comparison with these holders as they were read again."""
        known = {*map(id, self._by_version), id(self.root)}
        if any(id(holder) not in known or holder.arrays or type(holder.mark[1]) is not int for holder in moved):
            return Comparison(self.root, self.holders, key)
        later = copy.copy(self)  # another thread may be comparing with this one
        later.key = key
        later._versions = [holder.mark[1] for holder in self._by_version]
        if self._version is not None and self.root is not None:
            later._version = self.root.mark[1]
        return later


class SearchRoot(NamedTuple):
    """Names a thing at which a search begins; `find` finds it again if it is not to be kept alive."""

    name: str
    thing: Any
    find: Callable[[], Any] | None = None


class Holders:
    """Finds all that holds plain values which calls of a module may read.

    Args:
        roots: the module, or those that a function reaches.
        gone: called once an object ends whose attributes are kept.
        breaks: what eager breaks read counts as well, since graphs hold it.

    Attributes:
        all: they.
        root: the holder of the first root's own attributes, which are not kept.
        opened: ids of what was opened.
        code: below a call.
    """

    def __init__(
        self, roots: Sequence[SearchRoot], module: Any, gone: Callable[[Any], object], *, breaks: bool
    ) -> None:
        self.all: list[ValueHolder] = []
        self.root: ValueHolder | None = None
        self.opened: set[int] = set()
        self.deaths: list[weakref.ref[Any]] = []
        self._module, self._gone = plain(module), gone
        self._classes: dict[type, None] = {}
        self._functions: dict[int, Any] = {}
        self._names: set[str] = set()
        self._policy = _POLICY if breaks else _WITHOUT_BREAKS
        self._uncounted: set[str] = set()
        self._open(roots, None)
        self.code = CodeBelow(self._classes, self._functions.values(), breaks=breaks)
        self._uncounted |= self.code.eager_names
        self.all = [holder for holder in self.all if holder.name.rpartition(".")[2] not in self._uncounted]
        self._open_code()
        for holder in list(self.all):
            self._read(holder)

    def _read(self, holder: ValueHolder) -> None:
        for key, value in holder.read(self.opened):
            self.opened.add(id(value))
            held = holder.find()
            base = kind_of(type(held)) if type(held) is not dict else dict
            find = functools.partial(_item, holder.find, base, key)
            self._read(self._add(ValueHolder(_dotted(holder.name, key), find=find, is_container=True)))

    def _add(self, holder: ValueHolder) -> ValueHolder:
        while holder.name in self._names:
            holder.name += "'"
        self._names.add(holder.name)
        holder.gone = self._gone
        self.all.append(holder)
        return holder

    def _open(self, roots: Sequence[SearchRoot], names: Collection[str] | None) -> None:
        """Add what holds values below roots; of objects only keys among these `names` count, if there are any."""
        walk = Walk([root.thing for root in roots], self._policy, self.opened)
        starts = {id(plain(root.thing)): root for root in reversed(roots)}
        found = [(thing, held) for thing, held, _ in walk]
        self.opened |= {id(thing) for thing, _ in found}
        kept = self._kept(found)
        ways: dict[int, tuple[str, Callable[[], Any]]] = {}  # by id: its name, and what finds it or its attributes
        unseen: set[int] = set()  # by surveys of the module: below slots and sets, or where code leads to
        behind: set[int] = set()  # below what leads back to the module, such as a trainer, and below our own
        for thing, held in found:
            _, above, key, _ = walk.ways[id(thing)]
            owner = walk.ways[above][0] if above else None
            of_torch = issubclass(type(owner), nn.Module) and type(key) is str and key in _OF_TORCH
            if above:
                name = ways[above][0] if of_torch else _dotted(ways[above][0], key)
                base = dict if kind_of(type(owner)) in (object, OPAQUE) else kind_of(type(owner))
                find: Callable[[], Any] = functools.partial(_item, ways[above][1], base, key)
            else:
                name, find = starts[id(thing)].name, starts[id(thing)].find or _nothing
            ways[id(thing)] = name, find
            if above in behind or (type(key) is str and key.startswith(_OURS)):
                behind.add(id(thing))
            elif type(thing) is types.MethodType:
                ways[id(thing)] = name, functools.partial(_bound_by, find)
                unseen.add(id(thing))
            elif kind_of(type(thing)) is object:
                holder = self._add_object(thing, held, name, names)
                holder.has_tensors |= above in unseen
                ways[id(thing)] = name, holder.find
                if holder.has_tensors:
                    unseen.add(id(thing))
                if not issubclass(type(thing), nn.Module) and any(it is self._module for it in held.values()):
                    behind.add(id(thing))
            elif not (of_torch or issubclass(type(thing), tuple)):
                container, finding = (thing, None) if id(thing) in kept else (None, find)
                counts = functools.partial(_counts, None, (self._uncounted,))
                if names is not None or above in unseen or issubclass(type(thing), set):
                    unseen.add(id(thing))
                is_unseen = id(thing) in unseen
                holder = ValueHolder(name, container, finding, counts=counts, is_container=True, has_tensors=is_unseen)
                self._add(holder)
                attributes = own_dict(thing)  # of a subclass, beside its items
                if type(thing) not in DICTS and attributes is not None and attributes is not thing:
                    self._add_object(thing, {}, name, names)

    def _kept(self, found: Sequence[tuple[Any, Any]]) -> set[int]:
        """Return ids of the containers that hold nothing but plain values and such containers."""
        kept: set[int] = set()
        for thing, held in reversed(found):  # inner ones come later
            values = held.values() if isinstance(held, dict) else held
            if (
                kind_of(type(thing)) is not object
                and len(values) <= MAX_WIDTH
                and all(id(value) in kept or value_key(value) is not NOT_PLAIN for value in values)
            ):
                kept.add(id(thing))
        return kept

    def _attributes_of(self, thing: Any, name: str, counts: Callable[[Any], bool], *, by_code: bool) -> ValueHolder:
        """Make the holder of an object's attributes, which does not keep the object alive."""
        attributes = own_dict(thing)
        has_slots = bool(slots_of(type(thing))) or attributes is None
        make = functools.partial(ValueHolder, name, counts=counts, has_tensors=by_code or has_slots)
        if not can_be_referenced(type(thing)):
            return make(find=functools.partial(held_by, thing), is_view=True)
        weakly = weakref.ref(thing, self._gone)
        self.deaths.append(weakly)
        if has_slots:
            return make(find=functools.partial(_held_by, weakly), is_view=True)
        if thing is self._module:
            self.root = make(find=functools.partial(_own_attributes, weakly))
            return self.root
        if issubclass(type(thing), nn.Module):  # one that is given other attributes is noticed by its tensors
            return make(held=attributes)
        return make(held=attributes, owner=weakly, is_ordered=True)

    def _add_object(self, thing: Any, held: Any, name: str, names: Collection[str] | None) -> ValueHolder:
        self._classes[type(thing)] = None
        for key, value in held.items() if names is None else ():
            if (type(value) in _LEADING or issubclass(type(value), type)) and key not in _OF_TORCH:
                self._functions[id(value)] = value
        skipped: Collection[str] = _OF_TORCH if issubclass(type(thing), nn.Module) else ()
        if str(type(thing).__module__).startswith("simplegraph."):
            skipped = held.keys()  # what a module of ours holds leads to the user's, and is no value itself
        counts = functools.partial(_counts, names, (skipped, self._uncounted))
        return self._add(self._attributes_of(thing, name, counts, by_code=names is not None))

    def _open_code(self) -> None:
        """Add what code names: attributes of classes, globals, variables of closures, and what lies below these."""
        code = self.code
        counts = functools.partial(_is_named, code.names)
        holders = [
            ValueHolder(kind.__qualname__, _class_dict(kind), counts=counts, has_tensors=True)
            for kind in code.classes.values()
            if not is_library(kind.__module__)
        ]
        holders += [
            ValueHolder(str(file.get("__name__")), file, counts=names.__contains__, has_tensors=True)
            for file, names in code.files.values()
        ]
        holders += [ValueHolder(name, cell=cell, has_tensors=True) for name, cell in code.cells]
        holders += [
            ValueHolder(function.__qualname__, vars(function), counts=counts, has_tensors=True)
            for function in code.functions
            if vars(function) and not is_library(function.__module__)
        ]
        roots = []
        for holder in holders:
            self._add(holder)
            held = holder.find()
            items = [(key, value) for key, value in dict.items(held) if holder.counts(key)]
            roots += [
                SearchRoot(_dotted(holder.name, key), value, functools.partial(_item, holder.find, dict, key))
                for key, value in items
                if _opens(type(value)) not in (None, OPAQUE) and not (type(value) in DICTS and not value)
            ]
        self._open(roots, code.names)


def _counts(names: Collection[str] | None, skipped: Sequence[Collection[str]], key: Any) -> bool:
    if type(key) is not str:
        return True
    is_ours = key.startswith(_OURS)
    return (names is None or key in names) and not is_ours and all(key not in each for each in skipped)


def _is_named(names: Collection[str], key: Any) -> bool:
    """True for attributes of classes that code names, but for what Python and metaclasses keep there."""
    return key in names and not (key.startswith("__") and key.endswith("__"))


def _item(find: Callable[[], Any], base: Any, key: Any) -> Any:
    return base.__getitem__(find(), key)


def _bound_by(find: Callable[[], Any]) -> dict[str, Any]:
    return _bound(find())


def _nothing() -> Any:
    raise LookupError("what a search begins at is found by its owner")


def _own_attributes(found: weakref.ref[Any]) -> Any:
    return own_dict(found())


def _held_by(found: weakref.ref[Any]) -> Any:
    return held_by(found())


def _class_dict(kind: type) -> Any:
    """Return the dict of a class itself, whose version moves, not a view of it."""
    inner = gc.get_referents(vars(kind))
    return inner[0] if len(inner) == 1 and type(inner[0]) is dict else dict(vars(kind))


def _dotted(prefix: str, key: Any) -> str:
    return f"{prefix}.{shown(key)}" if prefix else shown(key)
