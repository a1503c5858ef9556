"""The state that captured graphs read of a module, and the check that all of it is still in place."""

from __future__ import annotations

import dataclasses
import math
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from simplegraph.errors import ReplayError
from simplegraph.graph.host.constants import reader
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.tensors import parts, storage_key
from simplegraph.module.changes import HOLDERS, HOOKS, Changes, Watcher, watch_module, watch_tensors
from simplegraph.module.functions import computes_gradients
from simplegraph.module.snapshot import has_address, place
from simplegraph.module.survey import HeldTensor, Survey, code_of
from simplegraph.module.torch_modules import SETTINGS
from simplegraph.module.torch_state import watch_settings

_requires_grad = operator.attrgetter("requires_grad")
_weak: Callable[[Any], Any] = StorageWeakRef  # typed loosely because torch leaves it untyped


@dataclasses.dataclass(eq=False)
class MemoryRead:
    """The memory that runs of a module were seen to read, beside their inputs.

    Attributes:
        keys: its storage keys.
        unseen: the kind of device on which captures recorded work that may read anything.
        elsewhere: by key, tensors that the module does not hold: of a closure, a global, a cache. They have no
            owner we know, so they are owned here. What the module holds is not: it may be replaced before any capture.
        values: CPU tensors whose values captures took, by their place in memory.
    """

    keys: set[int] = dataclasses.field(default_factory=set)
    elsewhere: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    values: dict[tuple[Any, ...], Tensor] = dataclasses.field(default_factory=dict)
    unseen: str = ""

    def add(self, survey: Survey, observers: Iterable[MemoryObserver], inputs: set[int]) -> None:
        """Add what runs were seen to read; `inputs` are the keys of their inputs, `survey` is of their module."""
        held = {key for each in survey.tensors.values() for key in each.memory}
        for observer in observers:
            self.unseen = self.unseen or observer.reads_anything
            for key, tensor in (*observer.external.items(), *observer.passed.items()):
                if key in inputs:
                    continue
                self.keys.add(key)
                known = self.elsewhere.get(key)
                # If it moved since, its key means another's memory.
                if key not in held and (known is None or storage_key(known) != key):
                    self.elsewhere[key] = tensor

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


class CapturedState(Watcher):
    """Remembers what graphs captured from a module read of it, and notices when any of that moved.

    It owns that memory: a change that goes unnoticed means old numbers, never freed memory. From a change that is
    noticed until somebody has looked, it owns nothing: what was replaced is free at once.

    Args:
        module: the module that is captured.

    Attributes:
        seen: the count of changes up to which all was in place.
        watches_plain: True if ordinary attributes, or values on the CPU, are compared at every call.
    """

    def __init__(self, module: nn.Module) -> None:
        watch_tensors()
        watch_settings()
        super().__init__()
        self.seen = math.nan
        self._module = weakref.ref(module)
        self._own_gradients = computes_gradients(module)
        self._read = MemoryRead()
        self._places: dict[str, _Lay] = {}
        self._elsewhere: dict[int, tuple[Tensor, _Lay]] = {}
        self._values: dict[tuple[Any, ...], WatchedValue] = {}
        self._modules: dict[str, tuple[weakref.ref[nn.Module], list[Any]]] = {}
        self._names: set[str] = set()
        self._generators: dict[str, torch.Generator] = {}
        self._ways: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}

    def take(self, read: MemoryRead, ways: Iterable[tuple[Any, Any, Any]] = ()) -> None:
        """Remember what more graphs read; where earlier ones read something else, that has moved.

        Args:
            read: all that graphs were seen to read.
            ways: (holder, key, value) on the way to where they leave tensors, as far as no module's dicts tell of it.
        """
        self._ways |= {(id(holder), key): (holder, key, value) for holder, key, value in ways}
        count, survey = self.count, self._survey()
        moved = bool(self._modules) and bool(self._differences(survey))
        self._read = MemoryRead(set(read.keys), dict(read.elsewhere), unseen=read.unseen)
        self._values = {at: WatchedValue(tensor) for at, tensor in read.values.items()} | self._values
        self._hold(survey)
        tensors = survey.tensors.values()
        covered = [each for each in tensors if self._read.covers(each)]
        for each in covered:
            self._places.setdefault(each.name, _Lay(each.tensor))
        for tensor in self._read.elsewhere.values():
            self._elsewhere.setdefault(id(tensor), (tensor, _Lay(tensor)))
        if not self._modules:
            self._modules = {name: (weakref.ref(each), list(code_of(each))) for name, each in survey.modules.items()}
            self._names = set(survey.tensors)
            self._generators = survey.generators
            self._empty = survey.attributes() - {each.attribute for each in tensors}
        # A tensor that is added to one of these matters; what no graph reads, and a new attribute, may hold any.
        self._watched_attributes = self._empty | {each.attribute for each in covered}
        self.seen = math.nan if moved else count

    def accept(self, survey: Survey) -> None:
        """Accept the tensors that the forward itself has just added, as to a cache by size.

        What was empty before, such as None, may have decided what earlier graphs do.
        """
        self._names |= {each.name for each in survey.tensors.values() if each.attribute not in self._empty}

    def _hold(self, survey: Survey) -> None:
        """Watch what is there, and own the memory that graphs read."""
        unwatched = [holder for module in survey.modules.values() for holder in watch_module(module)]
        held = [each for each in survey.tensors.values() if self._read.covers(each)]
        tensors = [*(each.tensor for each in held), *self._read.elsewhere.values()]
        memory = [part for tensor in tensors for part in parts(tensor) if has_address(part)]
        dicts = [vars(module) for module in survey.modules.values()]
        dicts += [attributes[name] for attributes in dicts for name in (*HOLDERS, *HOOKS) if name in attributes]
        things = (*tensors, *memory, *dicts, *survey.watched)
        self.watched = frozenset({*map(id, things), *map(storage_key, memory)})
        Changes.add(self)
        links = [link for each in held for link in each.links] + survey.links
        links += [(holder, key, value) for holder in unwatched for key, value in holder.items()]
        links += [(holder, -1, holder[-1]) for holder, _, _ in links if isinstance(holder, list)]  # it may grow
        links += [(value, 0, value.before) for value in self._values.values()]
        links += self._ways.values()
        unique = {(id(holder), key): (holder, key, value) for holder, key, value in links}
        self._links: tuple[tuple[Any, ...], ...] = tuple(zip(*unique.values(), strict=True))  # holders, keys, values
        self.watches_plain = bool(unique)
        # By views, since a tensor that moves takes its old memory along.
        self._held: tuple[list[Tensor], list[Tensor]] | None = tensors, [part.data for part in memory]

    def disturb(self, count: float) -> None:
        """Give up all memory that somebody else can free, until `moved` has looked."""
        super().disturb(count)
        self._held = None
        self._links = ()

    def moved(self) -> bool:
        """True if anything is no longer where the graphs read it. Cheap enough for every call."""
        count = self.count
        if self.seen == count and not (self.watches_plain and self._plain_replaced()):
            return False
        survey = self._survey()
        if self._differences(survey):
            return True
        self._hold(survey)  # another thing changed, or this one was changed and changed back
        self.seen = count
        self._plain_replaced()  # read it as every call does: some containers bring up to date what is read of them
        return False

    def _plain_replaced(self) -> bool:
        """True if a container or attribute holds something else than it did."""
        links = self._links
        if not links:
            return True  # disturbed this very moment
        holders, keys, values = links
        found = map(operator.getitem, holders, keys)
        try:
            return not all(map(operator.is_, found, values))
        except LookupError:
            return True

    def wants_grad(self) -> bool:
        """True if anything that the graphs read requires grad, or if somebody has to look first."""
        held = self._held
        return held is None or (not self._own_gradients and any(map(_requires_grad, held[0])))

    def what_moved(self) -> list[str]:
        """Name everything that moved or was replaced."""
        return self._differences(self._survey())

    def _survey(self) -> Survey:
        module = self._module()
        if module is None:
            raise ReplayError("the module of these graphs is gone.")
        return Survey(module)

    def _differences(self, survey: Survey) -> list[str]:
        now = survey.tensors
        names = []
        for name, lay in self._places.items():
            if name not in now:
                names.append(f"{name} (removed)")
            elif lay.left_by(now[name].tensor):
                names.append(f"{name} (moved or replaced)")
        added = [each for each in now.values() if each.name not in self._names]
        names += [
            f"{each.name} (added)" for each in added if each.registered or each.attribute in self._watched_attributes
        ]
        elsewhere = self._elsewhere.values()
        names += [f"a {tuple(t.shape)} tensor from elsewhere (moved)" for t, lay in elsewhere if lay.left_by(t)]
        values = [value.tensor for value in self._values.values() if value[0] is not value.before]
        names += [
            f"{survey.name_of(tensor) or 'a CPU tensor from elsewhere'} (changed on the CPU)" for tensor in values
        ]
        names += [f"{key} (replaced)" for holder, key, value in self._ways.values() if not _holds(holder, key, value)]
        before, after = self._generators, survey.generators
        drawn = [name for name in before | after if before.get(name) is not after.get(name)]
        names += [f"{name} (random generator, replaced)" for name in drawn]
        return names + self._changed_modules(survey.modules)

    def _changed_modules(self, now: dict[str, nn.Module]) -> list[str]:
        before = self._modules
        names = [f"submodule {name} (added)" for name in now if name not in before]
        for name, (known, code) in before.items():
            module = now.get(name)
            if module is None or module is not known():
                names.append(f"submodule {name} (replaced)")
            elif not _same(list(code_of(module)), code):
                names.append(f"{name or 'the module'} (class, forward, training mode, hooks, functions or settings)")
        return names or ([] if list(now) == list(before) else ["submodules (another order)"])


def any_requires_grad(leaves: Iterable[Any]) -> bool:
    """True if eager would build an autograd graph for one of these."""
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves)


def _holds(holder: Any, key: Any, value: Any) -> bool:
    try:
        return holder[key] is value
    except LookupError:
        return False


def _same(now: list[Any], before: list[Any]) -> bool:
    """True for the same objects, and equal settings, one by one."""
    if len(now) != len(before):
        return False
    pairs = [pair for pair in zip(now, before, strict=True) if pair[0] is not pair[1]]
    return all(type(a) is type(b) and type(a) in SETTINGS and a == b for a, b in pairs)


class WatchedValue:
    """A CPU tensor, as a container of its value: whatever writes to it, versions and hooks may miss it.

    Attributes:
        tensor: itself; before: what tells its value, as it was. ``value[0]`` is that very object while it is so.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._read = reader(tensor)
        self.before = self._read()

    def __getitem__(self, key: int) -> Hashable:
        now = self._read()
        return self.before if now == self.before else now


class _Lay:
    """Remembers the place of a tensor, and its memory: other memory may come to lie at the same address."""

    def __init__(self, tensor: Tensor) -> None:
        self._place = _place(tensor)
        # They own the storage's name alone, not its bytes, so that no other storage gets that name.
        self._storages = [_weak(part.untyped_storage()) for part in parts(tensor) if has_address(part)]

    def left_by(self, tensor: Tensor) -> bool:
        """True if a tensor that lay here lies elsewhere."""
        if _place(tensor) != self._place:
            return True
        keys = [storage_key(part) for part in parts(tensor) if has_address(part)]
        return keys != [storage.cdata for storage in self._storages]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(place(part) if has_address(part) else id(part) for part in parts(tensor))
