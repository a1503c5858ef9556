"""The state that captured graphs read of a module, and the check that all of it is still in place."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from simplegraph.graph.tensors import parts, storage_key
from simplegraph.module.changes import Changes, watch_module, watch_tensors
from simplegraph.module.snapshot import has_address, place

_DEPTH = 3  # containers inside each other that an attribute's tensors are looked for in


class HeldTensor(NamedTuple):
    """A tensor and where it is found: ``holder[key] is tensor``; the same for the containers that lead there."""

    name: str
    holder: Any
    key: Any
    tensor: Tensor
    path: tuple[tuple[Any, Any, Any], ...] = ()

    @property
    def links(self) -> tuple[tuple[Any, Any, Any], ...]:
        """Every (holder, key, value) on the way from the module to the tensor."""
        return (*self.path, (self.holder, self.key, self.tensor))


class CapturedState:
    """Remembers what graphs captured from a module read of it, and notices when any of that moved.

    Args:
        module: the module that was captured.
        external: memory the capture was seen to read, by storage key (see `MemoryObserver`). It is
            owned here, so that a graph never reads freed memory.

    Attributes:
        seen: the count of changes up to which all was in place.
        watches_plain: True if ordinary attributes are compared at every call.
    """

    def __init__(self, module: nn.Module, external: dict[int, Tensor]) -> None:
        watch_tensors()
        watch_module(module)
        self.seen = Changes.count
        self._registered = list(_registered(module))
        self._parts = [_Part(name, child) for name, child in module.named_modules()]
        plain = [entry for entry in _plain(module) if not external.keys().isdisjoint(_keys(entry.tensor))]
        links = {(id(holder), key): (holder, key, value) for entry in plain for holder, key, value in entry.links}
        self._plain_links: tuple[tuple[Any, ...], ...] = tuple(
            zip(*links.values(), strict=True)
        )  # holders, keys, values
        self.watches_plain = bool(links)
        known = {id(part) for entry in (*self._registered, *plain) for part in parts(entry.tensor)}
        found = [
            HeldTensor(f"a {tuple(t.shape)} tensor from elsewhere", [t], 0, t)
            for t in external.values()
            if id(t) not in known
        ]
        self._places = [(entry, _place(entry.tensor)) for entry in (*self._registered, *plain, *found)]
        # The module owns what is registered; whoever moves that frees it at once, and is noticed. Memory
        # found elsewhere has no owner we know, so it is kept: by views, since a tensor that moves takes
        # its old memory along.
        registered = {key for entry in self._registered for key in _keys(entry.tensor)}
        self._owned = [tensor.detach() for key, tensor in external.items() if key not in registered]
        Changes.watched.update(id(part) for entry, _ in self._places for part in (entry.tensor, *parts(entry.tensor)))
        Changes.watched.update(id(part.module) for part in self._parts)

    def moved(self) -> bool:
        """True if anything is no longer where the graphs read it. Cheap enough for every call."""
        seen = Changes.count
        if self.seen != seen:
            if self.what_moved():
                return True
            self.seen = seen  # another tensor or module changed, or this one was changed and changed back
        return self.watches_plain and self._plain_replaced()

    def _plain_replaced(self) -> bool:
        holders, keys, values = self._plain_links
        found = map(operator.getitem, holders, keys)
        try:
            return not all(map(operator.is_, found, values))
        except LookupError:
            return True

    def parameters(self) -> Iterator[Tensor]:
        """Return the module's parameters, as they were found at capture."""
        return (entry.tensor for entry in self._registered)

    def what_moved(self) -> list[str]:
        """Name everything that moved or was replaced."""
        names = []
        for entry, lay in self._places:
            if any(_get(holder, key) is not value for holder, key, value in entry.links):
                names.append(f"{entry.name} (replaced)")
            elif _place(entry.tensor) != lay:
                names.append(f"{entry.name} (moved)")
        for part in self._parts:
            names += part.changes()
        return names


@dataclasses.dataclass(eq=False)
class _Part:
    """Remembers a submodule by everything but its tensors' places that decides what its call does."""

    name: str
    module: nn.Module

    def __post_init__(self) -> None:
        holders = (self.module._parameters, self.module._buffers, self.module._modules)
        self._before = [(holder, dict(holder)) for holder in holders]
        self._mode = _mode(self.module)

    def changes(self) -> list[str]:
        """Name what is not as it was; a tensor that was replaced is named elsewhere."""
        dot = f"{self.name}." if self.name else ""
        names = []
        for holder, before in self._before:
            names += [f"{dot}{key} (added)" for key in holder if before.get(key) is None and holder[key] is not None]
            modules = ((key, value) for key, value in before.items() if isinstance(value, nn.Module))
            names += [f"submodule {dot}{key} (replaced)" for key, value in modules if holder.get(key) is not value]
        if _mode(self.module) != self._mode:
            names.append(f"{self.name or 'the module'} (training mode or hooks)")
        return names


def _mode(module: nn.Module) -> tuple[Any, ...]:
    """Return whether a module is in training mode, and the ids of its hooks."""
    return module.training, tuple(module._forward_pre_hooks), tuple(module._forward_hooks)


def _get(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except LookupError:
        return None


def held_tensors(module: nn.Module) -> list[HeldTensor]:
    """List every tensor that the module holds in parameters, buffers and ordinary attributes."""
    return [*_registered(module), *_plain(module)]


def _registered(module: nn.Module) -> Iterator[HeldTensor]:
    for prefix, child in module.named_modules():
        for holder in (child._parameters, child._buffers):
            for key, tensor in holder.items():
                if tensor is not None:
                    yield HeldTensor(f"{prefix}.{key}" if prefix else key, holder, key, tensor)


def _plain(module: nn.Module) -> Iterator[HeldTensor]:
    """Find the tensors in ordinary attributes, alone or inside lists, tuples and dicts."""
    for prefix, child in module.named_modules():
        holder = vars(child)
        for key, value in list(holder.items()):
            if key in _NO_TENSORS or type(value) in _ATOMS:
                continue
            yield from _inside(f"{prefix}.{key}" if prefix else key, holder, key, value)


_NO_TENSORS = frozenset(vars(nn.Module())) | {"_simplegraph"}  # registered ones are found elsewhere
_ATOMS = frozenset({type(None), bool, int, float, str})


def _inside(name: str, holder: Any, key: Any, value: Any, path: tuple[Any, ...] = ()) -> Iterator[HeldTensor]:
    if isinstance(value, Tensor):
        yield HeldTensor(name, holder, key, value, path)
    elif len(path) < _DEPTH:
        inner, items = _contents(value)
        for item_key, item in items:
            yield from _inside(f"{name}.{item_key}", inner, item_key, item, (*path, (holder, key, value)))


def _contents(value: Any) -> tuple[Any, list[tuple[Any, Any]]]:
    """Open a container, or an object's attributes: it, and what it holds by index or key."""
    if isinstance(value, (list, tuple)):
        return value, list(enumerate(value))
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (dict, ModuleType)):
        value = vars(value)
    # A copy: the collector may take entries out of a weak dictionary while a list of them is made.
    return value, list(dict(value).items()) if isinstance(value, dict) else []


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(place(part) if has_address(part) else None for part in parts(tensor))


def _keys(tensor: Tensor) -> set[int]:
    """Identify its memory."""
    return {storage_key(part) for part in parts(tensor) if has_address(part)}
