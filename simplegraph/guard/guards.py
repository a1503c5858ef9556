"""The state that captured graphs read of a module, and the check at each call that all of it is still in place.

A reading compares the addresses and layouts of tensors, which objects stand where, and settings; a survey by name tells
what differs.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from simplegraph.base.constants import WatchedValue, WatchedVersion
from simplegraph.base.errors import ReplayError
from simplegraph.base.modes import ANY_AUTOCAST
from simplegraph.base.objects import own_dict
from simplegraph.base.tensors import has_address, is_wrapper, lies_at, parts
from simplegraph.base.walk import values_in_order
from simplegraph.guard import versions
from simplegraph.guard.functions import computes_gradients
from simplegraph.guard.survey import SETTINGS, HeldTensor, Link, Survey, code_of
from simplegraph.program.snapshot import is_same

_REGISTRIES = ("_parameters", "_buffers", "_modules")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_READERS = tuple(map(operator.itemgetter, _REGISTRIES))
_CONTAINERS = (list, dict, collections.deque)
_chain = itertools.chain.from_iterable
_get = object.__getattribute__  # past what the class of an object makes of it
_is_inference_mode = torch.is_inference_mode_enabled  # looked up once
_DICTS = itertools.repeat("__dict__")
_requires_grad = operator.attrgetter("requires_grad")
_layout: Callable[[Tensor], Any] = operator.attrgetter("shape", "dtype", "requires_grad")
_VIEWS: tuple[Callable[[Tensor], Any], ...] = (Tensor.stride, Tensor.is_neg, Tensor.is_conj)
# Compares types, shapes, strides and dtypes of many tensors by one call. Private to torch, and an object of it holds
# only in the dispatch state in which it was made; where it is absent, Python compares them.
_TensorGuards: Any = getattr(getattr(torch._C._dynamo, "guards", None), "TensorGuards", None)

# Compares the addresses of many tensors by one call. Private to torch, and only there where torch knows CUDA.
_same_addresses: Any = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", None)


# One level of nesting: the index of each slot's container in the level above, each slot's key, and which of the values
# are opened for the next level: their indices, with True for an object's attributes, False for a container's items.
_Level = tuple[list[int], list[Any], list[tuple[int, bool]]]


class _Entries:
    """Compares the attributes of one module: settings by type and value, everything else by identity.

    Args:
        entries: by name.
        names: of all attributes, those included that matter to nothing.
    """

    def __init__(self, entries: dict[str, Any], names: Iterable[str]) -> None:
        settings = {name: value for name, value in entries.items() if type(value) in SETTINGS}
        # Owned, so that their ids stay theirs.
        self._others = [value for name, value in entries.items() if name not in settings]
        self._ids = tuple(map(id, self._others))
        self._settings_at = _getter(list(settings))
        self._others_at = _getter([name for name in entries if name not in settings])
        self._settings, self._types = tuple(settings.values()), tuple(map(type, settings.values()))
        self._names = set(names)

    def hold(self, attributes: dict[str, Any]) -> bool:
        """True if the attributes are these, and no others were added or removed."""
        settings = self._settings_at(attributes)  # their types first: a tensor of one element may equal a number
        return (
            attributes.keys() == self._names
            and tuple(map(type, settings)) == self._types
            and settings == self._settings
            and tuple(map(id, self._others_at(attributes))) == self._ids
        )


class _Held(NamedTuple):
    """The dicts and containers that a reading reads, but for the module's own attributes.

    Attributes:
        attributes: of each module below.
        filled: of these, the ones that have parameters, that have buffers, and that have children.
        bases: other containers that links start at.
        entries: what the attributes of modules must be, in the order in which the modules are read, and whose they are.
    """

    attributes: list[dict[str, Any]]
    filled: list[list[dict[str, Any]]]
    bases: list[Any]
    entries: list[tuple[_Entries, dict[str, Any] | None]]


class Reading:
    """Reads what a module holds, and compares that with what it held when this was made.

    Versions of the modules' attributes say where to look for settings, functions and modes. Tensors are read in every
    call, since they move without their holder, and so are the children, whose class and `__dict__` may be replaced.

    It holds dicts of submodules, but no tensor; once a submodule is gone it holds nothing, and reads as changed.

    Args:
        modules: the module first, then everything below it.
        links: (holder, key, value) from a module's attributes, or from any other place, to what is compared beside
            parameters, buffers, children and hooks.
        owned: tensors that nothing else is known to hold.
        left: places, by the id of a dict and the key, in which runs leave tensors: what they hold does not count.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        links: Iterable[Sequence[Link]],
        owned: Sequence[Tensor] = (),
        left: Collection[tuple[int, str]] = (),
    ) -> None:
        root, *children = modules
        below = [vars(child) for child in children]
        hooks: list[dict[int, Any]] = [vars(module)[name] for module in modules for name in _HOOKS]
        self._empty_hooks = [held for held in hooks if not held]
        self._hooks = [held for held in hooks if held]
        self._hooks_before = [held.copy() for held in self._hooks]  # of their class, which may count the order
        self._handles = RemovableHandle.next_id
        self._empty_registries = [
            held for module in modules for name in _REGISTRIES if not (held := vars(module)[name])
        ]
        self._owned = owned
        self._kinds = list({type(module): None for module in modules})
        self._forwards = [kind.forward for kind in self._kinds]
        entries, read = _split(modules, links)
        self._versions: list[int] | None = None  # of all attributes, when they were looked at last
        bases, self._levels = _levels([vars(root), *below], read)
        filled = [[attributes for attributes in below if attributes[name]] for name in _REGISTRIES]
        self._held = [_Held(below, filled, bases, [(entries[0], None)])]
        registries = (vars(module)[name] for module in modules for name in _REGISTRIES)
        has_orders = any(issubclass(type(held), collections.OrderedDict) for held in registries)
        self._values_of: Callable[[Any], Iterable[Any]] = values_in_order if has_orders else dict.values
        held = self._held  # cleared once a submodule is gone
        self._deaths = [weakref.ref(child, lambda _: held.clear()) for child in children]
        values, self._lengths = self._read(vars(root))
        registered = self._lengths[0]
        ignored = self._places_of(left, vars(root)) if left else set()
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
        self._tensors_at, self._others_at, self._numbers_at = map(_getter, (tensors, others, numbers))
        self._numbers = self._numbers_at(values)
        self._number_types = list(map(type, self._numbers))
        self._anchors = self._others_at(values)  # owned, so that their ids stay theirs
        self._ids = list(map(id, self._anchors))
        self._modules_at = _getter(modules_at)
        held_modules = self._modules_at(values)
        self._types = list(map(type, held_modules))
        by_dict: dict[int, tuple[_Entries, dict[str, Any] | None]] = {
            id(attributes): (each, attributes) for each, attributes in zip(entries[1:], below, strict=True)
        }
        by_dict[id(vars(root))] = entries[0], None  # not owned: a child may hold the module itself
        added = (
            _Entries({}, ()),
            None,
        )  # since the survey, by another thread: never holds, so that all is surveyed again
        self._held[0].entries.extend(by_dict.get(id(_get(module, "__dict__")), added) for module in held_modules)
        self._wraps = any(is_wrapper(values[at]) for at in tensors)
        self._is_more = self._wraps or bool(owned)
        live = self._of(values)
        self._addresses = list(map(Tensor.data_ptr, live))
        self._indices = list(range(len(live)))
        # Tied weights, and parameters that an optimizer holds, too: `_TensorGuards` takes no tensor twice.
        first = {id(tensor): at for at, tensor in reversed(list(enumerate(live)))}
        again = [at for at, tensor in enumerate(live) if first[id(tensor)] != at]
        self._is_again = bool(again)
        self._again, self._first = _getter(again), _getter([first[id(live[at])] for at in again])
        self._once = _getter(sorted(first.values()))
        once = self._once(live)
        self._layouts, self._views = list(map(_layout, once)), [list(map(read, once)) for read in _VIEWS]
        self._checks: dict[tuple[bool, bool], Any] = {}

    def _places_of(self, left: Collection[tuple[int, str]], attributes: dict[str, Any]) -> set[int]:
        """Return the indices of places among the registered values, which are the first of all values."""
        own = [attributes[name] for name in _REGISTRIES]
        filled = [held[name] for name, dicts in zip(_REGISTRIES, self._held[0].filled, strict=True) for held in dicts]
        places = [(id(held), key) for held in (*own, *filled) for key in held]
        return {at for at, place in enumerate(places) if place in left}

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
        below, filled, bases, _ = self._held[0]
        own = map(attributes.__getitem__, _REGISTRIES)
        parameters, buffers, modules = map(map, _READERS, filled)
        values = list(_chain(map(self._values_of, itertools.chain(own, parameters, buffers, modules))))
        lengths = [len(values)]
        if not self._levels:
            return values, lengths
        holders: Sequence[Any] = [attributes, *below, *bases]
        for parents, keys, opened in self._levels:
            slots = list(map(operator.getitem, map(holders.__getitem__, parents), keys))
            values += slots
            holders = [_get(slots[at], "__dict__") if by_attributes else slots[at] for at, by_attributes in opened]
            lengths += map(len, holders)
        return values, lengths

    def _of(self, values: list[Any]) -> Sequence[Tensor]:
        tensors = self._tensors_at(values)
        if self._wraps:
            tensors = tuple(part for tensor in tensors for part in parts(tensor))
        return (*tensors, *self._owned) if self._owned else tensors

    def requires_grad(self, attributes: dict[str, Any]) -> bool | None:
        """True if a tensor that is compared requires grad now; None if one cannot be read, or is none any more."""
        try:
            values, lengths = self._read(attributes)
            return any(map(_requires_grad, self._of(values))) if lengths == self._lengths else None
        except Exception:  # a survey finds out what it was
            return None

    def same(self, attributes: dict[str, Any]) -> bool:
        """True if all is as it was; `attributes` are the module's own. What cannot be read has changed."""
        try:
            if any(self._empty_registries) or self._hooks != self._hooks_before:
                return False
            if RemovableHandle.next_id != self._handles:  # a hook was registered somewhere
                if any(self._empty_hooks):
                    return False
                self._handles = RemovableHandle.next_id
            values, lengths = self._read(attributes)
            if lengths != self._lengths:
                return False
            if self._ids and list(map(id, self._others_at(values))) != self._ids:
                return False
            if self._numbers:
                numbers = self._numbers_at(values)  # their types first: a tensor of one element may equal a number
                if list(map(type, numbers)) != self._number_types or numbers != self._numbers:
                    return False
            modules = self._modules_at(values)
            if list(map(type, modules)) != self._types:
                return False
            # No two dicts ever have one version, so that these tell the modules, too. They are taken before anything is
            # looked at, since another thread may write meanwhile.
            dicts, version = [attributes, *map(_get, modules, _DICTS)], versions.dict_version
            taken = None if version is None else list(map(version, dicts))
            if (taken is None or taken != self._versions) and not self._look(dicts, taken):
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
            return [kind.forward for kind in self._kinds] == self._forwards
        except Exception:  # a survey finds out what it was
            return False

    def renew(self, versions: Mapping[int, int]) -> None:
        """Take dicts of these versions for known by their new ones."""
        known = self._versions
        if known is not None:
            self._versions = [versions.get(version, version) for version in known]

    def _look(self, dicts: Sequence[dict[str, Any]], taken: list[int] | None) -> bool:
        """Compare the attributes of the modules whose version is another one by now, and keep the versions."""
        before = self._versions
        for at, ((entries, held), attributes) in enumerate(zip(self._held[0].entries, dicts, strict=True)):
            if taken is not None and before is not None and taken[at] == before[at]:
                continue
            if (held is not None and held is not attributes) or not entries.hold(attributes):
                return False
        self._versions = taken
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


def _split(
    modules: Sequence[nn.Module], links: Iterable[Sequence[Link]]
) -> tuple[list[_Entries], list[Sequence[Link]]]:
    """Divide links into entries of the modules' attributes, of which versions tell, and those to be read in every call.

    Tensors move, containers fill, and modules are given another class without a change of the attribute.
    """
    entries: list[dict[str, Any]] = []
    for module in modules:
        # What every module has, without the registries that hold something: these are read in every call.
        empty = {name: held for name in _REGISTRIES if not (held := vars(module)[name])}
        # Another module's mode is what a compiled one's is.
        entries.append({name: vars(module)[name] for name in ("training", *_HOOKS) if name in vars(module)} | empty)
    by_holder = {id(vars(module)): held for module, held in zip(modules, entries, strict=True)}
    read = []
    for chain in links:
        holder, name, value = chain[0]
        held = by_holder.get(id(holder))
        if len(chain) > 1 or held is None or issubclass(type(value), (Tensor, nn.Module)) or _is_opened(value):
            read.append(chain)
        else:
            held[name] = value
    return [_Entries(held, vars(module)) for module, held in zip(modules, entries, strict=True)], read


def _is_opened(value: Any) -> bool:
    """True for what tensors may be added to: a container, or an object without attributes that may get some."""
    return issubclass(type(value), _CONTAINERS) or (not callable(value) and own_dict(value) == {})


def _levels(attributes: list[dict[str, Any]], links: Iterable[Sequence[Link]]) -> tuple[list[Any], list[_Level]]:
    """Order slots so that each is read of a container which was read before it, and each is read once.

    Returns:
        The containers that the first slots are read of, beside attributes of modules, and the levels.
    """
    first = {id(held): at for at, held in enumerate(attributes)}
    bases: list[Any] = []
    levels: list[_Level] = []
    slots: dict[tuple[int, int, Any], int] = {}  # (level, container, key) -> the index of what it holds
    opened: dict[tuple[int, int, bool], int] = {}  # (level, that index, by attributes) -> the index of the container
    for chain in links:
        container = first.get(id(chain[0][0]))
        if container is None:
            container = first[id(chain[0][0])] = len(first)
            bases.append(chain[0][0])
        for depth, (_, key, value) in enumerate(chain):
            if depth == len(levels):
                levels.append(([], [], []))
            parents, keys, containers = levels[depth]
            # Keys are told apart as dicts do, without asking tensors if they are equal.
            slot = depth, container, id(key) if issubclass(type(key), Tensor) else (type(key), key)
            at = slots.get(slot)
            if at is None:
                at = slots[slot] = len(keys)
                parents.append(container)
                keys.append(key)
            is_last = depth + 1 == len(chain)
            if not is_last or _is_opened(value):
                is_container = issubclass(type(value), _CONTAINERS)
                step = at, not is_container if is_last else chain[depth + 1][0] is not value
                container = opened.setdefault((depth, *step), len(containers))
                if container == len(containers):
                    containers.append(step)
    return bases, levels


def _getter(indices: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads these indices of a sequence, or keys of a dict."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else (lambda values: ())


@dataclasses.dataclass(eq=False)
class MemoryRead:
    """The memory that runs of a module were seen to read, beside their inputs.

    Attributes:
        keys: its storage keys.
        unseen: the kind of device on which captures recorded work that may read anything.
        elsewhere: by key, tensors that the module does not hold: of a closure, a global, a cache. They have no
            owner we know, so they are owned here. What the module holds is not: it may be replaced before any capture.
        values: CPU tensors whose values captures took, by their place in memory.
        versions: what values follow from that captures took from warmups.
    """

    keys: set[int] = dataclasses.field(default_factory=set)
    elsewhere: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    values: dict[tuple[Any, ...], Tensor] = dataclasses.field(default_factory=dict)
    versions: list[WatchedVersion] = dataclasses.field(default_factory=list)
    unseen: str = ""

    def wants_grad(self, module: nn.Module, leaves: Iterable[Any]) -> bool:
        """True if eager would build an autograd graph for a call with these leaves."""
        if computes_gradients(module):
            return any_requires_grad(leaves)
        if any_requires_grad(leaves) or any_requires_grad(module.parameters()):
            return True  # before looking any further: most often it is one of these
        held = [each.tensor for each in Survey(module).tensors.values() if self.covers(each)]
        return any_requires_grad((*held, *self.elsewhere.values()))

    def covers(self, held: HeldTensor) -> bool:
        """True if a tensor that a module holds matters to a graph."""
        unseen = held.tensor.device.type == self.unseen
        return held.registered or unseen or not self.keys.isdisjoint(held.memory)


class CapturedState:
    """Guards of the graphs that were captured from a module: what they read of it is where it was.

    At each call a `Reading` compares all of it at once, and a little more; where that differs, a survey finds by name
    what changed. The memory of tensors that nothing else is known to hold is owned here, and no other.

    Args:
        module: the module that is captured.

    Attributes:
        module: it, by a weak reference.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self._own_gradients = computes_gradients(module)
        self._read = MemoryRead()
        self._reading: Reading | None = None
        self._places: dict[str, tuple[Any, ...]] = {}
        self._elsewhere: dict[int, tuple[Tensor, tuple[Any, ...]]] = {}
        self._values: dict[Any, WatchedValue | WatchedVersion] = {}
        self._modules: dict[str, tuple[weakref.ref[nn.Module], tuple[Any, ...]]] = {}
        self._names: dict[str, None] = {}  # in their order
        self._generators: dict[str, torch.Generator] = {}

    def take(self, read: MemoryRead, survey: Survey) -> None:
        """Remember what more graphs read; where earlier ones read something else, that has moved.

        Args:
            read: all that graphs were seen to read.
            survey: what the module holds now.
        """
        moved = bool(self._modules) and bool(self._differences(survey))
        self._read = MemoryRead(set(read.keys), dict(read.elsewhere), unseen=read.unseen)
        for at, tensor in read.values.items():
            self._values.setdefault(at, WatchedValue(tensor))
        self._values.update((id(watched), watched) for watched in read.versions)
        tensors = survey.tensors.values()
        covered = [each for each in tensors if self._read.covers(each)]
        for each in covered:
            self._places.setdefault(each.name, _place(each.tensor))
        for tensor in self._read.elsewhere.values():
            self._elsewhere.setdefault(id(tensor), (tensor, _place(tensor)))
        if not self._modules:
            self._modules = {name: (weakref.ref(each), tuple(code_of(each))) for name, each in survey.modules.items()}
            self._names = dict.fromkeys(survey.tensors)
            self._generators = survey.generators
            self._empty = survey.attributes() - {each.attribute for each in tensors}
        # A tensor that is added to one of these matters. New attributes, and those that no graph reads, may hold any.
        self._watched_attributes = self._empty | {each.attribute for each in covered}
        self._reading = None if moved else self._new_reading(survey)

    def accept(self, survey: Survey) -> None:
        """Accept the tensors that the forward itself has just added, as to a cache by size.

        What was empty before, such as None, may have decided what earlier graphs do.
        """
        added = (each.name for each in survey.tensors.values() if each.attribute not in self._empty)
        self._names |= dict.fromkeys(added)

    def _new_reading(self, survey: Survey) -> Reading:
        """Read what is there, to be compared at every call."""
        held = [each.links for each in survey.tensors.values() if each.links and self._read.covers(each)]
        owned = [part for tensor in self._read.elsewhere.values() for part in parts(tensor) if has_address(part)]
        return Reading(list(survey.modules.values()), (*held, *survey.links), owned, survey.left)

    def moved(self) -> bool:
        """True if anything is no longer where the graphs read it. Cheap enough for every call."""
        module, reading = self.module(), self._reading
        if (
            reading is not None
            and module is not None
            and reading.same(vars(module))
            and all(map(_is_same, self._values.values()))
        ):
            return False
        self._reading = None
        survey = self._survey()
        if self._differences(survey):
            return True
        self._reading = self._new_reading(survey)  # another thing changed, or this one was changed and changed back
        return False

    def renew(self, versions: Mapping[int, int]) -> None:
        """Take dicts of these versions for known by their new ones."""
        reading = self._reading
        if reading is not None:
            reading.renew(versions)

    def wants_grad(self) -> bool:
        """True if anything that the graphs read requires grad, or if somebody has to look first."""
        module, reading = self.module(), self._reading
        if reading is None or module is None:
            return True
        wanted = reading.requires_grad(vars(module))
        return wanted is None or (wanted and not self._own_gradients)

    def what_moved(self) -> list[str]:
        """Name everything that moved or was replaced."""
        return self._differences(self._survey())

    def _survey(self) -> Survey:
        module = self.module()
        if module is None:
            raise ReplayError("the module of these graphs is gone.")
        return Survey(module)

    def _differences(self, survey: Survey) -> list[str]:
        now = survey.tensors
        names = []
        for name, laid in self._places.items():
            if name not in now:
                names.append(f"{name} (removed)")
            elif _place(now[name].tensor) != laid:
                names.append(f"{name} (moved or replaced)")
        added = [each for each in now.values() if each.name not in self._names]
        names += [
            f"{each.name} (added)" for each in added if each.registered or each.attribute in self._watched_attributes
        ]
        elsewhere = self._elsewhere.values()
        names += [f"a {tuple(t.shape)} tensor from elsewhere (moved)" for t, laid in elsewhere if _place(t) != laid]
        names += [_what_changed(value, survey) for value in self._values.values() if not value.is_same()]
        before, after = self._generators, survey.generators
        drawn = [name for name in before | after if before.get(name) is not after.get(name)]
        names += [f"{name} (random generator, replaced)" for name in drawn]
        names += self._changed_modules(survey.modules)
        order = [name for name in self._names if name in now and now[name].registered]
        is_same = order == [name for name, each in now.items() if each.registered and name in self._names]
        return names or ([] if is_same else ["parameters or buffers (another order)"])

    def _changed_modules(self, now: dict[str, nn.Module]) -> list[str]:
        before = self._modules
        names = [f"submodule {name} (added)" for name in now if name not in before]
        for name, (known, code) in before.items():
            module = now.get(name)
            if module is None or module is not known():
                names.append(f"submodule {name} (replaced)")
            elif not is_same(tuple(code_of(module)), code):
                names.append(f"{name or 'the module'} (class, forward, training mode, hooks, functions or settings)")
        return names or ([] if list(now) == list(before) else ["submodules (another order)"])


_is_same = operator.methodcaller("is_same")


def _what_changed(value: WatchedValue | WatchedVersion, survey: Survey) -> str:
    """Say that a value that graphs hold is another one by now."""
    name = None if value.tensor is None else survey.name_of(value.tensor)
    if isinstance(value, WatchedValue):
        return f"{name or 'a CPU tensor from elsewhere'} (changed on the CPU)"
    return f"{name or 'a tensor that is gone'} (written to; a value that was read from it is in a graph)"


def any_requires_grad(leaves: Iterable[Any]) -> bool:
    """True if eager would build an autograd graph for one of these."""
    return any(issubclass(type(leaf), Tensor) and leaf.requires_grad for leaf in leaves)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(lies_at(part) if has_address(part) else id(part) for part in parts(tensor))
