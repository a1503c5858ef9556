"""Check that the plain values that a call reads are as before, by versions of dicts first and with little Python.

A `ValueHolder` holds plain values, and its `HolderState` says which. A `ValueCheck` checks all holders at every call,
each in the quickest way that its kind allows.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import functools
import gc
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.base.objects import identity_hash, own_dict
from simplegraph.base.patches import Door
from simplegraph.base.walk import (
    DICTS,
    MAX_WIDTH,
    held_by,
    items_in_order,
    keys_in_order,
    kind_of,
    length_of,
    slots_of,
    values_in_order,
)
from simplegraph.guard import versions
from simplegraph.guard.links import getter
from simplegraph.guard.values import (
    ALL,
    CLASS,
    HEAP_TYPE,
    MAX_DEPTH,
    NOT_PLAIN,
    ORDER,
    PARTS,
    SCRIPTS,
    Place,
    SameObject,
    buffer_key,
    can_be_referenced,
    class_key,
    identity_key,
    value_key,
)
from simplegraph.program.snapshot import ABSENT

_chain = itertools.chain.from_iterable
_find = operator.methodcaller("find")
_children = operator.itemgetter("_modules")
_HOLDS_NOTHING = frozenset({str, int, float, bool, type(None)})
_ITERATED = frozenset({list, set})  # classes whose referents for the garbage collector are exactly their items
_ELSEWHERE = (Tensor, nn.Module, torch.Generator)  # classes of values that are checked in other ways
_IDENTIFIED = (types.MethodType, *SCRIPTS)  # classes of opened objects that are code
_parts_of_code = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_IS_LAST_FIRST = gc.get_referents([0, 1]) == [1, 0]  # True if the collector lists the last item of a list first


class HolderState(NamedTuple):
    """Says which values a holder has: states are equal while no value changes.

    Attributes:
        container: the id of the container; None if another object shows the values each time.
        version: the version of a dict that has one; `value_ids` and `value_classes` are empty then.
        value_ids: the ids of the values.
        value_classes: their classes, since an id may be used again.
        key_ids: the ids of a dict's keys in their order, unless a version shows the order.
        length: the length of a long container without a version, of which nothing else is guarded; else None.
        buffers: the contents of small arrays and other buffers among the values.
        owner_class: the id of the class of the object that has the values.
    """

    container: int | None
    version: int | None
    value_ids: Sequence[int]
    value_classes: Sequence[type]
    key_ids: Sequence[int]
    length: int | None
    buffers: list[Hashable]
    owner_class: int


# Without the tuple's own `__new__`, a function in Python: some states are read at every call.
_new_state: Callable[[tuple[Any, ...]], HolderState] = functools.partial(tuple.__new__, HolderState)


class ValueSource(NamedTuple):
    """The place of a holder's values.

    Attributes:
        container: the dict, list, set or deque; None if it is not kept alive, since it may hold a tensor.
        find: returns the container if it is not kept alive.
        is_view: True if `find` returns a new object each time.
        owner: returns the object whose attributes these are; it may get another `__dict__` or class.
        cell: a closure's cell, whose content is the only value; there is no container then.
        function: a function, whose code and defaults are the only values; there is no container then.
        variable: returns a context variable, whose value is the only value; there is no container then.
    """

    container: Any = None
    find: Callable[[], Any] | None = None
    is_view: bool = False
    owner: Callable[[], Any] | None = None
    cell: types.CellType | None = None
    function: types.FunctionType | None = None
    variable: Callable[[], contextvars.ContextVar[Any]] | None = None


class ValueHolder:
    """One dict or container that holds plain values, with their keys.

    These are an object's attributes, a container's items, a file's globals, or the variable of a closure.

    Args:
        name: its dotted name in the module, or its name in code.
        source: the place of the values.
        guards: returns True for keys whose values are guarded.
        is_container: True for a user's container; if it is long, only its length and version are guarded.
        is_ordered: True if the order of keys is guarded.
        has_tensors: True if tensors are guarded by identity, too, since no survey of the module sees them.
        names: the only keys that are guarded, by the identity of their values, for the globals of a script: its loops
            set globals all the time, so the version of their dict is of no use. None for other holders.

    Attributes:
        container, owner, cell, function, variable: as in `ValueSource`.
        entries: key in the container -> key of the value (see `value_key`).
        inside: ids of objects opened below it.
        plain_values: the plain values and keys that were read last; kept alive, so that their ids are not reused.
        state: the `HolderState` when the entries were read; None before that, and if the container was gone.
        buffers: small arrays and other buffers among the values.
        keys: the keys that lead from a module to it; None if code leads to it.
        gone: called when an item of a container without versions ends, since another object may get its id.
        surveyed: ids of modules that surveys see.
    """

    def __init__(
        self,
        name: str,
        source: ValueSource,
        guards: Callable[[Any], bool] | None = None,
        *,
        is_container: bool = False,
        is_ordered: bool = False,
        has_tensors: bool = False,
        names: Collection[str] | None = None,
    ) -> None:
        self.name, self.has_tensors = name, has_tensors
        self.container, self._find, self._is_view, self.owner, self.cell, self.function, self.variable = source
        if self.cell is not None:
            self._find, self._is_view = functools.partial(held_by, self.cell), True
        if self.function is not None:
            self._find, self._is_view = functools.partial(_parts_of, self.function), True
        self.names = None if names is None else sorted(names)
        self.gone: Callable[[Any], object] | None = None
        self.surveyed: Collection[int] = ()
        self.keys: tuple[Any, ...] | None = None
        self.guards = guards or (lambda key: True)
        self.is_container, self.is_wide = is_container, False
        self._is_ordered = is_container or is_ordered
        self.entries: dict[Hashable, Hashable] = {}
        self._part: tuple[set[Place], frozenset[Any]] | None = None
        self.inside: list[int] = []
        self.buffers: list[Any] = []
        self.state: Any = None
        self.plain_values: list[Any] = []
        self._references: list[weakref.ref[Any]] = []

    def find(self) -> Any:
        """Return the present container. May raise any exception if it can no longer be reached."""
        return self.container if self._find is None else self._find()

    def length(self) -> int:
        """Return the length of the container now; -1 if it can no longer be reached."""
        try:
            return length_of(self.find())
        except Exception:
            return -1

    def read_state(self) -> HolderState | None:
        """Return the present state; None if the container is gone. Call it before the values are read."""
        version = length = None
        ids: Sequence[int] = ()
        classes: Sequence[type] = ()
        key_ids: Sequence[int] = ()
        try:
            container, owner = self.find(), self.owner and self.owner()
            if self.owner is not None and not self._is_view and own_dict(owner) is not container:
                return None
            is_dict = issubclass(type(container), dict)
            if self.names is not None:
                values = list(map(dict.get, itertools.repeat(container), self.names, itertools.repeat(ABSENT)))
                ids, classes = list(map(identity_hash, values)), list(map(type, values))
            elif is_dict and dict.__len__(container) and not self._is_view and versions.dict_version is not None:
                # The version of an empty dict does not change when the dict takes over another dict's items.
                version = versions.dict_version(container)
                if issubclass(type(container), collections.OrderedDict) and dict.__len__(container) > 1:
                    key_ids = list(map(identity_hash, keys_in_order(container)))  # `move_to_end` leaves the version
            elif self.is_wide:
                length = length_of(container)
            else:
                values = list(dict.values(container) if is_dict else kind_of(type(container)).__iter__(container))
                ids, classes = list(map(identity_hash, values)), list(map(type, values))
                key_ids = list(map(identity_hash, keys_in_order(container))) if is_dict else ()
        except Exception:  # another thread may change it
            return None
        found = None if self._is_view else id(container)
        buffers, kind = list(map(buffer_key, self.buffers)), type(container if owner is None else owner)
        return _new_state((found, version, ids, classes, key_ids, length, buffers, id(kind)))

    def read(self, opened: Collection[int]) -> list[tuple[list[Any], Any]]:
        """Read the entries again; return the empty dicts among the values, and the keys that lead to each.

        Walks do not open empty dicts.
        """
        container = self.find()
        self.is_wide = self.is_container and length_of(container) > MAX_WIDTH
        state = self.read_state()
        is_versioned = issubclass(type(container), dict) and versions.dict_version is not None
        by_ids = not is_versioned or self._is_view or self.names is not None
        self.inside, self.buffers, self.plain_values, self._references = [], [], [], []
        entries: dict[Hashable, Hashable] = {}
        empty: list[tuple[list[Any], Any]] = []
        version = state and (state.container, state.version)
        in_short = [("its length", length_of(container)), ("its version", version)] if self.is_wide else None
        for key, value in in_short or _items(container):
            if not self.guards(key) or type(value) is Door:
                continue
            # No tensor in a list is guarded here: a reading checks those that graphs read, and a list may log others.
            is_checked_elsewhere = issubclass(type(value), _ELSEWHERE) and not issubclass(type(container), dict)
            if is_checked_elsewhere and not self._guards_identity(value):
                continue
            entry = self._entry(value, opened, [key], empty)
            things = [(value, entry)]
            at = key if type(key) is str else value_key(key)
            if at is NOT_PLAIN:
                at = identity_key(key)
                things.append((key, at))
            else:
                self.plain_values.append(key)  # an item of a set may be a plain value
            entries[at] = entry
            for thing, its_key in things if by_ids else ():
                if type(its_key) is SameObject and can_be_referenced(type(thing)):
                    self._references.append(weakref.ref(thing, self.gone))
        kind = type(container if self.owner is None else self.owner())
        if kind.__flags__ & HEAP_TYPE:
            entries[CLASS] = class_key(kind)
        self.state = state and state._replace(buffers=list(map(buffer_key, self.buffers)))
        self.entries = entries
        self._part = None
        return empty

    def _entry(self, value: Any, opened: Collection[int], path: list[Any], empty: list[tuple[list[Any], Any]]) -> Any:
        """Return the entry of a value, and note buffers, opened objects and empty dicts in it.

        `path` are the keys that lead to the value.
        """
        entry = value_key(value)
        if entry is not NOT_PLAIN:
            self.plain_values.append(value)
            return entry
        if issubclass(type(value), _ELSEWHERE):
            # Only the class of a tensor or module is guarded here. A reading checks its identity.
            return identity_key(value) if self._guards_identity(value) else class_key(type(value))
        if issubclass(type(value), tuple) and len(path) <= MAX_DEPTH and length_of(value) <= MAX_WIDTH:
            items = enumerate(tuple.__iter__(value))
            entries = tuple(self._entry(item, opened, [*path, at], empty) for at, item in items)
            return PARTS, class_key(type(value)), entries
        buffered, is_opened = buffer_key(value), id(value) in opened
        if is_opened:
            self.inside.append(id(value))
        if buffered is not None:
            self.buffers.append(value)
            return buffered
        if is_opened:
            kind = class_key(type(value))
            if issubclass(type(value), collections.deque):
                return kind, collections.deque.maxlen.__get__(value)
            return identity_key(value) if issubclass(type(value), _IDENTIFIED) else kind
        if type(value) in DICTS and not value:
            self.inside.append(id(value))
            empty.append((path, value))
            return class_key(type(value))
        return identity_key(value)

    def _guards_identity(self, value: Any) -> bool:
        """True for tensors and modules that are checked by identity, since no survey sees them."""
        is_hidden = issubclass(type(value), nn.Module) and id(value) not in self.surveyed
        return self.has_tensors and (is_hidden or issubclass(type(value), Tensor))

    def part(self, unguarded: Collection[Place]) -> frozenset[Any]:
        """Return the entries as a part of a key, without those at unguarded places."""
        if self._part is None or self._part[0] != unguarded:
            guarded = {} if (self.name, ALL) in unguarded else self.entries
            guarded = {key: entry for key, entry in guarded.items() if (self.name, key) not in unguarded}
            ordered = [(ORDER, tuple(guarded))] * (self._is_ordered and len(guarded) > 1)
            self._part = set(unguarded), frozenset((*guarded.items(), *ordered))
        return self._part[1]


def _items(container: Any) -> list[tuple[Any, Any]]:
    """List the keys and values of a container; for a set its items, each with the value True."""
    if issubclass(type(container), dict):
        return items_in_order(container)
    items = kind_of(type(container)).__iter__(container)
    return [(item, True) for item in items] if issubclass(type(container), set) else list(enumerate(items))


def _parts_of(function: types.FunctionType) -> dict[str, Any]:
    """Return the code and the defaults of a function."""
    return dict(zip(("__code__", "__defaults__", "__kwdefaults__"), _parts_of_code(function), strict=True))


class _HoldersByMethod:
    """Divides holders by the quickest way to check them.

    Args:
        root: the holder of the module's own attributes; None for a function.
        checked: the holders to divide.

    Attributes:
        by_version: dicts that are kept alive, and whose version shows each change.
        by_items: lists, sets and empty dicts, whose items the garbage collector shows.
        cells: the filled cells of closures, whose content it shows.
        functions: functions, whose code and defaults it shows.
        slotted: objects that have only slots, whose values it shows.
        variables: context variables.
        by_clock: dicts that need not be read while the clock of versions stands still.
        by_state: all others, whose states are read at every call.
    """

    def __init__(self, root: ValueHolder | None, checked: Sequence[ValueHolder]) -> None:
        self.by_version = [
            holder
            for holder in checked
            if issubclass(type(holder.container), dict)
            and holder.state.version is not None
            and not (holder.state.key_ids or holder.buffers)
        ]
        quick = [holder for holder in checked if not (holder.is_wide or holder.buffers)]
        self.by_items = [
            holder
            for holder in quick
            if type(holder.container) in _ITERATED or (type(holder.container) is dict and not holder.container)
        ]
        # An empty cell has no item: if it took the value of the next cell, all items would be the same as before.
        self.cells = [holder for holder in quick if holder.cell is not None and holder.state.value_ids]
        self.functions = [holder for holder in quick if holder.function is not None]
        viewed = (holder for holder in quick if holder.owner is not None and holder.container is None)
        self.slotted = [holder for holder in viewed if _shows_slots(holder)]
        self.variables = [holder for holder in quick if holder.variable is not None]
        # What slots and variables hold now is taken for what was read. If it changed meanwhile, the state shows that.
        unchanged = [holder for holder in (*self.slotted, *self.variables) if holder.read_state() == holder.state]
        quickly = {*self.by_version, *self.by_items, *self.cells, *self.functions, *unchanged}
        others = [holder for holder in checked if holder not in quickly]
        self.by_clock = _checked_by_clock(others, [*self.by_version, *([root] if root is not None else ())])
        self.by_state = [holder for holder in others if holder not in self.by_clock]


def _checked_by_clock(others: Sequence[ValueHolder], versioned: Sequence[ValueHolder]) -> list[ValueHolder]:
    """Find dicts that need not be read while the clock of versions stands still.

    They are not kept alive, but found again at each call. If a dict whose version is checked holds them, they are the
    same while the clock stands still. Otherwise another dict may take their place and their id, which the clock does
    not show. A weak reference shows the end of an OrderedDict; its order is read each time.

    Args:
        others: holders that cannot be checked in a quicker way.
        versioned: holders of dicts whose version is checked.
    """
    found = [
        holder
        for holder in others
        if holder.state.version is not None and holder.owner is None and not (holder.buffers or holder.is_wide)
    ]
    if not found:
        return []
    held = set(map(identity_hash, gc.get_referents(*map(_find, (*versioned, *found)))))
    return [holder for holder in found if holder.state.key_ids or identity_hash(holder.find()) in held]


class _Items:
    """Everything whose items are checked one by one, and its expected items in the order in which they are read.

    Attributes:
        boxes: lists, sets, empty dicts and cells, whose items the garbage collector shows.
        lists: the boxes that are no cells.
        lengths: their lengths: an item that moved from one list to the next would not show otherwise.
        slotted: functions that return the objects that have only slots.
        no_attributes: the empty `__dict__` of those of these objects that have one.
        variables: functions that return context variables.
        orders: weak references to the OrderedDicts whose order is checked.
        has_more: True if there are items that `read_more` reads.
        number: the number of items.
        plain_at: returns the values among the items that refer to nothing else.
        plain: these values; they are kept alive, and checked by identity without a hash.
        hashed_at: returns the other items, which are not kept alive.
        ids: their ids.
        kinds: their classes, since an id may be used again.
    """

    def __init__(self, divided: _HoldersByMethod) -> None:
        self.lists: list[Any] = [holder.container for holder in divided.by_items]
        self.lengths = list(map(len, self.lists))
        self.boxes = [*self.lists, *(holder.cell for holder in divided.cells)]
        self.slotted: list[Any] = [holder.owner for holder in divided.slotted]
        owners = map(_owner_of, divided.slotted)
        self.no_attributes = [attributes for owner in owners if (attributes := own_dict(owner)) is not None]
        self.variables: list[Any] = [holder.variable for holder in divided.variables]
        self.orders = [weakref.ref(holder.find()) for holder in divided.by_clock if holder.state.key_ids]
        self.has_more = bool(self.slotted or self.variables or self.orders)
        # What boxes hold was read before, and their states have it. What slots and variables hold is read now.
        ids: list[int] = []
        kinds: list[type] = []
        for holder in (*divided.by_items, *divided.cells):
            order = -1 if _IS_LAST_FIRST and type(holder.container) is list else 1
            ids += holder.state.value_ids[::order]
            kinds += holder.state.value_classes[::order]
        items = gc.get_referents(*self.boxes) + (self.read_more() if self.has_more else [])
        ids += map(identity_hash, items[len(ids) :])
        kinds += map(type, items[len(kinds) :])
        is_read = list(map(identity_hash, items)) == ids and list(map(type, items)) == kinds
        plain_at = [at for at, kind in enumerate(kinds) if is_read and kind in _HOLDS_NOTHING]
        self.number = len(ids)
        self.plain_at, self.hashed_at = getter(plain_at), getter(sorted({*range(len(ids))} - {*plain_at}))
        self.plain = self.plain_at(items)
        self.ids, self.kinds = self.hashed_at(ids), self.hashed_at(kinds)

    def read_more(self) -> list[Any]:
        """Read the slots of objects, by the garbage collector; context variables; and the order of dicts."""
        values = gc.get_referents(*[owner() for owner in self.slotted])
        values += map(contextvars.ContextVar.get, [find() for find in self.variables], itertools.repeat(ABSENT))
        return values + list(_chain(map(keys_in_order, [container() for container in self.orders])))


class _VersionedDicts:
    """Dicts that are checked by their version, in the order in which their versions are read.

    First come those of children and objects that show their `__dict__` and class to the garbage collector. Both are
    read at every call, since an object may get another `__dict__`. All other dicts are kept alive.

    Attributes:
        parents: the attributes of modules, except the root, whose children all show their `__dict__`.
        is_parent: True if the root is such a module, too.
        objects: functions that return other objects that show their `__dict__`.
        classes: the classes of these children and objects.
        shown: the dicts of these children and objects.
        shown_ids: the ids of these dicts.
        kept: the other dicts.
        owners: for each object that does not show its `__dict__`: a function that returns it, its `__dict__`, and its
            class.
        holders: the holders of all dicts, in the order in which their versions are read.
        indices: by holder, the indices of its versions.
    """

    def __init__(self, root: ValueHolder | None, divided: _HoldersByMethod) -> None:
        self.is_parent, self.parents, children = _children_of(root, divided.by_version)
        of_children, dicts = set(children), (*divided.by_version, *divided.by_items)
        owned = [holder for holder in dicts if holder.owner is not None and holder not in of_children]
        objects = [
            holder for holder in owned if holder.state.version is not None and _shows_dict(_owner_of(holder), holder)
        ]
        self.objects: list[Any] = [holder.owner for holder in objects]
        showing = [*children, *objects]
        shown = set(showing)
        self.classes = [type(_owner_of(holder)) for holder in showing]
        self.shown = [holder.container for holder in showing]
        self.shown_ids = frozenset(map(id, self.shown))
        self.owners: list[Any] = [
            (holder.owner, holder.container, type(_owner_of(holder))) for holder in owned if holder not in shown
        ]
        kept = [holder for holder in divided.by_version if holder not in shown]
        self.kept = [holder.container for holder in kept]
        self.holders = [*showing, *kept]
        self.indices: dict[ValueHolder, list[int]] = {}
        for at, holder in enumerate(self.holders):
            self.indices.setdefault(holder, []).append(at)


class _Families:
    """The children of modules, for Python releases on which versions do not show them.

    Args:
        root: the holder of the module's own attributes; None for a function.
        holders: all holders.

    Attributes:
        parents: the attributes of modules with children, except the root.
        is_parent: True if the root has children, too.
        children: the ids of all children.
    """

    def __init__(self, root: ValueHolder | None, holders: Sequence[ValueHolder]) -> None:
        owned = (holder.container for holder in holders if holder.owner is not None)
        registries = ((owner, owner.get("_modules")) for owner in owned if isinstance(owner, dict))
        self.parents = [owner for owner, children in registries if isinstance(children, dict) and children]
        attributes = {} if root is None else root.find()
        self.is_parent = root is not None and bool(_children(attributes))
        self.children = self.read(attributes)

    def read(self, attributes: dict[str, Any]) -> list[int]:
        """Return the ids of all children of modules; `attributes` are the module's own."""
        parents = [attributes, *self.parents] if self.is_parent else self.parents
        return list(map(id, _chain(map(values_in_order, map(_children, parents)))))


class ValueCheck:
    """Checks at each call that holders have the values that they had, with as little Python as possible.

    It reads the class and `__dict__` of children and objects by the garbage collector, which is much faster than by
    Python.

    Args:
        root: the holder of the module's own attributes, which are not kept alive; None for a function.
        holders: all holders.
        key: the key of the values; None if it was not made yet.

    Attributes:
        token: an object that identifies the check without keeping it alive.
        moment: the moment of `versions.clock` when the check last held; None without a clock.
    """

    def __init__(self, root: ValueHolder | None, holders: Sequence[ValueHolder], key: Any) -> None:
        self.root, self.holders, self.key, self.token = root, holders, key, object()
        self.moment: object = None
        checked = [
            holder for holder in holders if holder is not root or versions.dict_version is None or holder.buffers
        ]
        divided = _HoldersByMethod(root, checked)
        self._functions = [holder.function for holder in divided.functions]
        self._code_parts = gc.get_referents(*self._functions)  # code and defaults among them
        self._items = _Items(divided)
        self._by_clock, self._by_state = divided.by_clock, divided.by_state
        self._clock_states = [holder.state for holder in self._by_clock]
        self._states = [holder.state for holder in self._by_state]
        self._containers = frozenset(id(holder.container) for holder in checked if not holder.is_wide) - {id(None)}
        self._dicts = _VersionedDicts(root, divided)
        self._versions = [holder.state.version for holder in self._dicts.holders]
        # The version of the module's own attributes; None if they are checked as those of other holders are.
        self._own_version: Any = root.state.version if root is not None and root not in checked else None
        self._families = _Families(root, holders) if versions.dict_version is None else None

    def holds(self, attributes: dict[str, Any]) -> bool:
        """True if no value changed; `attributes` are the module's own. It sets only `moment`, so it needs no lock."""
        version: Any = versions.dict_version
        clock, moment = versions.clock if version is not None else None, None
        try:
            if clock is not None:  # before any dict is read
                with clock.lock:
                    before, clock.last = clock.last, version({})
                    clock.moment = clock.moment if clock.last == before + 1 else object()
                    moment = clock.moment
            is_quiet = moment is not None and moment is self.moment  # no dict whose version was taken has changed
            if self._own_version is not None and version(attributes) != self._own_version:
                return False
            if version is None and not self.has_children(attributes):
                return False
            # Dicts, and the objects that have them.
            dicts = self._dicts
            versioned = dicts.kept
            if dicts.classes:
                objects = [owner() for owner in dicts.objects]
                parents = [attributes, *dicts.parents] if dicts.is_parent else dicts.parents
                referents = gc.get_referents(*gc.get_referents(*map(_children, parents)), *objects)
                if referents[1::2] != dicts.classes:
                    return False
                if is_quiet:
                    if not all(map(operator.is_, referents[::2], dicts.shown)):
                        return False
                else:
                    versioned = [*referents[::2], *versioned]  # no two dicts ever have the same version
            if not is_quiet and versioned and list(map(version, versioned)) != self._versions:
                return False
            for owner, container, kind in dicts.owners:
                thing = owner()
                if type(thing) is not kind or own_dict(thing) is not container:
                    return False
            # Functions.
            if self._functions:
                code_parts = gc.get_referents(*self._functions)
                # By identity, past the ``__eq__`` of defaults.
                if len(code_parts) != len(self._code_parts) or not all(map(operator.is_, code_parts, self._code_parts)):
                    return False
            # Items of lists, sets and cells, slots and context variables.
            expected = self._items
            if expected.number or expected.lists:
                items = gc.get_referents(*expected.boxes)
                if expected.has_more:
                    items += expected.read_more()
                if len(items) != expected.number:
                    return False
                if not all(map(operator.is_, expected.plain_at(items), expected.plain)):
                    return False
                hashed = expected.hashed_at(items)
                if tuple(map(identity_hash, hashed)) != expected.ids or tuple(map(type, hashed)) != expected.kinds:
                    return False
                if list(map(len, expected.lists)) != expected.lengths:
                    return False
            if any(expected.no_attributes):
                return False
        except Exception:  # a value that cannot be read counts as changed
            return False
        # All others.
        if not is_quiet and [holder.read_state() for holder in self._by_clock] != self._clock_states:
            return False
        if self._by_state and [holder.read_state() for holder in self._by_state] != self._states:
            return False
        self.moment = moment
        return True

    def has_children(self, attributes: dict[str, Any]) -> bool:
        """True if modules have the same children; for Python releases on which versions do not show that."""
        families: Any = self._families
        return versions.dict_version is not None or families.read(attributes) == families.children

    def checks(self, containers: Iterable[Any], attributes: dict[str, Any]) -> bool:
        """True if it checks all values in these containers; `attributes` are the module's own."""
        by_own_version = attributes if self._own_version is not None else None
        return all(
            container is by_own_version or id(container) in self._containers or issubclass(type(container), tuple)
            for container in containers
        )

    def checks_versions(self, dicts: Iterable[dict[str, Any]]) -> bool:
        """True if it checks the versions of these dicts, and the owner of each dict and its class."""
        return self._dicts.shown_ids.issuperset(map(id, dicts))

    def moved(self, attributes: dict[str, Any]) -> list[ValueHolder]:
        """List the holders whose values changed; if all others are unchanged, only those with versions are checked."""
        version: Any = versions.dict_version
        if version is None:
            return self._moved_otherwise()
        later = copy.copy(self)
        later._versions = [version(holder.container) for holder in self._dicts.holders]
        holders = zip(self._dicts.holders, later._versions, self._versions, strict=True)
        moved = {holder: None for holder, now, before in holders if now != before}
        if self.root is not None and self._own_version is not None:
            later._own_version = version(attributes)
            if later._own_version != self._own_version:
                moved[self.root] = None
        return list(moved) if later.holds(attributes) else self._moved_otherwise()

    def _moved_otherwise(self) -> list[ValueHolder]:
        """List the holders whose states changed."""
        return [holder for holder in self.holders if holder.read_state() != holder.state]

    def renewed(self, renewed: Mapping[int, int]) -> ValueCheck:
        """Return the check with versions replaced by new ones; its token stays valid for a reading."""
        later = copy.copy(self)  # another thread may be using this one
        later._versions = self._versions.copy()
        versions_now: dict[ValueHolder, int] = {}
        for at, version in enumerate(self._versions):
            if version in renewed:
                later._versions[at] = versions_now[self._dicts.holders[at]] = renewed[version]
        if self.root is not None and self._own_version in renewed:
            later._own_version = versions_now[self.root] = renewed[self._own_version]
        for holder, version in versions_now.items():
            holder.state = _new_state((holder.state.container, version, *holder.state[2:]))
        return later

    def after(self, moved: Sequence[ValueHolder], key: Any) -> ValueCheck:
        """Return the check of the values after these holders were read again."""
        indices = self._dicts.indices
        versioned = indices.keys() | ({self.root} if self._own_version is not None else set())
        if any(
            holder not in versioned or holder.buffers or holder.state.version is None or holder.state.key_ids
            for holder in moved
        ):
            return ValueCheck(self.root, self.holders, key)
        later = copy.copy(self)  # another thread may be using this one
        later.key, later.token, later._versions = key, object(), self._versions.copy()
        for holder in moved:
            for at in indices.get(holder, ()):
                later._versions[at] = holder.state.version
            if holder is self.root:
                later._own_version = holder.state.version
        return later


def _children_of(
    root: ValueHolder | None, by_version: Sequence[ValueHolder]
) -> tuple[bool, list[dict[str, Any]], list[ValueHolder]]:
    """Find the modules whose children all show their `__dict__` to the garbage collector.

    Returns:
        True if the root is such a module; the attributes of the others; and the holders of all their children in order.
    """
    by_container = {id(holder.container): holder for holder in by_version if holder.owner is not None}
    is_parent, parents, children = False, [], []
    for parent in [*([root] if root is not None else ()), *by_container.values()]:
        attributes = parent.find()
        registry = attributes.get("_modules")
        if registry and type(registry) is dict:
            modules = [child for child in gc.get_referents(registry) if child is not None]
            holders = [holder for child in modules if (holder := by_container.get(id(own_dict(child)))) is not None]
            if len(holders) == len(modules) and all(map(_shows_dict, modules, holders)):
                children += holders
                if parent is root:
                    is_parent = True
                else:
                    parents.append(attributes)
    return is_parent, parents, children


def _shows_dict(thing: Any, holder: ValueHolder) -> bool:
    """True if an object shows exactly two referents to the garbage collector: its holder's dict, and its class."""
    referents = gc.get_referents(thing)
    is_shown = thing is _owner_of(holder) and len(referents) == 2
    return is_shown and referents[0] is holder.container and referents[1] is type(thing)


def _owner_of(holder: ValueHolder) -> Any:
    """Return the object whose attributes a holder has; None if it is gone."""
    return None if holder.owner is None else holder.owner()


def _shows_slots(holder: ValueHolder) -> bool:
    """True if an object has only slots, and shows all their values to the garbage collector."""
    if holder.state is None:
        return False
    thing, values = _owner_of(holder), holder.find()
    if own_dict(thing) or len(slots_of(type(thing))) != len(values):
        return False
    # Slots in C may hold plain numbers, which the collector does not see, and read as None if empty.
    shown = collections.Counter(map(id, gc.get_referents(thing)))
    return collections.Counter(map(id, values.values())) <= shown
