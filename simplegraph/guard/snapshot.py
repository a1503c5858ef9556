"""Remembers what Python can change about a module: attributes, containers, plain objects, places of tensors.

A capture executes nothing on the device, but Python runs. What the forward changed meanwhile about its modules, and
tensors that it left anywhere, belong to no call of the user's, so they are put back; and tensors that a capture made
say that a replay cannot stand for a call. Other values in containers and objects stay: another thread may have put them
there.
"""

from __future__ import annotations

import collections
import operator
import queue
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from simplegraph.base.nested import ATOMS
from simplegraph.base.patches import plain
from simplegraph.base.tensors import parts
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.program.places import ABSENT, by_class, put

# Far above a model's own objects (an 8B transformers model has 7,000): a bound for what hangs on by accident.
_MAX_HOLDERS = 1_000_000
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_CONTAINERS = (dict, list, set, collections.deque)
_EXACT = frozenset({dict, collections.OrderedDict})  # whose methods are known to do no more than theirs
_NAMESPACES = (
    *(types.SimpleNamespace, collections.UserDict, collections.UserList, collections.ChainMap),
    queue.Queue,
)
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph"}  # whose objects do more than hold values
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # left out of names, as users know them
_UNSEEN = "_simplegraph"  # a wrapper's own runner


class Change(NamedTuple):
    """A place that holds something else than it did: its name, dotted from the module, and what it holds now."""

    name: str
    value: Any


class Snapshot:
    """Remembers who holds what below a module, or any other object, and where each tensor lies.

    Functions, classes, modules of Python, optimizers, objects with slots and objects of its standard library, of torch
    (`nn.Module` excepted) and of this library are not looked into. Values of tensors are not copied: a capture writes
    none.

    Args:
        module: what is looked into.
        tensors: False leaves out where tensors lie, and dispatches no operator.
    """

    def __init__(self, module: Any, *, tensors: bool = True) -> None:
        # A container or an object's attributes, what it held, the index of what holds it, and under which key.
        self._holders: list[tuple[Any, Any, int, Any]] = []
        # Most are empty dicts, a module's ten for hooks: those are asked together, and are holders once one is filled.
        self._empty: list[dict[Any, Any]] = []
        self._empty_in: list[tuple[int, Any]] = []  # the index of what holds each, and under which key
        self._modules: dict[int, tuple[nn.Module, type]] = {}  # by the index of their attributes, with their class
        self._tensors: list[tuple[Tensor, Tensor, tuple[Any, ...], int, Any]] = []
        self._seen = seen = set[int]()
        left: collections.deque[tuple[Any, int, Any]] = collections.deque([(plain(module), -1, "")])
        while left and len(self._holders) < _MAX_HOLDERS:
            value, parent, key = left.popleft()
            kind = _kind_of(type(value))
            container = value if kind is not object else getattr(value, "__dict__", None)
            if kind is Tensor:
                if tensors:
                    self._note(value, parent, key, seen)
            elif id(container) not in seen and (kind is not object or type(container) is dict):
                seen.add(id(container))
                if isinstance(value, nn.Module):
                    self._modules[len(self._holders)] = value, type(value)
                before, index = _copied(container), len(self._holders)
                self._holders.append((container, before, parent, key))
                for name, item in _items(before):
                    if type(item) in _EXACT and not item:
                        if id(item) not in seen:
                            seen.add(id(item))
                            self._empty.append(item)
                            self._empty_in.append((index, name))
                    elif _kind_of(type(item)) is not None:
                        left.append((item, index, name))

    def _note(self, tensor: Tensor, parent: int, key: Any, seen: set[int]) -> None:
        for part in parts(tensor):
            if id(part) not in seen and has_address(part):
                seen.add(id(part))
                self._tensors.append((part, part.detach(), place(part), parent, key))

    def holds(self, place: Any) -> bool:
        """True for a container, and for an object whose attributes are looked at."""
        return id(place) in self._seen or id(getattr(place, "__dict__", None)) in self._seen

    def changes(self) -> list[Change]:
        """Find every place that holds something else, and every tensor that was moved.

        A dict, and hence an object, is told apart by its keys; a list, a set or a deque is one place. Equal numbers,
        texts and tuples of them are the same.
        """
        found: list[Change] = []
        for index, (container, before, parent, key) in self._touched():
            now = _copied(container)
            if isinstance(now, dict):
                keys = [name for name in now | before if not _same(now.get(name, _UNSEEN), before.get(name, _UNSEEN))]
                found += [Change(self._name(index, name), now.get(name)) for name in keys if name != _UNSEEN]
            elif not _same(tuple(now), tuple(before)):
                found.append(Change(self._name(parent, key), now))
        return found + [Change(self._name(parent, key), tensor) for tensor, _, _, parent, key in self._moved()]

    def changed_names(self) -> set[str]:
        """Name the places that `changes` finds."""
        return {change.name for change in self.changes()}

    def _name(self, holder: int, key: Any) -> str:
        names = [str(key)]
        while holder >= 0:
            _, _, holder, key = self._holders[holder]
            names += [] if key in _REGISTERED or key == "" else [str(key)]
        return ".".join(reversed(names))

    def put_back(self, names: Collection[str] = ()) -> None:
        """Let modules hold what they held, and any place the tensors that it held; let tensors lie where they lay.

        Args:
            names: of places, as `changes` gives them, that shall hold again whatever they held.
        """
        for module, kind in self._modules.values():
            if type(module) is not kind:
                module.__class__ = kind
        for index, (container, before, parent, key) in self._touched():
            own = index in self._modules or (parent in self._modules and key in _REGISTERED)
            listed = bool(names) and not isinstance(container, dict) and self._name(parent, key) in names
            if own or listed or _tensors_differ(container, before):
                _refill(container, before)
            elif names and isinstance(container, dict):
                named = [name for name in before.keys() | container.keys() if self._name(index, name) in names]
                for name in named:
                    put(container, name, before.get(name, ABSENT))
        for tensor, memory, *_ in self._moved():
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = memory

    def _touched(self) -> list[tuple[int, tuple[Any, Any, int, Any]]]:
        """List the holders that do not hold the very same objects, with their indices."""
        if any(self._empty):
            filled = [at for at, container in enumerate(self._empty) if container]
            self._holders += [(self._empty[at], {}, *self._empty_in[at]) for at in filled]
            for at in reversed(filled):
                del self._empty[at], self._empty_in[at]
        return [(at, entry) for at, entry in enumerate(self._holders) if not _untouched(entry[0], entry[1])]

    def _moved(self) -> list[tuple[Tensor, Tensor, tuple[Any, ...], int, Any]]:
        return [entry for entry in self._tensors if place(entry[0]) != entry[2]]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor that a value is or holds, in containers and plain objects."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MAX_HOLDERS:
        value = left.pop()
        kind = _kind_of(type(value))
        if kind is Tensor:
            yield from parts(value)
        elif kind is not None and id(value) not in seen:
            seen.add(id(value))
            container = value if kind is not object else getattr(value, "__dict__", None)
            left += [item for _, item in _items(_copied(container))]


def holds_graph_memory(value: Any, device: GraphDevice, pool: GraphPool) -> bool:
    """True if a value is, or holds, a tensor that a capture into the pool made: it means nothing outside a replay."""
    found = (part for part in tensors_in(value) if has_address(part) and part.device == device.torch_device)
    return any(device.in_pool(pool, part) for part in found)


def has_address(tensor: Tensor) -> bool:
    """True if the tensor is memory that a graph can read."""
    return tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_nested or is_lazy(tensor))


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Tell where a tensor lies and how: the same memory transposed is other numbers to a graph."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@by_class
def _kind_of(kind: Any) -> Any:
    """`Tensor`, the class that copies a container, `object` if attributes count, None for what is not looked into."""
    for known in (Tensor, *_CONTAINERS, tuple):
        if issubclass(kind, known):
            return known
    if issubclass(kind, Optimizer):
        return None
    users = issubclass(kind, (nn.Module, *_NAMESPACES)) or str(kind.__module__).partition(".")[0] not in _LIBRARIES
    return object if users and kind.__dictoffset__ and not issubclass(kind, (*ATOMS, *_CODE)) else None


# By the methods of the container classes themselves: subclasses may refuse, decode or do more.


def _copied(container: Any) -> Any:
    kind = _kind_of(type(container))
    if kind is dict:
        return dict(dict.items(container))
    return [] if kind in (None, object, Tensor) else kind(kind.__iter__(container))


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return [(key, value) for key, value in container.items() if key != _UNSEEN]
    return enumerate(container)


def _untouched(container: Any, before: Any) -> bool:
    """True if it holds the very same objects in the same order; quick, since it is asked of every container."""
    kind = _kind_of(type(container))
    if kind.__len__(container) != len(before) or not all(map(operator.is_, kind.__iter__(container), before)):
        return False
    return kind is not dict or all(map(operator.is_, dict.values(container), before.values()))


def _same(now: Any, before: Any) -> bool:
    """True for the same object, and for equal values that nothing can change inside."""
    if now is before:
        return True
    if isinstance(now, tuple) and type(now) is type(before) and len(now) == len(before):
        return all(map(_same, now, before))
    return type(now) is type(before) and isinstance(now, ATOMS) and now == before


def _tensors_differ(container: Any, before: Any) -> bool:
    """True if a container gained or lost something that holds tensors."""
    now, then = ({id(item): item for _, item in _items(held)} for held in (_copied(container), before))
    changed = [(now | then)[key] for key in now.keys() ^ then.keys()]
    return next(tensors_in(changed), None) is not None


def _refill(container: Any, before: Any) -> None:
    if not isinstance(container, dict):
        kind = _kind_of(type(container))
        kind.clear(container)
        (kind.update if kind is set else kind.extend)(container, before)
        return
    for key in dict.keys(container) - before.keys() - {_UNSEEN}:
        put(container, key, ABSENT)
    ordered = [key for key in dict.keys(container) if key in before] == [key for key in before if key in container]
    for key, value in before.items():
        if not ordered and key in container:
            put(container, key, ABSENT)  # which puts it last
        put(container, key, value)
