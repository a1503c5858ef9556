"""Order the places that a reading reads: attributes of modules, which have versions, and slots of containers.

A link is one step from a holder to a value: (holder, key, value). A chain of links leads to a slot, which is an item of
a container or an attribute of an object.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from simplegraph.base.objects import identity_hash, own_dict

_get = object.__getattribute__  # past the object's own class
Link = tuple[Any, Any, Any]  # a holder, a key or index in it, and its value


class SecondPath(tuple[Link, ...]):
    """A chain of links to a container whose contents are checked on another path: here only its identity is."""


SETTINGS = frozenset({type(None), bool, int, float, str})  # types whose values are checked
REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, collections.deque)

# The slots at one level of nesting: for each slot the index of its container in the level above, and its key; and the
# indices of values that are opened for the next level, with True to open an object's attributes, False for its items.
Level = tuple[list[int], list[Any], list[tuple[int, bool]]]


class AttributeEntries:
    """Checks the attributes of one module: settings by type and value, everything else by identity.

    Args:
        entries: attributes to check, by name.
        names: the names of all attributes, including those that are not checked.
    """

    def __init__(self, entries: dict[str, Any], names: Iterable[str]) -> None:
        settings = {name: value for name, value in entries.items() if type(value) in SETTINGS}
        # Kept alive, so that their ids are not reused.
        self._others = [value for name, value in entries.items() if name not in settings]
        self._ids = tuple(map(id, self._others))
        self._settings_at = getter(list(settings))
        self._others_at = getter([name for name in entries if name not in settings])
        self._settings, self._types = tuple(settings.values()), tuple(map(type, settings.values()))
        self._names = set(names)

    def hold(self, attributes: dict[str, Any]) -> bool:
        """True if the attributes are equal, and none was added or removed."""
        settings = self._settings_at(attributes)  # types are compared first: a one-element tensor may equal a number
        return (
            attributes.keys() == self._names
            and tuple(map(type, settings)) == self._types
            and settings == self._settings
            and tuple(map(id, self._others_at(attributes))) == self._ids
        )


def split_links(
    modules: Sequence[nn.Module], links: Iterable[Sequence[Link]]
) -> tuple[list[AttributeEntries], list[Sequence[Link]], list[Sequence[Link]]]:
    """Divide links into three groups, by how a change of their values is noticed.

    Returns:
        Attributes of modules, whose versions show a change. Links to tensors and modules, which are read at every call,
        since a tensor may be moved, and a module may get another class, without a change of the attribute. All other
        links.
    """
    entries: list[dict[str, Any]] = []
    for module in modules:
        attributes = vars(module)  # a compiled module has the mode of another module
        mode_and_hooks = {name: attributes[name] for name in ("training", *HOOKS) if name in attributes}
        # Registries that are not empty are read at every call, and are not kept here.
        empty = {name: attributes[name] for name in REGISTRIES if not attributes.get(name, True)}
        entries.append(mode_and_hooks | empty)
    by_holder = {id(vars(module)): module_entries for module, module_entries in zip(modules, entries, strict=True)}
    always, others = [], []
    for chain in links:
        holder, name, value = chain[0]
        entry = by_holder.get(id(holder))
        if issubclass(type(chain[-1][-1]), (Tensor, nn.Module)):
            always.append(chain)
        elif len(chain) > 1 or entry is None or (_is_opened(value) and type(chain) is not SecondPath):
            others.append(chain)
        else:
            entry[name] = value
    checked = zip(entries, map(vars, modules), strict=True)
    return [AttributeEntries(expected, attributes) for expected, attributes in checked], always, others


def _is_opened(value: Any) -> bool:
    """True for a container, and for an object without attributes: tensors may be added to them."""
    return issubclass(type(value), _CONTAINERS) or (not callable(value) and own_dict(value) == {})


def levels_of(attributes: list[dict[str, Any]], links: Iterable[Sequence[Link]]) -> tuple[list[Any], list[Level]]:
    """Order slots so that each container is read before its slots, and each slot is read once.

    Returns:
        Containers at which chains begin, beside attributes of modules; and the levels.
    """
    first = {id(holder): at for at, holder in enumerate(attributes)}
    bases: list[Any] = []
    levels: list[Level] = []
    slots: dict[tuple[int, int, Any], int] = {}  # (level, container, key) -> the index of the value
    opened: dict[tuple[int, int, bool], int] = {}  # (level, index of the value, by attributes) -> its index
    for chain in links:
        container = first.get(id(chain[0][0]))
        if container is None:
            container = first[id(chain[0][0])] = len(first)
            bases.append(chain[0][0])
        for depth, (_, key, value) in enumerate(chain):
            if depth == len(levels):
                levels.append(([], [], []))
            parents, keys, containers = levels[depth]
            # Keys are compared as dicts do, except that tensors are compared by identity.
            slot = depth, container, id(key) if issubclass(type(key), Tensor) else (type(key), key)
            at = slots.get(slot)
            if at is None:
                at = slots[slot] = len(keys)
                parents.append(container)
                keys.append(key)
            is_last = depth + 1 == len(chain)
            if not is_last or (_is_opened(value) and type(chain) is not SecondPath):
                is_container = issubclass(type(value), _CONTAINERS)
                step = at, not is_container if is_last else chain[depth + 1][0] is not value
                container = opened.setdefault((depth, *step), len(containers))
                if container == len(containers):
                    containers.append(step)
    return bases, levels


class Slots:
    """Reads the slots that chains of links lead to, each once.

    Args:
        attributes: the attributes of modules at which chains may begin.
        links: the chains of links.

    Attributes:
        bases: other containers at which chains begin; first: the index of the first chain's container among all.
        opened: the indices of values that are containers: their contents are checked, not their identity.
    """

    def __init__(self, attributes: list[dict[str, Any]], links: Iterable[Sequence[Link]]) -> None:
        self.bases, self._levels = levels_of(attributes, links)
        self.first: int = self._levels[0][0][0]
        self.opened: set[int] = set()
        start = 0
        for _, keys, containers in self._levels:
            self.opened |= {start + at for at, _ in containers}
            start += len(keys)

    def read(self, attributes: list[dict[str, Any]], values: list[Any]) -> list[Any]:
        """Add the values of all slots to `values`; return the opened containers. May raise if a slot is gone."""
        containers: list[Any] = []
        holders: Sequence[Any] = [*attributes, *self.bases]
        for parents, keys, opened in self._levels:
            slots = list(map(operator.getitem, map(holders.__getitem__, parents), keys))
            values += slots
            holders = [_get(slots[at], "__dict__") if by_attributes else slots[at] for at, by_attributes in opened]
            containers += holders
        return containers


class SlotValues:
    """Checks the values of slots: settings by type and value, containers by length, everything else by identity.

    Args:
        attributes: the attributes of modules.
        links: the chains of links to the slots, which all begin at one attribute, or in one container.
    """

    def __init__(self, attributes: list[dict[str, Any]], links: Iterable[Sequence[Link]]) -> None:
        self._slots = slots = Slots(attributes, links)
        values: list[Any] = []
        containers = slots.read(attributes, values)
        self._lengths = list(map(len, containers))
        rest = [at for at in range(len(values)) if at not in slots.opened]
        self._settings_at = getter([at for at in rest if type(values[at]) in SETTINGS])
        self._others_at = getter([at for at in rest if type(values[at]) not in SETTINGS])
        self._settings = self._settings_at(values)
        self._types = list(map(type, self._settings))
        self._others = self._others_at(values)  # kept alive, so that their ids are not reused
        self._ids = list(map(identity_hash, self._others))

    def containers_if_same(self, attributes: list[dict[str, Any]]) -> list[Any] | None:
        """Return all containers if nothing changed, else None. May raise if a slot is gone."""
        values: list[Any] = []
        containers = self._slots.read(attributes, values)
        settings = self._settings_at(values)  # types are compared first: a one-element tensor may equal a number
        is_same = (
            list(map(len, containers)) == self._lengths
            and list(map(identity_hash, self._others_at(values))) == self._ids
            and list(map(type, settings)) == self._types
            and settings == self._settings
        )
        return [[*attributes, *self._slots.bases][self._slots.first], *containers] if is_same else None


def getter(indices: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads the items at these indices of a sequence, or at these keys of a dict."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else (lambda values: ())
