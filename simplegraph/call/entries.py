"""Entries that a call sets in its arguments that are mappings, such as TensorDicts: they are further outputs.

The captured forward is passed separate mappings. A replay sets the entries that the forward set there in the caller's
mappings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from simplegraph.base.nested import LibraryMapping, library_mapping


class Passed(NamedTuple):
    """Represents, in an output, a mapping that the call was passed, by its number."""

    number: int


class Removed(NamedTuple):
    """Represents an entry that the call deleted."""


class WithEntries(NamedTuple):
    """The result of a run, and for each mapping that it was passed the entries that it set."""

    result: Any
    entries: tuple[dict[str, Any], ...]


def written_mappings(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the mappings that a call may write: arguments, and mappings inside them."""
    return [mapping for value in (*args, *kwargs.values()) for mapping in _mappings_in(value)]


def _mappings_in(value: Any) -> Iterator[Any]:
    library = library_mapping(type(value))
    if library is not None:
        yield value
        for item in library.items(value).values():
            yield from _mappings_in(item)


def as_dicts(value: Any) -> Any:
    """Copy a mapping that a call may write to a dict of the same items; return other arguments as they are."""
    library = library_mapping(type(value))
    return value if library is None else {key: as_dicts(item) for key, item in library.items(value).items()}


def states_of(mappings: Iterable[Any]) -> list[Any]:
    """Return the state of mappings beside their items, such as their batch size."""
    return [_library(mapping).state(mapping) for mapping in mappings]


def items_of(mappings: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the items of each mapping."""
    return [_library(mapping).items(mapping) for mapping in mappings]


def with_entries(result: Any, mappings: Sequence[Any], before: Iterable[Mapping[str, Any]]) -> WithEntries:
    """Return the result of a run together with the entries that the run set.

    Args:
        result: the result of the run.
        mappings: the mappings that the run was passed, as listed before the run.
        before: their items before the run.
    """
    entries = tuple(_changes(earlier, now) for earlier, now in zip(before, items_of(mappings), strict=True))
    numbers = {id(mapping): number for number, mapping in enumerate(mappings)}
    returned = _map(result, lambda value: Passed(numbers[id(value)]) if id(value) in numbers else value)
    return WithEntries(returned, entries)


def put_entries(result: Any, mappings: Sequence[Any]) -> Any:
    """Set a call's entries in the caller's mappings, unless they are there already; return the call's result.

    Args:
        result: the result of the call, with its entries.
        mappings: the caller's mappings, as listed before the call ran.
    """
    if type(result) is not WithEntries:
        return result
    for mapping, entries in zip(mappings, result.entries, strict=True):
        library = _library(mapping)
        items = library.items(mapping) if entries else {}
        for key, value in entries.items():
            if type(value) is not Removed:
                if items.get(key) is not value:
                    library.put(mapping, key, value)
            elif key in items:
                library.remove(mapping, key)
    return _map(result.result, lambda value: mappings[value.number] if type(value) is Passed else value)


def _library(mapping: Any) -> LibraryMapping:
    library = library_mapping(type(mapping))
    if library is None:
        raise TypeError(f"{type(mapping).__name__} is no mapping of a library")
    return library


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Return the items that were added or replaced; removed items have the value `Removed`."""
    put = {key: value for key, value in now.items() if key not in before or before[key] is not value}
    return put | {key: Removed() for key in before if key not in now}


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to the values in lists, tuples and dicts; return unchanged containers as they are."""
    changed = change(value)
    kind = type(value)
    if changed is not value or not issubclass(kind, (list, tuple, dict)):
        return changed
    if kind is dict:
        items = {key: _map(item, change) for key, item in value.items()}
        return items if any(items[key] is not item for key, item in value.items()) else value
    if kind not in (list, tuple) and not hasattr(kind, "_fields"):
        return value
    parts = [_map(item, change) for item in value]
    if all(map(operator.is_, parts, value)):
        return value
    return kind(parts) if kind in (list, tuple) else kind(*parts)
