"""Order what a reading reads: entries of the modules' attributes, of which versions tell, and slots of containers."""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from simplegraph.base.objects import own_dict

Link = tuple[Any, Any, Any]  # a holder, a key or index in it, and what it held
SETTINGS = frozenset({type(None), bool, int, float, str})  # types whose values are compared
REGISTRIES = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (list, dict, collections.deque)

# One level of nesting: the index of each slot's container in the level above, each slot's key, and which of the values
# are opened for the next level: their indices, with True for an object's attributes, False for a container's items.
Level = tuple[list[int], list[Any], list[tuple[int, bool]]]


class AttributeEntries:
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
        self._settings_at = getter(list(settings))
        self._others_at = getter([name for name in entries if name not in settings])
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


def split(
    modules: Sequence[nn.Module], links: Iterable[Sequence[Link]]
) -> tuple[list[AttributeEntries], list[Sequence[Link]]]:
    """Divide links into entries of the modules' attributes, of which versions tell, and those to be read in every call.

    Tensors move, containers fill, and modules are given another class without a change of the attribute.
    """
    entries: list[dict[str, Any]] = []
    for module in modules:
        held = vars(module)  # another module's mode is what a compiled one's is
        own = {name: held[name] for name in ("training", *HOOKS) if name in held}
        # The registries that hold something are read in every call: they are not kept.
        entries.append(own | {name: held[name] for name in REGISTRIES if not held[name]})
    by_holder = {id(vars(module)): held for module, held in zip(modules, entries, strict=True)}
    read = []
    for chain in links:
        holder, name, value = chain[0]
        entry = by_holder.get(id(holder))
        if len(chain) > 1 or entry is None or issubclass(type(value), (Tensor, nn.Module)) or _is_opened(value):
            read.append(chain)
        else:
            entry[name] = value
    return [AttributeEntries(held, vars(module)) for module, held in zip(modules, entries, strict=True)], read


def _is_opened(value: Any) -> bool:
    """True for what tensors may be added to: a container, or an object without attributes that may get some."""
    return issubclass(type(value), _CONTAINERS) or (not callable(value) and own_dict(value) == {})


def levels_of(attributes: list[dict[str, Any]], links: Iterable[Sequence[Link]]) -> tuple[list[Any], list[Level]]:
    """Order slots so that each is read of a container which was read before it, and each is read once.

    Returns:
        The containers that the first slots are read of, beside attributes of modules, and the levels.
    """
    first = {id(held): at for at, held in enumerate(attributes)}
    bases: list[Any] = []
    levels: list[Level] = []
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


def getter(indices: Sequence[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads these indices of a sequence, or keys of a dict."""
    if len(indices) > 1:
        return operator.itemgetter(*indices)
    return (lambda values: (values[indices[0]],)) if indices else (lambda values: ())
