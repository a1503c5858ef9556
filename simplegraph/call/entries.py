"""Entries that a call sets in the mappings that it is passed, such as TensorDicts: more outputs, put there at the end.

A graph's forward is passed mappings of its own. What it sets in them, a replay sets in the caller's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from simplegraph.base.nested import LibraryMapping, library_mapping


class Passed(NamedTuple):
    """Stands in an output for a mapping that the call was passed, by its number."""

    number: int


class Removed(NamedTuple):
    """Stands for an entry that the call deleted."""


class WithEntries(NamedTuple):
    """Holds what a run returned, and by mapping that it was passed the entries that it set."""

    result: Any
    entries: tuple[dict[str, Any], ...]


def written_mappings(args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """List the mappings that a call may write: arguments, and what lies in these."""
    return [mapping for value in (*args, *kwargs.values()) for mapping in _mappings_in(value)]


def _mappings_in(value: Any) -> Iterator[Any]:
    library = library_mapping(type(value))
    if library is not None:
        yield value
        for item in library.items(value).values():
            yield from _mappings_in(item)


def as_dicts(value: Any) -> Any:
    """Copy an argument that a call may write to a dict of the same items; return another one itself."""
    library = library_mapping(type(value))
    return value if library is None else {key: as_dicts(item) for key, item in library.items(value).items()}


def states_of(mappings: Iterable[Any]) -> list[Any]:
    """Return everything about mappings that their entries do not tell."""
    return [_library(mapping).state(mapping) for mapping in mappings]


def items_of(mappings: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the items of each mapping."""
    return [_library(mapping).items(mapping) for mapping in mappings]


def with_entries(result: Any, mappings: Sequence[Any], before: Iterable[Mapping[str, Any]]) -> WithEntries:
    """Return what a run returned with the entries that it set.

    Args:
        result: of the run.
        mappings: those that it was passed, as they were listed before it.
        before: their items before it.
    """
    entries = tuple(_changes(earlier, now) for earlier, now in zip(before, items_of(mappings), strict=True))
    numbers = {id(mapping): number for number, mapping in enumerate(mappings)}
    returned = _map(result, lambda value: Passed(numbers[id(value)]) if id(value) in numbers else value)
    return WithEntries(returned, entries)


def put_entries(result: Any, mappings: Sequence[Any]) -> Any:
    """Set what a call set in the caller's mappings, unless it is there already; return what the call returned.

    Args:
        result: of the call.
        mappings: those that it was passed, as they were listed before it ran.
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
    """Return the items that are other objects, or new; those that are gone are `Removed`."""
    put = {key: value for key, value in now.items() if key not in before or before[key] is not value}
    return put | {key: Removed() for key in before if key not in now}


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Change what lies in lists, tuples and dicts; those in which nothing changes are returned themselves."""
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
