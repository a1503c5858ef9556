"""Check at every call that a module's state is as before, by versions of dicts first and with little Python.

A `Reading` checks the tensors, modules, hooks and other objects that graphs read. It skips what a `ValueCheck`, made
for the same call just before, has checked already.
"""

from __future__ import annotations

import collections
import gc
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

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
from simplegraph.guard.value_check import ValueCheck

_READERS = tuple(map(operator.itemgetter, REGISTRIES))
_chain = itertools.chain.from_iterable
_get = object.__getattribute__  # past the object's own class
_is_inference_mode = torch.is_inference_mode_enabled  # looked up once
_is_same = operator.methodcaller("is_same")
_is_released = operator.methodcaller("is_released")
_tensor_of = operator.attrgetter("tensor")
_called = operator.attrgetter("__call__", "forward")  # the methods of a module's class that a call enters
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

# The entries that the attributes of a module must have, and its dict; None if the dict is not kept alive.
_ModuleEntries = tuple[AttributeEntries, "dict[str, Any] | None"]


class _Sources:
    """The dicts and containers that a reading reads, except the attributes of the module itself.

    Args:
        modules: the module first, then everything below it.
        leading: chains of links to tensors and modules.
        to_values: chains of links to all other slots.

    Attributes:
        attributes: the attributes of each submodule.
        filled: the attributes of submodules that have parameters, of those that have buffers, and of those that have
            children.
        empty: empty registries.
        leading: slots that lead to tensors and modules; None if there are none.
        values: the values of all other slots, grouped by the attribute or the container that leads to them.
        entries: the expected attributes of modules, in the order in which the modules are read.
        unchecked: the token of the latest value check, followed by those of `values` that it does not check.
    """

    def __init__(
        self, modules: Sequence[nn.Module], leading: list[Sequence[Link]], to_values: Iterable[Sequence[Link]]
    ) -> None:
        root, *children = modules
        self.attributes = [vars(child) for child in children]
        # The registries of TorchScript modules are no dicts: links lead to their tensors.
        with_registries = [vars(child) for child in children if not issubclass(type(child), ScriptModule)]
        self.filled = [[attributes for attributes in with_registries if attributes[name]] for name in REGISTRIES]
        self.empty = [attributes[name] for attributes in with_registries for name in REGISTRIES if not attributes[name]]
        of_modules = [vars(root), *self.attributes]
        self.leading = Slots(of_modules, leading) if leading else None
        self.values = [SlotValues(of_modules, chains) for chains in _chains_by_start(of_modules, to_values)]
        self.entries: list[_ModuleEntries] = []
        self.unchecked: list[Any] = [None]

    def forget(self, _: object = None) -> None:
        """Release everything once a submodule is gone: reading an attribute raises then, which counts as a change."""
        vars(self).clear()


def _chains_by_start(
    attributes: list[dict[str, Any]], chains: Iterable[Sequence[Link]]
) -> Iterable[list[Sequence[Link]]]:
    """Group chains of links by the attribute of a module, or else by the container, at which they begin.

    No value check includes the objects that a function reaches, so they are one group.
    """
    of_modules = set(map(id, attributes))
    groups: dict[tuple[int, Any], list[Sequence[Link]]] = {}
    for chain in chains:
        holder, key, _ = chain[0]
        groups.setdefault((id(holder), key if id(holder) in of_modules else None), []).append(chain)
    return groups.values()


def _entries_in_order(
    modules: Sequence[nn.Module], entries: Sequence[AttributeEntries], held: Iterable[nn.Module]
) -> list[_ModuleEntries]:
    """List the expected attributes of the first module, and then of each module that registries and slots hold.

    Args:
        modules: all modules.
        entries: the expected attributes of each of them.
        held: the modules in the order in which they are read at every call; a shared one comes more than once.
    """
    by_dict: dict[int, _ModuleEntries] = {
        id(vars(module)): (expected, vars(module)) for module, expected in zip(modules, entries, strict=True)
    }
    root = by_dict[id(vars(modules[0]))] = entries[0], None  # not kept alive: a child may hold the module itself
    # For a module that another thread added since the survey: it never holds, which leads to another survey.
    added = AttributeEntries({}, ()), None
    return [root, *(by_dict.get(id(_get(module, "__dict__")), added) for module in held)]


class _RegistryReader:
    """Reads registries: their values at every call, and their names after a change.

    Attributes:
        has_orders: True if there is an OrderedDict: reordering it does not change its version.
        values_of: returns the values in registries.
        names_of: returns the names in a registry.
        names: the expected names in each registry.
    """

    def __init__(self, registries: Sequence[dict[str, Any]]) -> None:
        self.has_orders = any(issubclass(type(registry), collections.OrderedDict) for registry in registries)
        self.names_of: Callable[[Any], Iterable[Any]] = keys_in_order if self.has_orders else dict.keys
        self.names = list(map(list, map(self.names_of, registries)))
        self.values_of: Callable[..., list[Any]] = _ordered_values_of if self.has_orders else _values_of
        plainly = list(map(id, _values_of(*registries)))
        # Not for dicts of a class, or with other keys.
        if not self.has_orders and list(map(id, gc.get_referents(*registries))) == plainly:
            self.values_of = gc.get_referents


def _values_of(*registries: dict[str, Any]) -> list[Any]:
    """Return the values in registries."""
    return list(_chain(map(dict.values, registries)))


def _ordered_values_of(*registries: dict[str, Any]) -> list[Any]:
    """Return the values in registries, in an order that `move_to_end` changes."""
    return list(_chain(map(values_in_order, registries)))


class _ExpectedValues:
    """Divides the values that a reading reads, and keeps those that are no tensors and modules.

    Args:
        values: all values that are read.
        unguarded: the indices of values that are not guarded.
        opened: the indices of containers. Their length and their slots are checked, not their identity.

    Attributes:
        tensors_at: returns the tensors that have an address.
        modules_at: returns the modules.
        numbers_at: returns numbers and other settings.
        numbers: the expected numbers.
        number_types: their types.
        others_at: returns all other values.
        others: the expected other values; kept alive, so that their ids are not reused.
        ids: their ids.
    """

    def __init__(self, values: list[Any], unguarded: Collection[int], opened: Collection[int]) -> None:
        guarded = [at for at in range(len(values)) if at not in unguarded]
        tensors = {
            at
            for at in guarded
            if issubclass(type(values[at]), Tensor) and (is_wrapper(values[at]) or has_address(values[at]))
        }
        rest = [at for at in guarded if at not in tensors and at not in opened]
        numbers = [at for at in rest if type(values[at]) in SETTINGS]
        modules = [at for at in rest if issubclass(type(values[at]), nn.Module)]
        self.tensors_at = getter(sorted(tensors))
        self.modules_at = getter(modules)
        self.numbers_at = getter(numbers)
        self.numbers = self.numbers_at(values)
        self.number_types = list(map(type, self.numbers))
        self.others_at = getter(sorted(set(rest) - {*numbers, *modules}))
        self.others = self.others_at(values)
        self.ids = list(map(identity_hash, self.others))


class _ExpectedTensors:
    """Says where tensors are expected to be, and their layouts. Keeps no tensor alive.

    Args:
        tensors: the tensors in the order in which they are read at every call.

    Attributes:
        addresses: their addresses.
        indices: the index of each address, which `_same_addresses` takes.
        is_again: True if a tensor comes more than once.
        again: returns the tensors that came before.
        first: returns, for each of `again`, the tensor at its first place.
        once: returns each tensor once.
        layouts: the shape, dtype and need of a gradient of each tensor, once.
        views: their strides, and if they are negated or conjugated.
        checks: by (inference mode, autocast), the quick checks of layouts that were made so far.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.addresses = list(map(Tensor.data_ptr, tensors))
        self.indices = list(range(len(tensors)))
        # `_TensorGuards` accepts each tensor once only; tied weights and parameters of optimizers come twice.
        first = {id(tensor): at for at, tensor in reversed(list(enumerate(tensors)))}
        again = [at for at, tensor in enumerate(tensors) if first[id(tensor)] != at]
        self.is_again = bool(again)
        self.again, self.first = getter(again), getter([first[id(tensors[at])] for at in again])
        self.once = getter(sorted(first.values()))
        once = self.once(tensors)
        self.layouts = list(map(_layout, once))
        self.views = [list(map(read, once)) for read in _VIEWS]
        self.checks: dict[tuple[bool, bool], Any] = {}

    def same_layouts(self, tensors: Sequence[Tensor]) -> bool:
        """Check the layouts of tensors in Python, and prepare a faster way for the next call."""
        views = [list(map(read, tensors)) for read in _VIEWS]
        if list(map(_layout, tensors)) != self.layouts or views != self.views:
            return False
        if _TensorGuards is not None and tensors:
            check = _TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            self.checks[_is_inference_mode(), ANY_AUTOCAST()] = check
        return True


def _is_allocated(tensor: Tensor) -> bool:
    """True if torch's allocator made the memory of a tensor: not another library, or another process."""
    return has_address(tensor) and bool(tensor.untyped_storage().resizable())


class Reading:
    """Checks that a module has the tensors, modules, hooks and other objects that it had when the reading was made.

    Settings, functions and modes are read again only if the version of a module's attributes changed, and only if the
    call's `ValueCheck` does not check them. Tensors are read at every call, since they may be moved without a change of
    the dict that holds them.

    A reading keeps the dicts of submodules alive, but no tensor. Once a submodule is gone, the reading releases
    everything, and `holds` returns False from then on.

    Args:
        modules: the module first, then everything below it.
        links: chains of links to objects that are checked beside parameters, buffers, children and hooks.
        owned: tensors without another known owner.
        watched: tensors whose values are checked.
        carried_places: places, as (id of the dict, key), in which runs leave tensors: their values are not guarded.
        with_gradients: ids of tensors whose gradients are checked as well.

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
        # What the latest calls found. The id is taken before hooks are read: another thread may register one meanwhile.
        self._next_hook = RemovableHandle.next_id  # the id of the next hook, when empty registries were last read
        self._registry_versions: list[int] | None = None  # versions of registries, when their names were last read
        self._attribute_versions: list[int] | None = None  # versions of modules' attributes, when these were last read
        self._own_version = 0  # the version of the module's own attributes then
        self._checked_by: object = None  # the token of a value check that includes all other attribute versions itself
        self._moment: object = None  # the moment of the clock of versions when everything was last read and checked
        # Hooks, forwards, and tensors that others keep or watch.
        hooks: list[dict[int, Any]] = [vars(module)[name] for module in modules for name in HOOKS]
        self._hooks = [registry for registry in hooks if registry]
        self._hooks_before = [registry.copy() for registry in self._hooks]  # of their class, which may count the order
        self._empty_hooks = [registry for registry in hooks if not registry]  # read only after one was registered
        self._classes = list({type(module): None for module in modules if not issubclass(type(module), ScriptModule)})
        self._methods = list(map(_called, self._classes))
        self._owned, self._watched = owned, watched
        entries, leading, to_values = split_links(modules, links)
        self._sources = sources = _Sources(modules, leading, to_values)
        self._deaths = [weakref.ref(module, sources.forget) for module in modules]
        # What the values are expected to be, and the lengths of registries and containers.
        attributes = vars(modules[0])
        registries = self._registries(attributes)
        self._reader = _RegistryReader(registries)
        self._with_gradients_at: Callable[[Any], Sequence[Tensor]] | None = None
        values, self._lengths = self._read(attributes)
        if with_gradients:  # gradients come after all other values
            self._with_gradients_at = getter([at for at, value in enumerate(values) if id(value) in with_gradients])
            values += map(_grad, self._with_gradients_at(values))
        places = [
            (id(registry), name)
            for registry, names in zip(registries, self._reader.names, strict=True)
            for name in names
        ]
        unguarded = {at for at, place in enumerate(places) if place in carried_places}
        slots = sources.leading
        opened = {self._lengths[0] + at for at in slots.opened} if slots is not None else set()
        self._expected = _ExpectedValues(values, unguarded, opened)
        sources.entries = _entries_in_order(modules, entries, self._expected.modules_at(values))
        # Where the tensors are expected to be.
        found = self._expected.tensors_at(values)
        self._has_wrappers = any(map(is_wrapper, (*found, *map(_tensor_of, owned))))
        self._has_wrappers_or_owned = self._has_wrappers or bool(owned)
        tensors = self._tensors_in(values)
        self._expected_tensors = _ExpectedTensors(tensors)
        self.shows_releases = len(tensors) > FEW_TENSORS and all(map(_is_allocated, tensors))
        self.shows_releases &= len({tensor.device for tensor in tensors} - {_CPU}) < 2
        self.cache_releases: Hashable = None

    def _read(self, attributes: dict[str, Any]) -> tuple[list[Any], list[int]]:
        """Read everything that has no version: the values, and the lengths of containers.

        May raise if a place is gone.
        """
        values = self._reader.values_of(*self._registries(attributes))
        lengths = [len(values)]
        sources = self._sources
        if sources.leading is not None:
            lengths += map(len, sources.leading.read([attributes, *sources.attributes], values))
        if self._with_gradients_at is not None:
            values += map(_grad, self._with_gradients_at(values))
        return values, lengths

    def _registries(self, attributes: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the module's own registries, and those registries of submodules that were not empty."""
        return [*map(attributes.__getitem__, REGISTRIES), *_chain(map(map, _READERS, self._sources.filled))]

    def _tensors_in(self, values: list[Any]) -> Sequence[Tensor]:
        """Return all checked tensors: those among the values, and those without another owner."""
        tensors = self._expected.tensors_at(values)
        if self._owned:
            tensors = (*tensors, *map(_tensor_of, self._owned))
        return tuple(part for tensor in tensors for part in parts(tensor)) if self._has_wrappers else tensors

    def requires_grad(self, attributes: dict[str, Any]) -> bool | None:
        """True if a checked tensor requires grad now; None if this cannot be read."""
        try:
            values, lengths = self._read(attributes)
            return any(map(_requires_grad, self._tensors_in(values))) if lengths == self._lengths else None
        except Exception:  # a survey finds the cause
            return None

    def read_if_in_place(self, attributes: dict[str, Any]) -> Sequence[Any] | None:
        """Read the module, and compare its tensors: where they are, and their layouts.

        If this returns a value, a graph may be launched: every address that it reads is still valid, which takes the
        layouts, too, since a smaller tensor may have come to lie at the same address. The registries are read here as
        in `_read`, which would be one more call at every replay.

        Returns:
            What `holds` needs; None if a tensor was moved, replaced or laid out anew, or cannot be read.
        """
        try:
            sources = self._sources
            registries = [*map(attributes.__getitem__, REGISTRIES), *_chain(map(map, _READERS, sources.filled))]
            values = self._reader.values_of(*registries)
            lengths = [len(values)]
            if sources.leading is not None:
                lengths += map(len, sources.leading.read([attributes, *sources.attributes], values))
            if lengths != self._lengths:
                return None
            if self._with_gradients_at is not None:
                values += map(_grad, self._with_gradients_at(values))
            has_more = self._has_wrappers_or_owned
            tensors = self._tensors_in(values) if has_more else self._expected.tensors_at(values)
            expected = self._expected_tensors
            if _same_addresses is not None:
                if not _same_addresses(list(tensors), expected.addresses, expected.indices):
                    return None
            elif list(map(Tensor.data_ptr, tensors)) != expected.addresses:
                return None
            if expected.is_again:
                if not all(map(operator.is_, expected.again(tensors), expected.first(tensors))):
                    return None
                tensors = expected.once(tensors)
            check = expected.checks.get((_is_inference_mode(), ANY_AUTOCAST()))
            is_same = check.check(*tensors) if check is not None else expected.same_layouts(tensors)
            return (registries, values) if is_same else None
        except Exception:  # a survey finds the cause
            return None

    def holds(
        self, attributes: dict[str, Any], value_check: ValueCheck | None = None, read: Sequence[Any] | None = None
    ) -> bool:
        """True if nothing changed. State that cannot be read counts as changed.

        Args:
            attributes: the module's own attributes.
            value_check: what held for this call; None if there is none.
            read: what `read_if_in_place` returned for this call; None to check them now.
        """
        try:
            sources, expected = self._sources, self._expected
            version: Any = versions.dict_version
            # Registries that were empty, hooks, and tensors that only this library holds.
            if any(sources.empty) or self._hooks != self._hooks_before:
                return False
            if self._owned and any(map(_is_released, held_by_nobody(self._owned))):
                return False
            if RemovableHandle.next_id != self._next_hook:  # a hook was registered somewhere
                if any(self._empty_hooks):
                    return False
                self._next_hook = RemovableHandle.next_id
            # Tensors.
            moment = None if value_check is None else value_check.moment
            is_quiet = moment is not None and moment is self._moment  # no dict whose version was taken has changed
            # What is noted for a moment must be read after it.
            if read is None or not (is_quiet or moment is None):
                read = self.read_if_in_place(attributes)
            if read is None:
                return False
            registries, values = read
            # Values of slots, except those that the value check includes.
            token, *unchecked_before = sources.unchecked
            is_new = value_check is None or value_check.token is not token
            unchecked: list[SlotValues] = []
            for slot_values in sources.values if is_new else unchecked_before:
                containers = slot_values.containers_if_same([attributes, *sources.attributes])
                if containers is None:
                    return False
                if is_new and value_check is not None and not value_check.checks(containers, attributes):
                    unchecked.append(slot_values)
            if is_new and value_check is not None:
                sources.unchecked[:] = value_check.token, *unchecked
            # Names in registries: two parameters may have swapped their names.
            if not is_quiet:
                reader = self._reader
                taken = None if version is None or reader.has_orders else list(map(version, registries))
                if taken is None or taken != self._registry_versions:
                    if list(map(list, map(reader.names_of, registries))) != reader.names:
                        return False
                    self._registry_versions = taken
            # Values that are no tensors and modules.
            if is_quiet and sources.leading is None and self._with_gradients_at is None:
                pass  # all these values are in registries, and no dict changed
            elif expected.ids and list(map(identity_hash, expected.others_at(values))) != expected.ids:
                return False
            elif expected.numbers:
                # Types are compared first: a one-element tensor may equal a number.
                numbers = expected.numbers_at(values)
                if list(map(type, numbers)) != expected.number_types or numbers != expected.numbers:
                    return False
            # Attributes of modules, watched tensors and forwards.
            is_checked = (
                value_check is not None
                and value_check.token is self._checked_by
                and version(attributes) == self._own_version
            )
            if not is_checked and not self._same_attributes(attributes, expected.modules_at(values), value_check):
                return False
            if self._watched and not all(map(_is_same, self._watched)):
                return False
            if list(map(_called, self._classes)) != self._methods:
                return False
            if not is_quiet and self._registry_versions is not None:
                self._moment = moment
            return True
        except Exception:  # a survey finds the cause
            return False

    def renew(self, renewed: Mapping[int, int]) -> None:
        """Replace versions of dicts: `renewed` maps old versions to new ones."""
        if self._attribute_versions is not None:
            self._attribute_versions = [renewed.get(version, version) for version in self._attribute_versions]
        if self._registry_versions is not None:
            self._registry_versions = [renewed.get(version, version) for version in self._registry_versions]
        self._own_version = renewed.get(self._own_version, self._own_version)

    def _same_attributes(
        self, attributes: dict[str, Any], modules: Sequence[nn.Module], value_check: ValueCheck | None
    ) -> bool:
        """Check the attributes of modules whose version changed, and note the versions.

        The classes of modules are not checked here: a `ValueCheck` has them. No two dicts ever have the same version,
        so versions identify the modules, too. Versions are taken before anything is read, since another thread may
        write meanwhile.
        """
        dicts, before = [attributes, *map(_get, modules, _DICTS)], self._attribute_versions
        taken = None if versions.dict_version is None else list(map(versions.dict_version, dicts))
        for at, ((entries, expected), actual) in enumerate(zip(self._sources.entries, dicts, strict=True)):
            if taken is not None and before is not None and taken[at] == before[at]:
                continue
            if (expected is not None and expected is not actual) or not entries.hold(actual):
                return False
        self._attribute_versions = taken
        if (
            taken is not None
            and value_check is not None
            and not self._reader.has_orders
            and value_check.checks_versions(dicts[1:])
        ):
            self._own_version, self._checked_by = taken[0], value_check.token
        return True
