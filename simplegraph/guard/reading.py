"""Compare a module's state with its earlier state at every call, by versions of dicts first and with little Python.

A `Reading` compares the tensors, modules, hooks and other objects that graphs read. A `Comparison` compares plain
values. A reading skips what a comparison, made for the same call just before, has compared already.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import gc
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from simplegraph.base.constants import WatchedValue, WatchedVersion
from simplegraph.base.modes import ANY_AUTOCAST
from simplegraph.base.objects import identity_hash, own_dict
from simplegraph.base.tensors import OwnedTensor, has_address, held_by_nobody, is_wrapper, parts
from simplegraph.base.walk import keys_in_order, slots_of, values_in_order
from simplegraph.guard import versions
from simplegraph.guard.links import (
    HOOKS,
    REGISTRIES,
    SETTINGS,
    AttributeEntries,
    Link,
    Slots,
    SlotValues,
    getter,
    split_links,
)
from simplegraph.program.snapshot import ABSENT

_READERS = tuple(map(operator.itemgetter, REGISTRIES))
_chain = itertools.chain.from_iterable
_get = object.__getattribute__  # past the object's own class
_is_inference_mode = torch.is_inference_mode_enabled  # looked up once
_is_same = operator.methodcaller("is_same")
_find = operator.methodcaller("find")
_is_released = operator.methodcaller("is_released")
_tensor_of = operator.attrgetter("tensor")
_grad = operator.attrgetter("grad")
_DICTS = itertools.repeat("__dict__")
_requires_grad = operator.attrgetter("requires_grad")
_layout: Callable[[Tensor], Any] = operator.attrgetter("shape", "dtype", "requires_grad")
_VIEWS: tuple[Callable[[Tensor], Any], ...] = (Tensor.stride, Tensor.is_neg, Tensor.is_conj)
# Compares types, shapes, strides and dtypes of many tensors in one call. Private to torch; without it, Python compares
# them. An instance is valid only in the dispatch state in which it was made.
_TensorGuards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

# Compares the addresses of many tensors in one call. Private to torch, and only in builds with CUDA.
_same_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)
_children = operator.itemgetter("_modules")
FEW_TENSORS = 48  # whose addresses are compared in the time that an allocator takes to say if it returned memory
_CPU = torch.device("cpu")
_HOLDS_NOTHING = frozenset({str, int, float, bool, type(None)})
_ITERATED = frozenset({list, set})  # classes whose referents for the garbage collector are exactly their items
_IS_LAST_FIRST = gc.get_referents([0, 1]) == [1, 0]  # True if the collector lists the last item of a list first


def _is_allocated(tensor: Tensor) -> bool:
    """True if torch's allocator made the memory of a tensor: not another library, or another process."""
    return has_address(tensor) and bool(tensor.untyped_storage().resizable())


def _values_of(*registries: dict[str, Any]) -> list[Any]:
    """Return the values in registries."""
    return list(_chain(map(dict.values, registries)))


def _ordered_values_of(*registries: dict[str, Any]) -> list[Any]:
    """Return the values in registries, in an order that `move_to_end` changes."""
    return list(_chain(map(values_in_order, registries)))


class _Sources(NamedTuple):
    """The dicts and containers that a reading reads, except the attributes of the module itself.

    Attributes:
        attributes: the attributes of each submodule.
        filled: the attributes of submodules that have parameters, of those that have buffers, and of those that have
            children.
        empty: empty registries.
        leading: slots that lead to tensors and modules; None if there are none.
        values: the values of all other slots, grouped by the attribute or the container that leads to them.
        entries: the expected attributes of modules, in the order in which the modules are read, and their dicts.
        uncovered: the mark of the latest comparison, followed by those of `values` that it does not cover.
    """

    attributes: list[dict[str, Any]]
    filled: list[list[dict[str, Any]]]
    empty: list[dict[str, Any]]
    leading: Slots | None
    values: list[SlotValues]
    entries: list[tuple[AttributeEntries, dict[str, Any] | None]]
    uncovered: list[Any]


class Reading:
    """Compares the tensors, modules, hooks and other objects of a module with those at the reading's construction.

    Settings, functions and modes are read again only if the version of a module's attributes changed, and only if the
    call's `Comparison` does not cover them. Tensors are read at every call, since they may be moved without a change of
    the dict that holds them.

    A reading keeps the dicts of submodules alive, but no tensor. Once a submodule is gone, the reading releases
    everything, and `same` returns False from then on.

    Args:
        modules: the module first, then everything below it.
        links: chains of links to objects that are compared beside parameters, buffers, children and hooks.
        owned: tensors without another known owner.
        watched: tensors whose values are compared.
        carried_places: places, as (id of the dict, key), in which runs leave tensors: their values do not count.
        with_gradients: ids of tensors whose gradients are compared as well.

    Attributes:
        shows_releases: True if there are many tensors, all in the memory of one device's allocator: to ask it if it
            returned memory to the device takes less time than to compare their addresses.
        cache_releases: what the allocator said before the tensors were last found in place.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        links: Iterable[Sequence[Link]],
        owned: Sequence[OwnedTensor] = (),
        watched: Sequence[WatchedValue | WatchedVersion] = (),
        carried_places: Collection[tuple[int, str]] = (),
        with_gradients: Collection[int] = (),
    ) -> None:
        root, *children = modules
        below = [vars(child) for child in children]
        hooks: list[dict[int, Any]] = [vars(module)[name] for module in modules for name in HOOKS]
        self._empty_hooks = [registry for registry in hooks if not registry]
        self._hooks = [registry for registry in hooks if registry]
        self._hooks_before = [registry.copy() for registry in self._hooks]  # of their class, which may count the order
        self._handles = RemovableHandle.next_id
        self._owned, self._watched = owned, watched
        self._kinds = list({type(module): None for module in modules if not issubclass(type(module), ScriptModule)})
        self._forwards = [kind.forward for kind in self._kinds]
        entries, leading, to_values = split_links(modules, links)
        self._versions: list[int] | None = None  # versions of all attributes when they were last read
        self._own_version = 0  # version of the module's own attributes
        self._covered_by: object = None  # the mark of a comparison that compares all these versions itself
        self._moment: object = None  # the moment of the clock of versions when everything was last read and compared
        attributes = [vars(root), *below]
        slots = Slots(attributes, leading) if leading else None
        # No comparison covers the objects that a function reaches, so they are one group.
        of_modules = set(map(id, attributes))
        below_one: dict[tuple[int, Any], list[Sequence[Link]]] = {}
        for chain in to_values:
            holder, key, _ = chain[0]
            below_one.setdefault((id(holder), key if id(holder) in of_modules else None), []).append(chain)
        values_of_slots = [SlotValues(attributes, chains) for chains in below_one.values()]
        # The registries of TorchScript modules are no dicts: links lead to their tensors.
        with_registries = [vars(child) for child in children if not issubclass(type(child), ScriptModule)]
        filled = [[attributes for attributes in with_registries if attributes[name]] for name in REGISTRIES]
        empty = [attributes[name] for attributes in with_registries for name in REGISTRIES if not attributes[name]]
        self._sources = [_Sources(below, filled, empty, slots, values_of_slots, [(entries[0], None)], [None])]
        sources = self._sources  # cleared once a submodule is gone
        self._deaths = [weakref.ref(module, lambda _: sources.clear()) for module in modules]
        registries = self._registries(vars(root))
        # Reordering an OrderedDict does not change its version.
        has_orders = any(issubclass(type(registry), collections.OrderedDict) for registry in registries)
        self._keys: Callable[[Any], Iterable[Any]] = keys_in_order if has_orders else dict.keys
        self._names = list(map(list, map(self._keys, registries)))
        self._filled: list[int] | None = None  # versions of registries when they were last read
        plainly = list(map(id, _values_of(*registries)))
        is_quick = list(map(id, gc.get_referents(*registries))) == plainly  # of dicts of a class, or other keys, not
        self._values_of: Callable[..., list[Any]] = gc.get_referents if is_quick else _values_of
        if has_orders:
            self._values_of = _ordered_values_of
        self._with_gradients_at: Callable[[Any], Sequence[Tensor]] | None = None
        values, self._lengths = self._read(vars(root))
        if with_gradients:
            self._with_gradients_at = getter([at for at, value in enumerate(values) if id(value) in with_gradients])
            values += map(_grad, self._with_gradients_at(values))
        registered = self._lengths[0]
        places = [
            (id(registry), name) for registry, names in zip(registries, self._names, strict=True) for name in names
        ]
        ignored = {at for at, place in enumerate(places) if place in carried_places}
        tensors = [
            at
            for at, value in enumerate(values)
            if at not in ignored and issubclass(type(value), Tensor) and (is_wrapper(value) or has_address(value))
        ]
        # Containers are compared by their length and their slots, not by identity.
        opened = {registered + at for at in slots.opened} if slots is not None else set()
        others = sorted(set(range(len(values))) - set(tensors) - ignored - opened)
        numbers = [at for at in others if type(values[at]) in SETTINGS]
        modules_at = [at for at in others if issubclass(type(values[at]), nn.Module)]
        others = sorted(set(others) - {*numbers, *modules_at})
        self._tensors_at, self._others_at, self._numbers_at = map(getter, (tensors, others, numbers))
        self._numbers = self._numbers_at(values)
        self._number_types = list(map(type, self._numbers))
        self._anchors = self._others_at(values)  # kept alive, so that their ids are not reused
        self._ids = list(map(identity_hash, self._anchors))
        self._modules_at = getter(modules_at)
        held_modules = self._modules_at(values)
        by_dict: dict[int, tuple[AttributeEntries, dict[str, Any] | None]] = {
            id(attributes): (entry, attributes) for entry, attributes in zip(entries[1:], below, strict=True)
        }
        by_dict[id(vars(root))] = entries[0], None  # not kept alive: a child may hold the module itself
        # For a module that another thread added since the survey: it never holds, which leads to another survey.
        added = AttributeEntries({}, ()), None
        self._sources[0].entries.extend(by_dict.get(id(_get(module, "__dict__")), added) for module in held_modules)
        self._wraps = any(map(is_wrapper, (*(values[at] for at in tensors), *map(_tensor_of, owned))))
        self._is_more = self._wraps or bool(owned)
        live = self._of(values)
        self._addresses = list(map(Tensor.data_ptr, live))
        self.shows_releases = len(live) > FEW_TENSORS and all(map(_is_allocated, live))
        self.shows_releases &= len({tensor.device for tensor in live} - {_CPU}) < 2
        self.cache_releases: Hashable = None
        self._indices = list(range(len(live)))
        # `_TensorGuards` accepts each tensor once only; tied weights and parameters of optimizers come twice.
        first = {id(tensor): at for at, tensor in reversed(list(enumerate(live)))}
        again = [at for at, tensor in enumerate(live) if first[id(tensor)] != at]
        self._is_again = bool(again)
        self._again, self._first = getter(again), getter([first[id(live[at])] for at in again])
        self._once = getter(sorted(first.values()))
        once = self._once(live)
        self._layouts, self._views = list(map(_layout, once)), [list(map(read, once)) for read in _VIEWS]
        self._checks: dict[tuple[bool, bool], Any] = {}

    def _read(self, attributes: dict[str, Any]) -> tuple[list[Any], list[int]]:
        """Read everything that has no version: the values, and the lengths of containers.

        May raise if a place is gone.
        """
        values = self._values_of(*self._registries(attributes))
        lengths = [len(values)]
        sources = self._sources[0]
        if sources.leading is not None:
            lengths += map(len, sources.leading.read([attributes, *sources.attributes], values))
        if self._with_gradients_at is not None:
            values += map(_grad, self._with_gradients_at(values))
        return values, lengths

    def _registries(self, attributes: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the module's own registries, and those registries of submodules that were not empty."""
        return [*map(attributes.__getitem__, REGISTRIES), *_chain(map(map, _READERS, self._sources[0].filled))]

    def _of(self, values: list[Any]) -> Sequence[Tensor]:
        tensors = self._tensors_at(values)
        if self._owned:
            tensors = (*tensors, *map(_tensor_of, self._owned))
        return tuple(part for tensor in tensors for part in parts(tensor)) if self._wraps else tensors

    def requires_grad(self, attributes: dict[str, Any]) -> bool | None:
        """True if a compared tensor requires grad now; None if this cannot be read."""
        try:
            values, lengths = self._read(attributes)
            return any(map(_requires_grad, self._of(values))) if lengths == self._lengths else None
        except Exception:  # a survey finds the cause
            return None

    def tensors(self, attributes: dict[str, Any]) -> Sequence[Any] | None:
        """Read the module, and compare its tensors: where they are, and their layouts.

        If this returns a value, a graph may be launched: every address that it reads is still valid. The registries are
        read here as in `_read`, which would be one more call at every replay.

        Returns:
            What `same` needs; None if a tensor was moved, replaced or laid out anew, or cannot be read.
        """
        try:
            sources = self._sources[0]
            registries = [*map(attributes.__getitem__, REGISTRIES), *_chain(map(map, _READERS, sources.filled))]
            values = self._values_of(*registries)
            lengths = [len(values)]
            if sources.leading is not None:
                lengths += map(len, sources.leading.read([attributes, *sources.attributes], values))
            if lengths != self._lengths:
                return None
            if self._with_gradients_at is not None:
                values += map(_grad, self._with_gradients_at(values))
            tensors = self._of(values) if self._is_more else self._tensors_at(values)
            if _same_addresses is not None:
                if not _same_addresses(list(tensors), self._addresses, self._indices):
                    return None
            elif list(map(Tensor.data_ptr, tensors)) != self._addresses:
                return None
            if self._is_again:
                if not all(map(operator.is_, self._again(tensors), self._first(tensors))):
                    return None
                tensors = self._once(tensors)
            check = self._checks.get((_is_inference_mode(), ANY_AUTOCAST()))
            is_same = check.check(*tensors) if check is not None else self._same_layouts(tensors)
            return (registries, values) if is_same else None
        except Exception:  # a survey finds the cause
            return None

    def same(
        self, attributes: dict[str, Any], comparison: Comparison | None = None, read: Sequence[Any] | None = None
    ) -> bool:
        """True if nothing changed. State that cannot be read counts as changed.

        Args:
            attributes: the module's own attributes.
            comparison: the comparison that held for this call; None if there is none.
            read: what `tensors` returned for this call; None to compare them now.
        """
        try:
            sources = self._sources[0]
            version: Any = versions.dict_version
            if any(sources.empty) or self._hooks != self._hooks_before:
                return False
            if self._owned and any(map(_is_released, held_by_nobody(self._owned))):
                return False
            if RemovableHandle.next_id != self._handles:  # a hook was registered somewhere
                if any(self._empty_hooks):
                    return False
                self._handles = RemovableHandle.next_id
            moment = None if comparison is None else comparison.moment
            is_quiet = moment is not None and moment is self._moment  # no dict whose version was taken has changed
            # What is noted for a moment must be read after it.
            if read is None or not (is_quiet or moment is None):
                read = self.tensors(attributes)
            if read is None:
                return False
            registries, values = read
            mark, *uncovered_before = sources.uncovered
            is_new = comparison is None or comparison.mark is not mark
            uncovered: list[SlotValues] = []
            for slot_values in sources.values if is_new else uncovered_before:
                containers = slot_values.containers_if_same([attributes, *sources.attributes])
                if containers is None:
                    return False
                if is_new and comparison is not None and not comparison.covers(containers, attributes):
                    uncovered.append(slot_values)
            if is_new and comparison is not None:
                sources.uncovered[:] = comparison.mark, *uncovered
            if not is_quiet:
                # Names are compared, too: two parameters may have swapped their names.
                filled = None if version is None or self._keys is keys_in_order else list(map(version, registries))
                if filled is None or filled != self._filled:
                    if list(map(list, map(self._keys, registries))) != self._names:
                        return False
                    self._filled = filled
            if is_quiet and sources.leading is None and self._with_gradients_at is None:
                pass  # all other values are in registries, and no dict changed
            elif self._ids and list(map(identity_hash, self._others_at(values))) != self._ids:
                return False
            elif self._numbers:
                numbers = self._numbers_at(values)  # types are compared first: a one-element tensor may equal a number
                if list(map(type, numbers)) != self._number_types or numbers != self._numbers:
                    return False
            is_covered = (
                comparison is not None
                and comparison.mark is self._covered_by
                and version(attributes) == self._own_version
            )
            if not is_covered and not self._look(attributes, self._modules_at(values), comparison):
                return False
            if self._watched and not all(map(_is_same, self._watched)):
                return False
            if [kind.forward for kind in self._kinds] != self._forwards:
                return False
            if not is_quiet and self._filled is not None:
                self._moment = moment
            return True
        except Exception:  # a survey finds the cause
            return False

    def renew(self, renewed: Mapping[int, int]) -> None:
        """Replace versions of dicts: `renewed` maps old versions to new ones."""
        if self._versions is not None:
            self._versions = [renewed.get(version, version) for version in self._versions]
        if self._filled is not None:
            self._filled = [renewed.get(version, version) for version in self._filled]
        self._own_version = renewed.get(self._own_version, self._own_version)

    def _look(self, attributes: dict[str, Any], modules: Sequence[nn.Module], comparison: Comparison | None) -> bool:
        """Compare the attributes of modules whose version changed, and note the versions.

        The classes of modules are not compared here: a `Comparison` has them. No two dicts ever have the same version,
        so versions identify the modules, too. Versions are taken before anything is read, since another thread may
        write meanwhile.
        """
        dicts, before = [attributes, *map(_get, modules, _DICTS)], self._versions
        taken = None if versions.dict_version is None else list(map(versions.dict_version, dicts))
        for at, ((entries, expected), actual) in enumerate(zip(self._sources[0].entries, dicts, strict=True)):
            if taken is not None and before is not None and taken[at] == before[at]:
                continue
            if (expected is not None and expected is not actual) or not entries.hold(actual):
                return False
        self._versions = taken
        # Reordering an OrderedDict does not change its version.
        has_orders = self._values_of is not gc.get_referents
        if taken is not None and comparison is not None and not has_orders and comparison.covers_versions(dicts[1:]):
            self._own_version, self._covered_by = taken[0], comparison.mark
        return True

    def _same_layouts(self, tensors: Sequence[Tensor]) -> bool:
        """Compare the layouts of tensors in Python, and prepare a faster check for the next call."""
        views = [list(map(read, tensors)) for read in _VIEWS]
        if list(map(_layout, tensors)) != self._layouts or views != self._views:
            return False
        if _TensorGuards is not None and tensors:
            check = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self._checks[_is_inference_mode(), ANY_AUTOCAST()] = check
        return True


class MarkedHolder(Protocol):
    """Holds plain values, and has a mark that changes if a value does; see `ValueHolder`."""

    container: Any
    owner: Callable[[], Any] | None
    cell: types.CellType | None
    function: types.FunctionType | None
    variable: Callable[[], contextvars.ContextVar[Any]] | None
    is_wide: bool
    buffers: list[Any]
    mark: Any

    def find(self) -> Any: ...

    def marked(self) -> Any: ...


class Comparison:
    """Compares the plain values of holders with their earlier values, with as little Python as possible.

    It reads the class and `__dict__` of children and objects by the garbage collector, which is much faster than by
    Python.

    Args:
        root: the holder of the module's own attributes, which are not kept alive; None for a function.
        holders: all holders.
        key: the key of the values; None if it was not made yet.

    Attributes:
        mark: an object that identifies the comparison without keeping it alive.
        moment: the moment of `versions.clock` when the comparison last held; None without a clock.
    """

    def __init__(self, root: Any, holders: Sequence[Any], key: Any) -> None:
        self.root, self.holders, self.key, self.mark = root, holders, key, object()
        compared = [
            holder for holder in holders if holder is not root or versions.dict_version is None or holder.buffers
        ]
        by_version = [
            holder
            for holder in compared
            if issubclass(type(holder.container), dict) and type(holder.mark[1]) is int and not holder.buffers
        ]
        quick = [holder for holder in compared if not (holder.is_wide or holder.buffers)]
        by_items = [
            holder
            for holder in quick
            if type(holder.container) in _ITERATED or (type(holder.container) is dict and not holder.container)
        ]
        self._lists = [holder.container for holder in by_items]
        self._lengths = list(map(len, self._lists))
        # An empty cell has no item: if it took the value of the next cell, all items would be the same as before.
        by_items += (holder for holder in quick if holder.cell is not None and holder.mark[1][0])
        functions = [holder for holder in quick if holder.function is not None]
        self._functions = [holder.function for holder in functions]
        self._code_parts = gc.get_referents(*self._functions)  # code and defaults among them
        self._boxes = [holder.container if holder.cell is None else holder.cell for holder in by_items]
        orders = [-1 if _IS_LAST_FIRST and type(holder.container) is list else 1 for holder in by_items]
        ids, kinds = (
            list(_chain(holder.mark[1][part][::order] for holder, order in zip(by_items, orders, strict=True)))
            for part in (0, 1)
        )
        viewed = (holder for holder in quick if holder.owner is not None and holder.container is None)
        slotted = [holder for holder in viewed if _shows_slots(holder)]
        variables = [holder for holder in quick if holder.variable is not None]
        self._slotted: list[Any] = [holder.owner for holder in slotted]
        self._variables: list[Any] = [holder.variable for holder in variables]
        self._no_attributes = [entries for holder in slotted if (entries := own_dict(_owner_of(holder))) is not None]
        # Holders whose values changed meanwhile are compared by their mark.
        by_values = [holder for holder in (*slotted, *variables) if holder.marked() == holder.mark]
        compared_ids = {*map(id, by_version), *map(id, by_items), *map(id, functions), *map(id, by_values)}
        others = [holder for holder in compared if id(holder) not in compared_ids]
        # Dicts that are not kept alive, but found again at each call. If a dict whose version is compared holds them,
        # they are the same while the clock stands still. Otherwise another dict may take their place and their id,
        # which the clock does not show. A weak reference shows the end of an OrderedDict; its order is read each time.
        found = [
            holder
            for holder in others
            if _has_version(holder) and holder.owner is None and not (holder.buffers or holder.is_wide)
        ]
        holding = (*by_version, *found, *([root] if root is not None else ())) if found else ()
        held = set(map(identity_hash, gc.get_referents(*map(_find, holding))))
        ordered = [holder for holder in found if type(holder.mark[1]) is tuple]
        self._by_clock = [holder for holder in found if holder in ordered or identity_hash(holder.find()) in held]
        self._others = [holder for holder in others if holder not in self._by_clock]
        self._marks, self._clock_marks = ([holder.mark for holder in group] for group in (self._others, self._by_clock))
        self._orders = [weakref.ref(holder.find()) for holder in ordered]
        self._reads_more = bool(slotted or variables or ordered)
        items = gc.get_referents(*self._boxes) + (self._other_items() if self._reads_more else [])
        ids += map(identity_hash, items[len(ids) :])
        kinds += map(type, items[len(kinds) :])
        # Values that refer to nothing else are kept alive, and compared by identity without a hash.
        is_read = list(map(identity_hash, items)) == ids and list(map(type, items)) == kinds
        plain_at = [at for at, kind in enumerate(kinds) if is_read and kind in _HOLDS_NOTHING]
        self._kept_at, self._hashed_at = getter(plain_at), getter(sorted({*range(len(ids))} - {*plain_at}))
        self._kept = self._kept_at(items)
        self._ids, self._kinds, self._number = self._hashed_at(ids), self._hashed_at(kinds), len(ids)
        self._containers = frozenset(id(holder.container) for holder in compared if not holder.is_wide) - {id(None)}
        self._version = root.mark[1] if root is not None and root not in compared else None
        # Dicts compared by version: first those whose owners are read at every call, of children and then of objects.
        self._is_parent, self._parents, children = _children_of(root, by_version)
        covered = {*map(id, children)}
        owned = [
            holder for holder in (*by_version, *by_items) if holder.owner is not None and id(holder) not in covered
        ]
        objects = [holder for holder in owned if type(holder.mark[1]) is int and _shows_dict(_owner_of(holder), holder)]
        self._objects: list[Any] = [holder.owner for holder in objects]
        self._classes = [type(_owner_of(holder)) for holder in (*children, *objects)]
        self._covered_ids = frozenset(id(holder.container) for holder in (*children, *objects))
        covered |= {*map(id, objects)}
        self._owners: list[Any] = [
            (holder.owner, holder.container, type(_owner_of(holder))) for holder in owned if id(holder) not in covered
        ]
        kept = [holder for holder in by_version if id(holder) not in covered]
        self._dicts = [holder.container for holder in kept]
        self._by_version = [*children, *objects, *kept]
        self._versions = [holder.mark[1] for holder in self._by_version]
        self._covered_dicts = [holder.container for holder in (*children, *objects)]
        self.moment: object = None
        self._at: dict[int, list[int]] = {}  # id of a holder -> the indices of its versions
        for at, holder in enumerate(self._by_version):
            self._at.setdefault(id(holder), []).append(at)
        if versions.dict_version is None:  # then the children of modules are compared themselves
            self._families: list[dict[str, Any]] = [holder.container for holder in filter(_has_children, holders)]
            self._is_family = root is not None and bool(_children(root.find()))
            self._below = self._children_below(root.find() if self._is_family else {})

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
            is_quiet = moment is not None and moment is self.moment
            if self._version is not None and version(attributes) != self._version:
                return False
            if version is None and not self.has_children(attributes):
                return False
            dicts = self._dicts
            if self._classes:
                objects = [owner() for owner in self._objects]
                parents = [attributes, *self._parents] if self._is_parent else self._parents
                referents = gc.get_referents(*gc.get_referents(*map(_children, parents)), *objects)
                if referents[1::2] != self._classes:
                    return False
                if is_quiet:
                    if not all(map(operator.is_, referents[::2], self._covered_dicts)):
                        return False
                else:
                    dicts = [*referents[::2], *dicts]  # no two dicts ever have the same version
            if not is_quiet and dicts and list(map(version, dicts)) != self._versions:
                return False
            for owner, container, kind in self._owners:
                thing = owner()
                if type(thing) is not kind or own_dict(thing) is not container:
                    return False
            if self._functions:
                code_parts = gc.get_referents(*self._functions)
                # By identity, past the ``__eq__`` of defaults.
                if len(code_parts) != len(self._code_parts) or not all(map(operator.is_, code_parts, self._code_parts)):
                    return False
            if self._number or self._lists:
                items = gc.get_referents(*self._boxes)
                if self._reads_more:
                    items += self._other_items()
                if len(items) != self._number or not all(map(operator.is_, self._kept_at(items), self._kept)):
                    return False
                hashed = self._hashed_at(items)
                if tuple(map(identity_hash, hashed)) != self._ids or tuple(map(type, hashed)) != self._kinds:
                    return False
                if list(map(len, self._lists)) != self._lengths:
                    return False
            if any(self._no_attributes):
                return False
        except Exception:  # a value that cannot be read counts as changed
            return False
        if not is_quiet and [holder.marked() for holder in self._by_clock] != self._clock_marks:
            return False
        if self._others and [holder.marked() for holder in self._others] != self._marks:
            return False
        self.moment = moment
        return True

    def has_children(self, attributes: dict[str, Any]) -> bool:
        """True if modules have the same children; for Python releases on which versions do not show that."""
        return versions.dict_version is not None or self._children_below(attributes) == self._below

    def _children_below(self, attributes: dict[str, Any]) -> list[int]:
        """Return the ids of all children of modules; `attributes` are the module's own."""
        families = [attributes, *self._families] if self._is_family else self._families
        return list(map(id, _chain(map(values_in_order, map(_children, families)))))

    def _other_items(self) -> list[Any]:
        """Read the slots of objects, by the garbage collector; context variables; and the order of dicts."""
        values = gc.get_referents(*[owner() for owner in self._slotted])
        values += map(contextvars.ContextVar.get, [find() for find in self._variables], itertools.repeat(ABSENT))
        return values + list(_chain(map(keys_in_order, [container() for container in self._orders])))

    def covers(self, containers: Iterable[Any], attributes: dict[str, Any]) -> bool:
        """True if all values in these containers are compared; `attributes` are the module's own."""
        by_own_version = attributes if self._version is not None else None
        return all(
            container is by_own_version or id(container) in self._containers or issubclass(type(container), tuple)
            for container in containers
        )

    def covers_versions(self, dicts: Iterable[dict[str, Any]]) -> bool:
        """True if the versions of these dicts are compared, and the owner of each dict and its class."""
        return self._covered_ids.issuperset(map(id, dicts))

    def moved(self, attributes: dict[str, Any]) -> list[Any]:
        """List the holders whose values changed; if all others are unchanged, only those with versions are compared."""
        version: Any = versions.dict_version
        if version is None:
            return self._moved_otherwise()
        later = copy.copy(self)
        later._versions = [version(holder.container) for holder in self._by_version]
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
        """Return the comparison with versions replaced by new ones; its mark stays valid for a reading."""
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
        """Return the comparison for the values after these holders were read again."""
        versioned = self._at.keys() | ({id(self.root)} if self._version is not None else set())
        if any(id(holder) not in versioned or holder.buffers or type(holder.mark[1]) is not int for holder in moved):
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


def _has_children(holder: MarkedHolder) -> bool:
    """True if a holder has the attributes of a module with children, other than the root."""
    attributes = holder.container if holder.owner is not None and isinstance(holder.container, dict) else {}
    return isinstance(attributes.get("_modules"), dict) and bool(_children(attributes))


def _shows_dict(thing: Any, holder: MarkedHolder) -> bool:
    """True if an object shows exactly two referents to the garbage collector: its holder's dict, and its class."""
    referents = gc.get_referents(thing)
    is_shown = thing is _owner_of(holder) and len(referents) == 2
    return is_shown and referents[0] is holder.container and referents[1] is type(thing)


def _owner_of(holder: MarkedHolder) -> Any:
    """Return the object whose attributes a holder has; None if it is gone."""
    return None if holder.owner is None else holder.owner()


def _has_version(holder: MarkedHolder) -> bool:
    """True if the mark of a holder contains the version of a dict."""
    return type(holder.mark[1][0] if type(holder.mark[1]) is tuple else holder.mark[1]) is int


def _shows_slots(holder: MarkedHolder) -> bool:
    """True if an object has only slots, and shows all their values to the garbage collector."""
    if holder.mark is None or holder.mark[0] is not False:
        return False
    thing, values = _owner_of(holder), holder.find()
    if own_dict(thing) or len(slots_of(type(thing))) != len(values):
        return False
    # Slots in C may hold plain numbers, which the collector does not see, and read as None if empty.
    shown = collections.Counter(map(id, gc.get_referents(thing)))
    return collections.Counter(map(id, values.values())) <= shown
