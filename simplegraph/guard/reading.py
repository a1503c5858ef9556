"""Compare in every call what a module holds with what it held, by versions first and with as little Python as possible.

A reading compares what graphs read: tensors, hooks, and which objects stand where. A comparison compares plain values.
"""

from __future__ import annotations

import collections
import copy
import gc
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from simplegraph.base.constants import WatchedValue, WatchedVersion
from simplegraph.base.modes import ANY_AUTOCAST
from simplegraph.base.objects import own_dict
from simplegraph.base.tensors import OwnedTensor, has_address, held_by_nobody, is_wrapper, parts
from simplegraph.base.walk import keys_in_order, values_in_order
from simplegraph.guard import versions
from simplegraph.guard.links import HOOKS, REGISTRIES, SETTINGS, AttributeEntries, Link, getter, levels_of, split

_children = operator.itemgetter("_modules")
_READERS = tuple(map(operator.itemgetter, REGISTRIES))
_ITERATED = frozenset({list, set, collections.deque})
_IS_LAST_FIRST = gc.get_referents([0, 1]) == [1, 0]  # the garbage collector's order in lists
_chain = itertools.chain.from_iterable
_get = object.__getattribute__  # past what the class of an object makes of it
_is_inference_mode = torch.is_inference_mode_enabled  # looked up once
_is_same = operator.methodcaller("is_same")
_is_released = operator.methodcaller("is_released")
_tensor_of = operator.attrgetter("tensor")
_grad = operator.attrgetter("grad")
_DICTS = itertools.repeat("__dict__")
_requires_grad = operator.attrgetter("requires_grad")
parts_of_code = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_layout: Callable[[Tensor], Any] = operator.attrgetter("shape", "dtype", "requires_grad")
_VIEWS: tuple[Callable[[Tensor], Any], ...] = (Tensor.stride, Tensor.is_neg, Tensor.is_conj)
# Compares types, shapes, strides and dtypes of many tensors by one call. Private to torch, and an object of it holds
# only in the dispatch state in which it was made; where it is absent, Python compares them.
_TensorGuards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

# Compares the addresses of many tensors by one call. Private to torch, and only there where torch knows CUDA.
_same_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


def _values_of(*registries: dict[str, Any]) -> list[Any]:
    """Return what registries hold."""
    return list(_chain(map(dict.values, registries)))


def _ordered_values_of(*registries: dict[str, Any]) -> list[Any]:
    """Return the same, in an order that `move_to_end` changes."""
    return list(_chain(map(values_in_order, registries)))


class _Held(NamedTuple):
    """The dicts and containers that a reading reads, but for the module's own attributes.

    Attributes:
        attributes: of each module below.
        filled: of these, the ones that have parameters, that have buffers, and that have children.
        empty: registries.
        bases: other containers that links start at.
        entries: what the attributes of modules must be, in the order in which the modules are read, and whose they are.
    """

    attributes: list[dict[str, Any]]
    filled: list[list[dict[str, Any]]]
    empty: list[dict[str, Any]]
    bases: list[Any]
    entries: list[tuple[AttributeEntries, dict[str, Any] | None]]


class Reading:
    """Reads what a module holds, and compares that with what it held when this was made.

    Versions of the modules' attributes say where to look for settings, functions and modes; where a `Comparison` has
    compared these for the same call already, they are not read again. Tensors are read in every call, since they move
    without their holder.

    It holds dicts of submodules, but no tensor; once a submodule is gone it holds nothing, and reads as changed.

    Args:
        modules: the module first, then everything below it.
        links: (holder, key, value) from a module's attributes, or from any other place, to what is compared beside
            parameters, buffers, children and hooks.
        owned: tensors that nothing else is known to hold.
        watched: values of tensors.
        left: places, by the id of a dict and the key, in which runs leave tensors: what they hold does not count.
        graded: ids of tensors whose gradients are compared as well.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        links: Iterable[Sequence[Link]],
        owned: Sequence[OwnedTensor] = (),
        watched: Sequence[WatchedValue | WatchedVersion] = (),
        left: Collection[tuple[int, str]] = (),
        graded: Collection[int] = (),
    ) -> None:
        root, *children = modules
        below = [vars(child) for child in children]
        hooks: list[dict[int, Any]] = [vars(module)[name] for module in modules for name in HOOKS]
        self._empty_hooks = [held for held in hooks if not held]
        self._hooks = [held for held in hooks if held]
        self._hooks_before = [held.copy() for held in self._hooks]  # of their class, which may count the order
        self._handles = RemovableHandle.next_id
        self._owned, self._watched = owned, watched
        self._kinds = list({type(module): None for module in modules})
        self._forwards = [kind.forward for kind in self._kinds]
        entries, read = split(modules, links)
        self._versions: list[int] | None = None  # of all attributes, when they were looked at last
        self._own = 0  # that of the module itself
        self._told: object = None  # the mark of a comparison that held then, and will not once another of them moves
        bases, self._levels = levels_of([vars(root), *below], read)
        filled = [[attributes for attributes in below if attributes[name]] for name in REGISTRIES]
        empty = [held for attributes in below for name in REGISTRIES if not (held := attributes[name])]
        self._held = [_Held(below, filled, empty, bases, [(entries[0], None)])]
        held = self._held  # cleared once a submodule is gone
        self._deaths = [weakref.ref(module, lambda _: held.clear()) for module in modules]
        registries = self._registries(vars(root))
        # An OrderedDict may get another order without another version.
        has_orders = any(issubclass(type(held), collections.OrderedDict) for held in registries)
        self._keys: Callable[[Any], Iterable[Any]] = keys_in_order if has_orders else dict.keys
        self._names = list(map(list, map(self._keys, registries)))
        self._filled: list[int] | None = None  # the versions of registries when they were looked at last
        plainly = list(map(id, _values_of(*registries)))
        is_quick = list(map(id, gc.get_referents(*registries))) == plainly  # of dicts of a class, or other keys, not
        self._values_of: Callable[..., list[Any]] = gc.get_referents if is_quick else _values_of
        if has_orders:
            self._values_of = _ordered_values_of
        self._graded_at: Callable[[Any], Sequence[Tensor]] | None = None
        values, self._lengths = self._read(vars(root))
        if graded:
            self._graded_at = getter([at for at, value in enumerate(values) if id(value) in graded])
            values += map(_grad, self._graded_at(values))
        registered = self._lengths[0]
        places = [(id(held), name) for held, names in zip(registries, self._names, strict=True) for name in names]
        ignored = {at for at, place in enumerate(places) if place in left}
        tensors = [
            at
            for at, value in enumerate(values)
            if at not in ignored and issubclass(type(value), Tensor) and (is_wrapper(value) or has_address(value))
        ]
        # Of containers their length and what is read of them is compared, whichever objects they are.
        others = sorted(set(range(len(values))) - set(tensors) - ignored - self._opened(registered))
        numbers = [at for at in others if type(values[at]) in SETTINGS]
        modules_at = [at for at in others if issubclass(type(values[at]), nn.Module)]
        others = sorted(set(others) - {*numbers, *modules_at})
        self._tensors_at, self._others_at, self._numbers_at = map(getter, (tensors, others, numbers))
        self._numbers = self._numbers_at(values)
        self._number_types = list(map(type, self._numbers))
        self._anchors = self._others_at(values)  # owned, so that their ids stay theirs
        self._ids = list(map(id, self._anchors))
        self._modules_at = getter(modules_at)
        held_modules = self._modules_at(values)
        self._types = list(map(type, held_modules))
        by_dict: dict[int, tuple[AttributeEntries, dict[str, Any] | None]] = {
            id(attributes): (each, attributes) for each, attributes in zip(entries[1:], below, strict=True)
        }
        by_dict[id(vars(root))] = entries[0], None  # not owned: a child may hold the module itself
        # Of a module that another thread added since the survey: never holds, so that all is surveyed again.
        added = AttributeEntries({}, ()), None
        self._held[0].entries.extend(by_dict.get(id(_get(module, "__dict__")), added) for module in held_modules)
        self._wraps = any(map(is_wrapper, (*(values[at] for at in tensors), *map(_tensor_of, owned))))
        self._is_more = self._wraps or bool(owned)
        live = self._of(values)
        self._addresses = list(map(Tensor.data_ptr, live))
        self._indices = list(range(len(live)))
        # Tied weights, and parameters that an optimizer holds, too: `_TensorGuards` takes no tensor twice.
        first = {id(tensor): at for at, tensor in reversed(list(enumerate(live)))}
        again = [at for at, tensor in enumerate(live) if first[id(tensor)] != at]
        self._is_again = bool(again)
        self._again, self._first = getter(again), getter([first[id(live[at])] for at in again])
        self._once = getter(sorted(first.values()))
        once = self._once(live)
        self._layouts, self._views = list(map(_layout, once)), [list(map(read, once)) for read in _VIEWS]
        self._checks: dict[tuple[bool, bool], Any] = {}

    def _opened(self, start: int) -> set[int]:
        """Return the indices of the containers among all values; those of slots begin at `start`."""
        indices: set[int] = set()
        for _, keys, opened in self._levels:
            indices |= {start + at for at, _ in opened}
            start += len(keys)
        return indices

    def _read(self, attributes: dict[str, Any]) -> tuple[list[Any], list[int]]:
        """Read all that no version tells of: the values, and the lengths of containers.

        Raises whatever a place that is gone raises.
        """
        values = self._values_of(*self._registries(attributes))
        lengths = [len(values)]
        if self._levels:
            self._read_links(attributes, values, lengths)
        if self._graded_at is not None:
            values += map(_grad, self._graded_at(values))
        return values, lengths

    def _registries(self, attributes: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the module's own registries, and the others that held something."""
        return [*map(attributes.__getitem__, REGISTRIES), *_chain(map(map, _READERS, self._held[0].filled))]

    def _read_links(self, attributes: dict[str, Any], values: list[Any], lengths: list[int]) -> None:
        held = self._held[0]
        holders: Sequence[Any] = [attributes, *held.attributes, *held.bases]
        for parents, keys, opened in self._levels:
            slots = list(map(operator.getitem, map(holders.__getitem__, parents), keys))
            values += slots
            holders = [_get(slots[at], "__dict__") if by_attributes else slots[at] for at, by_attributes in opened]
            lengths += map(len, holders)

    def _of(self, values: list[Any]) -> Sequence[Tensor]:
        tensors = self._tensors_at(values)
        if self._owned:
            tensors = (*tensors, *map(_tensor_of, self._owned))
        return tuple(part for tensor in tensors for part in parts(tensor)) if self._wraps else tensors

    def requires_grad(self, attributes: dict[str, Any]) -> bool | None:
        """True if a tensor that is compared requires grad now; None if one cannot be read, or is none any more."""
        try:
            values, lengths = self._read(attributes)
            return any(map(_requires_grad, self._of(values))) if lengths == self._lengths else None
        except Exception:  # a survey finds out what it was
            return None

    def same(self, attributes: dict[str, Any], told: Comparison | None = None) -> bool:
        """True if all is as it was. What cannot be read has changed.

        Args:
            attributes: the module's own.
            told: held in this call.
        """
        try:
            held = self._held[0]
            version: Any = versions.dict_version
            if any(held.empty) or self._hooks != self._hooks_before:
                return False
            if self._owned and any(map(_is_released, held_by_nobody(self._owned))):
                return False
            if RemovableHandle.next_id != self._handles:  # a hook was registered somewhere
                if any(self._empty_hooks):
                    return False
                self._handles = RemovableHandle.next_id
            registries = self._registries(attributes)
            values = self._values_of(*registries)
            lengths = [len(values)]
            if self._levels:
                self._read_links(attributes, values, lengths)
            if lengths != self._lengths:
                return False
            if self._graded_at is not None:
                values += map(_grad, self._graded_at(values))
            # Values alone do not tell names: two parameters may have changed theirs.
            filled = None if version is None or self._keys is keys_in_order else list(map(version, registries))
            if filled is None or filled != self._filled:
                if list(map(list, map(self._keys, registries))) != self._names:
                    return False
                self._filled = filled
            if self._ids and list(map(id, self._others_at(values))) != self._ids:
                return False
            if self._numbers:
                numbers = self._numbers_at(values)  # their types first: a tensor of one element may equal a number
                if list(map(type, numbers)) != self._number_types or numbers != self._numbers:
                    return False
            is_told = told is not None and told.mark is self._told and version(attributes) == self._own
            if not is_told and not self._look(attributes, self._modules_at(values), told):
                return False
            tensors = self._of(values) if self._is_more else self._tensors_at(values)
            if _same_addresses is not None:
                if not _same_addresses(list(tensors), self._addresses, self._indices):
                    return False
            elif list(map(Tensor.data_ptr, tensors)) != self._addresses:
                return False
            if self._is_again:
                if not all(map(operator.is_, self._again(tensors), self._first(tensors))):
                    return False
                tensors = self._once(tensors)
            check = self._checks.get((_is_inference_mode(), ANY_AUTOCAST()))
            if not (check.check(*tensors) if check is not None else self._same_layouts(tensors)):
                return False
            if self._watched and not all(map(_is_same, self._watched)):
                return False
            return [kind.forward for kind in self._kinds] == self._forwards
        except Exception:  # a survey finds out what it was
            return False

    def renew(self, renewed: Mapping[int, int]) -> None:
        """Take dicts of these versions for known by their new ones."""
        if self._versions is not None:
            self._versions = [renewed.get(version, version) for version in self._versions]
        if self._filled is not None:
            self._filled = [renewed.get(version, version) for version in self._filled]
        self._own = renewed.get(self._own, self._own)

    def _look(self, attributes: dict[str, Any], modules: Sequence[nn.Module], told: Comparison | None) -> bool:
        """Compare the modules' classes, and the attributes whose version is another one by now; keep the versions.

        No two dicts ever have one version, so that these tell the modules, too. They are taken before anything is
        looked at, since another thread may write meanwhile.
        """
        if list(map(type, modules)) != self._types:
            return False
        dicts, before = [attributes, *map(_get, modules, _DICTS)], self._versions
        taken = None if versions.dict_version is None else list(map(versions.dict_version, dicts))
        for at, ((entries, held), found) in enumerate(zip(self._held[0].entries, dicts, strict=True)):
            if taken is not None and before is not None and taken[at] == before[at]:
                continue
            if (held is not None and held is not found) or not entries.hold(found):
                return False
        self._versions = taken
        # Of an OrderedDict no version tells the order.
        has_orders = self._values_of is not gc.get_referents
        if taken is not None and told is not None and not has_orders and told.tells(dicts[1:]):
            self._own, self._told = taken[0], told.mark
        return True

    def _same_layouts(self, tensors: Sequence[Tensor]) -> bool:
        """Compare the layouts in Python, and prepare a quicker comparison for the next time."""
        views = [list(map(read, tensors)) for read in _VIEWS]
        if list(map(_layout, tensors)) != self._layouts or views != self._views:
            return False
        if _TensorGuards is not None and tensors:
            check = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._checks[_is_inference_mode(), ANY_AUTOCAST()] = check
        return True


class MarkedHolder(Protocol):
    """Holds plain values, which it marks; see `ValueHolder`."""

    held: Any
    owner: Callable[[], Any] | None
    cell: types.CellType | None
    function: types.FunctionType | None
    is_wide: bool
    buffers: list[Any]
    mark: Any

    def find(self) -> Any: ...

    def marked(self) -> Any: ...


class Comparison:
    """Compares what holders hold with what they held, with as little Python as possible.

    Children and objects are asked for their class and `__dict__` by the garbage collector, which is much quicker.

    Args:
        root: the holder of the module's own attributes, which are not kept; None for a function.
        holders: all.
        key: of the values for as long as nothing moves; None if that is not known yet.

    Attributes:
        mark: stands for it, and keeps nothing alive.
    """

    def __init__(self, root: Any, holders: Sequence[Any], key: Any) -> None:
        self.root, self.holders, self.key, self.mark = root, holders, key, object()
        rest = [holder for holder in holders if holder is not root or versions.dict_version is None or holder.buffers]
        by_version = [
            holder
            for holder in rest
            if issubclass(type(holder.held), dict) and type(holder.mark[1]) is int and not holder.buffers
        ]
        quick = [holder for holder in rest if not (holder.is_wide or holder.buffers)]
        by_items = [
            holder
            for holder in quick
            if type(holder.held) in _ITERATED or (type(holder.held) is dict and not holder.held)
        ]
        self._lists = [holder.held for holder in by_items]
        self._lengths = list(map(len, self._lists))
        by_items += (holder for holder in quick if holder.cell is not None)
        functions = [holder for holder in quick if holder.function is not None]
        self._functions = [holder.function for holder in functions]
        self._codes = list(_chain(map(parts_of_code, self._functions)))
        self._boxes = [holder.held if holder.cell is None else holder.cell for holder in by_items]
        orders = [-1 if _IS_LAST_FIRST and type(holder.held) is list else 1 for holder in by_items]
        self._ids, self._kinds = (
            list(_chain(holder.mark[1][part][::order] for holder, order in zip(by_items, orders, strict=True)))
            for part in (0, 1)
        )
        known = {*map(id, by_version), *map(id, by_items), *map(id, functions)}
        self._others = [holder for holder in rest if id(holder) not in known]
        self._marks = [holder.mark for holder in self._others]
        self._version = root.mark[1] if root is not None and root not in rest else None
        # By version first those whose owners are asked for them in every call: children, and then objects.
        self._is_parent, self._parents, children = _children_of(root, by_version)
        asked = {*map(id, children)}
        owned = [holder for holder in (*by_version, *by_items) if holder.owner is not None and id(holder) not in asked]
        objects = [holder for holder in owned if type(holder.mark[1]) is int and _tells_dict(_owner_of(holder), holder)]
        self._objects: list[Any] = [holder.owner for holder in objects]
        self._classes = [type(_owner_of(holder)) for holder in (*children, *objects)]
        self._told = frozenset(id(holder.held) for holder in (*children, *objects))
        asked |= {*map(id, objects)}
        self._owners: list[Any] = [
            (holder.owner, holder.held, type(_owner_of(holder))) for holder in owned if id(holder) not in asked
        ]
        kept = [holder for holder in by_version if id(holder) not in asked]
        self._dicts = [holder.held for holder in kept]
        self._by_version = [*children, *objects, *kept]
        self._versions = [holder.mark[1] for holder in self._by_version]
        self._at: dict[int, list[int]] = {}  # by id of a holder, where its versions are
        for at, holder in enumerate(self._by_version):
            self._at.setdefault(id(holder), []).append(at)
        if versions.dict_version is None:  # which modules have other children is told by these themselves
            self._families: list[dict[str, Any]] = [holder.held for holder in filter(_has_children, holders)]
            self._is_family = root is not None and bool(_children(root.find()))
            self._below = self._children_below(root.find() if self._is_family else {})

    def holds(self, attributes: dict[str, Any]) -> bool:
        """True if nothing moved; `attributes` are the module's own. Changes nothing, so that no lock is needed."""
        version: Any = versions.dict_version
        try:
            if self._version is not None and version(attributes) != self._version:
                return False
            if version is None and not self.has_children(attributes):
                return False
            dicts = self._dicts
            if self._classes:
                objects = [owner() for owner in self._objects]
                parents = [attributes, *self._parents] if self._is_parent else self._parents
                found = gc.get_referents(*gc.get_referents(*map(_children, parents)), *objects)
                if found[1::2] != self._classes:
                    return False
                dicts = [*found[::2], *dicts]  # no two dicts ever have one version
            if dicts and list(map(version, dicts)) != self._versions:
                return False
            for owner, held, kind in self._owners:
                thing = owner()
                if type(thing) is not kind or own_dict(thing) is not held:
                    return False
            # Each as it is, past the equality of defaults.
            if self._functions and not all(map(operator.is_, _chain(map(parts_of_code, self._functions)), self._codes)):
                return False
            if self._boxes:
                items = gc.get_referents(*self._boxes)
                if list(map(id, items)) != self._ids or list(map(type, items)) != self._kinds:
                    return False
                if list(map(len, self._lists)) != self._lengths:
                    return False
        except Exception:  # what cannot be read has moved
            return False
        return not self._others or [holder.marked() for holder in self._others] == self._marks

    def has_children(self, attributes: dict[str, Any]) -> bool:
        """True if modules have the children that they had, as far as no version tells of these."""
        return versions.dict_version is not None or self._children_below(attributes) == self._below

    def _children_below(self, attributes: dict[str, Any]) -> list[int]:
        """Return the ids of all children of modules; `attributes` are the module's own."""
        families = [attributes, *self._families] if self._is_family else self._families
        return list(map(id, _chain(map(values_in_order, map(_children, families)))))

    def tells(self, dicts: Iterable[dict[str, Any]]) -> bool:
        """True if this compares these: that they are an object's own, its class, and their versions."""
        return self._told.issuperset(map(id, dicts))

    def moved(self, attributes: dict[str, Any]) -> list[Any]:
        """List the holders that moved, those with versions alone where these alone did."""
        version: Any = versions.dict_version
        if version is None:
            return self._moved_otherwise()
        later = copy.copy(self)
        later._versions = [version(holder.held) for holder in self._by_version]
        moved = {
            id(holder): holder
            for holder, now, before in zip(self._by_version, later._versions, self._versions, strict=True)
            if now != before
        }
        if self.root is not None and self._version is not None:
            later._version = version(attributes)
            if later._version != self._version:
                moved[id(self.root)] = self.root
        return list(moved.values()) if later.holds(attributes) else self._moved_otherwise()

    def _moved_otherwise(self) -> list[Any]:
        return [holder for holder in self.holders if holder.marked() != holder.mark]

    def renewed(self, renewed: Mapping[int, int]) -> Comparison:
        """Return the comparison with new versions of dicts, by the old ones; what it tells a reading stays told."""
        later = copy.copy(self)  # another thread may be comparing with this one
        later._versions = self._versions.copy()
        for at, version in enumerate(self._versions):
            if version in renewed:
                later._versions[at] = renewed[version]
                holder = self._by_version[at]
                holder.mark = holder.mark[0], renewed[version], *holder.mark[2:]
        before = self._version
        if before is not None and before in renewed:
            later._version = renewed[before]
            self.root.mark = self.root.mark[0], renewed[before], *self.root.mark[2:]
        return later

    def after(self, moved: Sequence[Any], key: Any) -> Comparison:
        """Return the comparison with these holders as they were read again."""
        known = self._at.keys() | ({id(self.root)} if self._version is not None else set())
        if any(id(holder) not in known or holder.buffers or type(holder.mark[1]) is not int for holder in moved):
            return Comparison(self.root, self.holders, key)
        later = copy.copy(self)  # another thread may be comparing with this one
        later.key, later.mark, later._versions = key, object(), self._versions.copy()
        for holder in moved:
            for at in self._at.get(id(holder), ()):
                later._versions[at] = holder.mark[1]
            if holder is self.root:
                later._version = holder.mark[1]
        return later


def _children_of(
    root: MarkedHolder | None, by_version: Sequence[MarkedHolder]
) -> tuple[bool, list[dict[str, Any]], list[MarkedHolder]]:
    """Find the modules of which all children tell their `__dict__`.

    Returns:
        True if the root is one, the attributes of the others, and the holders of all their children in this order.
    """
    own = {id(holder.held): holder for holder in by_version if holder.owner is not None}
    is_parent, parents, children = False, [], []
    for parent in [*([root] if root is not None else ()), *own.values()]:
        attributes = parent.find()
        registry = attributes.get("_modules")
        if registry and type(registry) is dict:
            found = [child for child in gc.get_referents(registry) if child is not None]
            holders = [holder for child in found if (holder := own.get(id(own_dict(child)))) is not None]
            if len(holders) == len(found) and all(map(_tells_dict, found, holders)):
                children += holders
                if parent is root:
                    is_parent = True
                else:
                    parents.append(attributes)
    return is_parent, parents, children


def _has_children(holder: MarkedHolder) -> bool:
    """True if a holder holds the attributes of a module that has children, and is not the root."""
    attributes = holder.held if holder.owner is not None and isinstance(holder.held, dict) else {}
    return isinstance(attributes.get("_modules"), dict) and bool(_children(attributes))


def _tells_dict(thing: Any, holder: MarkedHolder) -> bool:
    """True if the garbage collector sees an object hold what a holder of it does, and its class, and nothing else."""
    found = gc.get_referents(thing)
    is_told = thing is _owner_of(holder) and len(found) == 2
    return is_told and found[0] is holder.held and found[1] is type(thing)


def _owner_of(holder: MarkedHolder) -> Any:
    """Return the object whose attributes a holder holds; None if it is gone."""
    return None if holder.owner is None else holder.owner()
