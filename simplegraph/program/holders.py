"""Find what keeps an object alive, and name it as a user would."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from simplegraph.program.places import held_by, is_library, is_namespace

_DEPTH = 8  # how far a name may be from the tensor
_MAX_HOLDERS = 2_000  # at one depth
_CONTAINERS = (dict, list, set, collections.deque)
_LRU: Any = type(functools.lru_cache(bool))
_SUSPENDED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_TOPS = (types.FunctionType, type, types.FrameType, threading.local, _LRU, *_SUSPENDED)
# Where a name begins, beside a module's globals: nothing above them tells more.
_NAMED = (nn.Module, *_TOPS)


def holder_names(objects: Sequence[Any]) -> list[str]:
    """Name the places that hold some objects."""
    holders = _Holders(objects)
    paths = [[holders.things[step] for step in path] for thing in objects for path in holders.paths(id(thing))]
    return list(dict.fromkeys(map(_name, paths)))


class _Holders:
    """Finds what holds some objects, up to something that has a name."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.things: dict[int, Any] = {id(thing): thing for thing in objects}
        self._above: dict[int, list[int]] = {}
        self._look_up({id(objects)}, [id(thing) for thing in objects])

    def _look_up(self, ours: set[int], objects: Sequence[int]) -> None:
        """Collect the holders of the objects, the holders of these, and so on, up to those that have names.

        Args:
            ours: ids of holders that do not count.
            objects: ids of the objects.
        """
        level = list(self.things.values())
        ours |= {id(level), id(self.things), id(vars(self)), *_running_frames()}
        for _ in range(_DEPTH):
            wanted = {id(thing) for thing in level}
            found: list[Any] = []
            referrers = gc.get_referrers(*level)
            for holder in referrers:
                if id(holder) in ours or isinstance(holder, _Holders):
                    continue
                for child in {id(held) for held in gc.get_referents(holder)} & wanted:
                    self._above.setdefault(child, []).append(id(holder))
                if id(holder) not in self.things:
                    self.things[id(holder)] = holder
                    found += [] if _is_named(holder) else [holder]
            del referrers
            level.clear()
            level += found[:_MAX_HOLDERS]
            found.clear()
            if not level or all(_is_named(self.things[path[-1]]) for thing in objects for path in self.paths(thing)):
                break

    def paths(self, start: int) -> Iterator[list[int]]:
        """Yield, for each direct holder, the shortest way from an object up to a named thing, or as far as it goes."""
        for holder in self._above.get(start, ()):
            queue = collections.deque([[start, holder]])
            seen = {start, holder}
            path: list[int] = []
            while queue:
                path = queue.popleft()
                if _is_named(self.things[path[-1]]):
                    break
                above = [step for step in self._above.get(path[-1], ()) if step not in seen]
                seen.update(above)
                queue.extend([*path, step] for step in above)
            yield path


def _running_frames() -> Iterator[int]:
    frame = sys._getframe()
    while frame is not None:
        yield id(frame)
        frame = frame.f_back  # type: ignore[assignment]


def _is_named(holder: Any) -> bool:
    return issubclass(type(holder), _NAMED) or is_namespace(holder)


# Names.


def _name(path: Sequence[Any]) -> str:
    """Name the place where the first object of a path hangs; the last one has a name, if anything has."""
    top, below = path[-1], path[-2]
    if is_namespace(top):
        return f"the global {_key(top, below)} of {top['__name__']}"
    if isinstance(top, types.FunctionType) and not is_library(top.__module__):
        return _name_in_function(top, path)
    if isinstance(top, threading.local):
        return f"the attribute {_key(*path[-3:-5:-1]) if len(path) > 3 else '?'} of a threading.local"
    if isinstance(top, types.FrameType):
        # Python 3.10 keeps what a suspended generator holds in a frame of its own.
        owners = gc.get_referrers(top) if sys.version_info < (3, 11) else ()
        suspended = next((owner for owner in owners if isinstance(owner, _SUSPENDED)), None)
        if suspended is None:
            return f"a local variable of {top.f_code.co_name}, whose frame is kept"
        top = suspended
    for kind, what in _WORDS:
        if isinstance(top, kind):
            return f"the {what} {top.__qualname__}"
    named = (attribute for place in range(1, len(path)) if (attribute := _attribute(path, place)))
    owner, key = next(named, (None, None))
    if owner is None:
        return f"a {type(below if len(path) > 2 else top).__name__}"
    kind = f"class {owner.__qualname__}" if isinstance(owner, type) else f"a {type(owner).__qualname__}"
    return f"the attribute {key} of {kind}"


_WORDS: tuple[tuple[Any, str], ...] = (
    (_LRU, "cache of"),
    (types.CoroutineType, "suspended coroutine"),
    (_SUSPENDED, "suspended generator"),
)


def _name_in_function(function: types.FunctionType, path: Sequence[Any]) -> str:
    below = path[-2]
    if below is function.__closure__ and below is not None:
        variables = function.__code__.co_freevars
        variable = next((name for name, cell in zip(variables, below, strict=True) if cell is path[-3]), "?")
        return f"the variable {variable} in the closure of {function.__qualname__}"
    if below is function.__dict__:
        return f"the attribute {_key(below, path[-3])} of {function.__qualname__}"
    return f"a default argument of {function.__qualname__}"


def _attribute(path: Sequence[Any], place: int) -> tuple[Any, str] | None:
    """Return the object or class at a place of a path and the attribute it holds the place below by; None if none."""
    holder, held = path[place], path[place - 1]
    kind = type(holder)
    if isinstance(holder, type):
        return holder, _key(held, path[place - 2])
    if kind.__module__ == "builtins" or issubclass(kind, (tuple, *_CONTAINERS, *_TOPS)):
        return None  # of what a tuple holds, the owner of the tuple can let go
    attributes = getattr(holder, "__dict__", None)
    if held is attributes and place > 1:
        return holder, _key(held, path[place - 2])
    return holder, _key(held_by(holder), held)


def _key(container: Any, value: Any) -> Any:
    """Return the key that a dict holds a value by."""
    return next((key for key, item in list(dict.items(container or {})) if item is value), "?")
