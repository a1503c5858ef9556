"""What Python can change about a module: attributes, containers, plain objects, the places of its tensors.

A capture executes nothing on the device, but Python runs. Whatever the forward changed meanwhile belongs to no call of
the user's, so it is put back; and what changed says whether a replay can stand for a call at all.
"""

from __future__ import annotations

import collections
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
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # left out of names, as users know them
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph"}  # whose objects do more than hold values
_UNSEEN = frozenset({"_simplegraph"})  # a wrapper's own runner


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
        # By id: a container, or an object's attributes, and what it held; a tensor, its memory, and how it lay there.
        self._holders: dict[int, tuple[str, Any, Any]] = {}
        self._tensors: dict[int, tuple[str, Tensor, Tensor, tuple[Any, ...]]] = {}
        left: collections.deque[tuple[str, Any]] = collections.deque([("", module)])
        while left and len(self._holders) < _MAX_HOLDERS:
            name, value = left.popleft()
            if isinstance(value, Tensor):
                self._note(name, value)
            elif isinstance(value, tuple):
                left.extend(_named(name, enumerate(value)))
            else:
                container = _container(value)
                if container is not None and id(container) not in self._holders:
                    before = _copied(container)
                    self._holders[id(container)] = (name, container, before)
                    left.extend(_named(name, _items(before)))

    def _note(self, name: str, tensor: Tensor) -> None:
        for part in parts(tensor):
            if part.layout is torch.strided and not part.is_meta and id(part) not in self._tensors:
                self._tensors[id(part)] = (name, part, part.detach(), place(part))

    def changes(self) -> list[Change]:
        """Find every place that holds something else, and every tensor that was moved.

        A dict, and hence an object, is told apart by its keys; a list, a set or a deque is one place.
        """
        found: list[Change] = []
        for name, container, before in self._holders.values():
            if isinstance(container, dict):
                now, then = dict(_items(container)), dict(_items(before))
                changed = {key: value for key, value in now.items() if key not in then or not _same(value, then[key])}
                changed |= dict.fromkeys(then.keys() - now.keys())
                found += [Change(*named) for named in _named(name, changed.items())]
            elif not _equal(container, before):
                found.append(Change(name, list(container)))
        return found + [Change(name, tensor) for name, tensor, _ in self._moved()]

    def put_back(self) -> None:
        """Let every place hold what it held, and every tensor lie where it lay."""
        for _, container, before in self._holders.values():
            if isinstance(container, dict) or not _equal(container, before):
                _refill(container, before)
        for _, tensor, memory in self._moved():
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = memory

    def _moved(self) -> list[tuple[str, Tensor, Tensor]]:
        tensors = self._tensors.values()
        return [(name, tensor, memory) for name, tensor, memory, lay in tensors if place(tensor) != lay]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor that a value is or holds, in containers and plain objects."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < _MAX_HOLDERS:
        value = left.pop()
        if isinstance(value, Tensor):
            yield from parts(value)
        elif isinstance(value, tuple):
            left += value
        else:
            container = _container(value)
            if container is not None and id(container) not in seen:
                seen.add(id(container))
                left += [item for _, item in _items(container)]


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies and how: the same memory transposed is other numbers to a graph."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _container(value: Any) -> Any:
    """The container that a value is, or that has its attributes; None for what is not looked into."""
    if isinstance(value, _CONTAINERS):
        return value
    attributes = None if isinstance(value, (*ATOMS, *_CODE)) else getattr(value, "__dict__", None)
    users = isinstance(value, nn.Module) or type(value).__module__.partition(".")[0] not in _LIBRARIES
    return attributes if isinstance(attributes, dict) and users else None


def _copied(container: Any) -> Any:
    kind: Callable[[Any], Any] = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    return kind(container)


def _items(container: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(container, dict):
        return [(key, value) for key, value in container.items() if key not in _UNSEEN]
    return ((id(item), item) for item in container) if isinstance(container, set) else enumerate(container)


def _named(name: str, items: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any]]:
    for key, value in items:
        yield name if key in _REGISTERED else f"{name}.{key}" if name else str(key), value


def _same(value: Any, before: Any) -> bool:
    """True if it is the same object, or a plain value that cannot be told from it."""
    if value is before:
        return True
    return type(value) is type(before) and isinstance(value, ATOMS) and constant_key(value) == constant_key(before)


def _equal(container: Any, before: Any) -> bool:
    if len(container) != len(before):
        return False
    return all(_same(one, other) for (_, one), (_, other) in zip(_items(container), _items(before), strict=True))


def _refill(container: Any, before: Any) -> None:
    if not isinstance(container, dict):
        container.clear()
        (container.update if isinstance(container, set) else container.extend)(before)
        return
    # By the methods of the class itself: subclasses may refuse, or do more.
    kind: Any = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
    for key in [key for key in container if key not in before]:
        kind.__delitem__(container, key)
    for key, value in before.items():
        if key not in container or container[key] is not value:
            kind.__setitem__(container, key, value)
