"""What Python can change about a module: attributes, containers, plain objects, the places of its tensors.

A capture executes nothing on the device, but Python runs. Whatever the forward changed meanwhile belongs to no call of
the user's, so it is put back; and what changed says whether a replay can stand for a call at all.
"""

from __future__ import annotations

import collections
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from simplegraph.graph.tensors import parts
from simplegraph.nested import ATOMS, constant_key

# Far above a model's own objects (an 8B transformers model has 7,000): a bound for what hangs on by accident.
_MAX_HOLDERS = 100_000
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_CONTAINERS = (dict, list, set, collections.deque)
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph"}  # whose objects do more than hold values
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # left out of names, as users know them
_UNSEEN = "_simplegraph"  # a wrapper's own runner


class Change(NamedTuple):
    """A place that holds something else than it did: its name, dotted from the module, and what it holds now."""

    name: str
    value: Any


class Snapshot:
    """Who holds what below a module, and where each tensor lies.

    Functions, classes, modules of Python and objects of its standard library, of torch (`nn.Module` excepted) and of
    this library are not looked into. Values of tensors are not copied: a capture writes none.
    """

    def __init__(self, module: nn.Module) -> None:
        # A container or an object's attributes, what it held, the index of what holds it, and under which key.
        self._holders: list[tuple[Any, Any, int, Any]] = []
        self._tensors: list[tuple[Tensor, Tensor, tuple[Any, ...], int, Any]] = []
        seen: set[int] = set()
        left: collections.deque[tuple[Any, int, Any]] = collections.deque([(module, -1, "")])
        while left and len(self._holders) < _MAX_HOLDERS:
            value, parent, key = left.popleft()
            kind = _kind_of(type(value))
            if kind is Tensor:
                self._note(value, parent, key, seen)
                continue
            container = vars(value) if kind is object else value
            if id(container) in seen:
                continue
            seen.add(id(container))
            before = dict(container) if kind is object else kind(container)
            for name, item in _items(before):
                if _kind_of(type(item)) is not None:
                    left.append((item, len(self._holders), name))
            self._holders.append((container, before, parent, key))

    def _note(self, tensor: Tensor, parent: int, key: Any, seen: set[int]) -> None:
        for part in parts(tensor):
            if part.layout is torch.strided and not part.is_meta and id(part) not in seen:
                seen.add(id(part))
                self._tensors.append((part, part.detach(), place(part), parent, key))

    def changes(self) -> list[Change]:
        """Find every place that holds something else, and every tensor that was moved.

        A dict, and hence an object, is told apart by its keys; a list, a set or a deque is one place.
        """
        found: list[Change] = []
        for index, (container, before, parent, key) in enumerate(self._holders):
            if _untouched(container, before):
                continue
            if isinstance(container, dict):
                for name in (container.keys() | before.keys()) - {_UNSEEN}:
                    item = container.get(name)
                    if name not in before or name not in container or not _same(item, before[name]):
                        found.append(Change(self._name(index, name), item))
            elif len(container) != len(before) or not all(map(_same, container, before)):
                found.append(Change(self._name(parent, key), list(container)))
        return found + [Change(self._name(parent, key), tensor) for tensor, _, parent, key in self._moved()]

    def _name(self, holder: int, key: Any) -> str:
        names = [str(key)]
        while holder >= 0:
            _, _, holder, key = self._holders[holder]
            names += [] if key in _REGISTERED or key == "" else [str(key)]
        return ".".join(reversed(names))

    def put_back(self) -> None:
        """Let every place hold what it held, and every tensor lie where it lay."""
        for container, before, _, _ in self._holders:
            if not _untouched(container, before):
                _refill(container, before)
        for tensor, memory, _, _ in self._moved():
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = memory

    def _moved(self) -> list[tuple[Tensor, Tensor, int, Any]]:
        return [(tensor, *where[:1], *where[2:]) for tensor, *where in self._tensors if place(tensor) != where[1]]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor that a value is or holds, in containers and plain objects."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MAX_HOLDERS:
        value = left.pop()
        kind = _kind_of(type(value))
        if kind is Tensor:
            yield from parts(value)
        elif kind is not None and id(value) not in seen:
            seen.add(id(value))
            left += [item for _, item in _items(vars(value) if kind is object else value)]


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how: the same memory transposed is other numbers to a graph."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@functools.lru_cache(maxsize=4096)
def _look_up(kind: Any) -> Any:
    """`Tensor`, the class that copies a container, `object` if attributes count, None for what is not looked into."""
    if issubclass(kind, Tensor):
        return Tensor
    for container in (*_CONTAINERS, tuple):
        if issubclass(kind, container):
            return container
    users = issubclass(kind, nn.Module) or kind.__module__.partition(".")[0] not in _LIBRARIES
    return object if users and kind.__dictoffset__ and not issubclass(kind, (*ATOMS, *_CODE)) else None


_kind_of: Callable[[Any], Any] = _look_up  # a class is hashable, whatever its type says


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return [(key, value) for key, value in container.items() if key != _UNSEEN]
    return enumerate(container)


def _untouched(container: Any, before: Any) -> bool:
    """True if it holds the very same objects in the same order; quick, since it is asked of every container."""
    if len(container) != len(before) or not all(map(operator.is_, container, before)):
        return False
    return not isinstance(container, dict) or all(map(operator.is_, container.values(), before.values()))


def _same(value: Any, before: Any) -> bool:
    """True if it is the same object, or a plain value that cannot be told from it."""
    if value is before:
        return True
    return type(value) is type(before) and isinstance(value, ATOMS) and constant_key(value) == constant_key(before)


def _refill(container: Any, before: Any) -> None:
    if not isinstance(container, dict):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before)
        return
    # By the methods of the class itself: subclasses may refuse, or do more.
    kind: Any = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
    for key in container.keys() - before.keys() - {_UNSEEN}:
        kind.__delitem__(container, key)
    for key, value in before.items():
        kind.__setitem__(container, key, value)
