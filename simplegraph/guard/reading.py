"""Compare a module's state with its earlier state at every call, by versions of dicts first and with little Python.

A `Reading` compares the tensors, modules, hooks and other objects that graphs read. It skips what a `Comparison` of
plain values, made for the same call just before, has compared already.
"""

from __future__ import annotations

import collections
import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule
from torch.utils.hooks import RemovableHandle

from simplegraph.base.constants import WatchedValue, WatchedVersion
from simplegraph.base.modes import ANY_AUTOCAST
from simplegraph.base.objects import identity_hash
from simplegraph.base.tensors import OwnedTensor, has_address, held_by_nobody, is_wrapper, parts
from simplegraph.base.walk import keys_in_order, values_in_order
from simplegraph.guard import versions
from simplegraph.guard.comparison import Comparison
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

_READERS = tuple(map(operator.itemgetter, REGISTRIES))
_chain = itertools.chain.from_iterable
_get = object.__getattribute__  # past the object's own class
_is_inference_mode = torch.is_inference_mode_enabled  # looked up once
_is_same = operator.methodcaller("is_same")
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
FEW_TENSORS = 48  # whose addresses are compared in the time that an allocator takes to say if it returned memory
_CPU = torch.device("cpu")


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
