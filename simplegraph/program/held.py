"""Read what an object holds, by keys, and put it back, running none of its code."""

from __future__ import annotations

import collections
import contextlib
import gc
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.nested import ATOMS
from simplegraph.base.tensors import has_address, parts

_Answer = TypeVar("_Answer")
ABSENT = object()
OPAQUE = object()  # the kind of what holds nothing that counts as its own: code, and objects of libraries
MAX_OBJECTS = 1_000_000  # far above a model's own (an 8B transformers model has 7,000): for what hangs on by accident
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph", "numpy", "triton"}
# Libraries whose objects hold what users put there.
_HOLDING = {"builtins", "collections", "queue", "weakref", "types", "functools", "itertools"}
_DICTS = (collections.OrderedDict, dict)
_SEQUENCES = (list, collections.deque, set, tuple)
_DULL = (types.BuiltinFunctionType, types.CodeType, *ATOMS)
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.CellType, threading.local, Optimizer)
_RUNNER = "_simplegraph"  # a wrapper's own, which is not the user's


def by_class(function: Callable[[type], _Answer]) -> Callable[[type], _Answer]:
    """Remember what a function returns for a class as long as the class lives.

    A class made for one object, as transformers' models get one for their graphs, may hold the object.
    """
    answers: dict[int, tuple[_Answer, weakref.ref[type]]] = {}

    def remembered(kind: type) -> _Answer:
        found = answers.get(number := id(kind))
        if found is None:
            gone = weakref.ref(kind, lambda _: answers.pop(number, None))
            found = answers[number] = function(kind), gone
        return found[0]

    return remembered


def is_library(name: Any) -> bool:
    """True for modules of Python, by name, that keep no tensors of users."""
    return str(name).partition(".")[0] in _LIBRARIES


@by_class
def is_users(kind: type) -> bool:
    """True for classes of objects that hold what users put there."""
    library = str(kind.__module__).partition(".")[0]
    return issubclass(kind, nn.Module) or library in _HOLDING or not is_library(library)


@by_class
def kind_of(kind: type) -> Any:
    """Return `Tensor`, the container class that a class is of, `object` if attributes count, `OPAQUE`, or None.

    The methods of the container class read and write it: subclasses may refuse, decode or do more. None is for values
    that lead to nothing.
    """
    for base in (Tensor, *_DICTS, *_SEQUENCES):
        if issubclass(kind, base):
            return base
    if issubclass(kind, _CLOSED):
        return OPAQUE
    if issubclass(kind, _DULL):
        return None
    # Entries of weak dictionaries go by themselves, and are not put back.
    has_attributes = kind.__module__ not in ("builtins", "weakref") and (kind.__dictoffset__ or _slots(kind))
    return object if has_attributes and is_users(kind) else OPAQUE


@by_class
def _slots(kind: type) -> dict[str, types.MemberDescriptorType]:
    members = (member for base in kind.__mro__[::-1] for member in vars(base).items())
    return {name: member for name, member in members if type(member) is types.MemberDescriptorType}


def held_by(place: Any) -> Any:
    """Return what a container, a cell, a function, a class or a user's object holds; None if it is none of these.

    Lists, deques, sets and tuples are returned as a tuple, all else as a dict.
    """
    kind = type(place)
    base = kind_of(kind)
    if base in _DICTS:
        return dict(dict.items(place))
    if base in _SEQUENCES:
        return tuple(base.__iter__(place))
    if base is object:
        return _attributes(place, kind)
    if kind is types.CellType:
        return {"cell_contents": place.cell_contents} if gc.get_referents(place) else {}  # an empty one
    return dict(vars(place)) if base is OPAQUE and issubclass(kind, (type, types.FunctionType)) else None


def _attributes(thing: Any, kind: type) -> dict[str, Any]:
    """Return an object's filled slots and attributes."""
    held: dict[str, Any] = {}
    for name, slot in _slots(kind).items():
        with contextlib.suppress(AttributeError):
            held[name] = slot.__get__(thing)
    held |= own_dict(thing) or {}
    held.pop(_RUNNER, None)
    return held


def own_dict(thing: Any) -> dict[str, Any] | None:
    """Return the dict of an object's attributes, past what its class makes of them; None if it has none."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        return None
    return attributes


def items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of what `held_by` returned."""
    return held.items() if isinstance(held, dict) else enumerate(held or ())


def put(place: Any, key: Any, value: Any) -> None:
    """Let a place, but for a sequence, hold a value by a key, or nothing if it is `ABSENT`.

    Args:
        place: anything that `held_by` returns a dict of.
        key: as `held_by` gives it.
        value: what it shall hold there.
    """
    kind, gone = type(place), value is ABSENT
    base: Any = next((base for base in (*_DICTS, type) if issubclass(kind, base)), object)
    if base is object and kind is not types.CellType and key not in _slots(kind):
        place, base = own_dict(place), dict
    if base in (type, object):
        base.__delattr__(place, key) if gone else base.__setattr__(place, key, value)
    else:
        base.__delitem__(place, key) if gone else base.__setitem__(place, key, value)


def restore(place: Any, before: Any, keys: Collection[Any] | None = None) -> None:
    """Let a place hold by these keys, or by all and in the same order, what `held_by` returned before."""
    if isinstance(before, tuple):
        base = kind_of(type(place))
        rest = [] if keys is None else [value for at, value in enumerate(base.__iter__(place)) if at not in keys]
        # What another thread put there meanwhile stays, where only additions have to go.
        complete = keys is not None and {*map(id, before)} <= {*map(id, rest)}
        base.clear(place)
        (base.update if base is set else base.extend)(place, rest if complete else before)
        return
    now = held_by(place)
    if keys is None:
        keys = [*(now.keys() - before.keys()), *before]
        if [key for key in now if key in before] != [key for key in before if key in now]:
            for key in now:
                put(place, key, ABSENT)
            now = {}
    for key in keys:
        if not is_same(now.get(key, ABSENT), before.get(key, ABSENT)):
            put(place, key, before.get(key, ABSENT))


def is_untouched(place: Any, before: Any) -> bool:
    """True if a place holds the very same objects in the same order."""
    now = held_by(place)
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        return False
    return isinstance(now, tuple) or all(map(operator.is_, now.values(), before.values()))


def is_same(now: Any, before: Any) -> bool:
    """True for the same object, and for equal values that nothing can change inside."""
    if now is before:
        return True
    if isinstance(now, tuple) and type(now) is type(before) and len(now) == len(before):
        return all(map(is_same, now, before))
    return type(now) is type(before) and isinstance(now, ATOMS) and now == before


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor that a value is or holds, in containers and users' objects."""
    seen: set[int] = set()
    left = [value]
    while left and len(seen) < MAX_OBJECTS:
        value = left.pop()
        kind = kind_of(type(value))
        if kind is Tensor:
            yield from parts(value)
        elif kind not in (None, OPAQUE) and id(value) not in seen:
            seen.add(id(value))
            left += (item for _, item in items_of(held_by(value)))


def in_memory(is_wanted: Callable[[Tensor], bool], thing: Any) -> bool:
    """True if a thing is a tensor, or wraps one, whose memory is wanted."""
    return issubclass(type(thing), Tensor) and any(has_address(part) and is_wanted(part) for part in parts(thing))


# Of torch's layers: their parameters' shapes tell these.
_SIZES = frozenset(
    {
        *("in_features", "out_features", "num_features", "num_embeddings", "embedding_dim", "normalized_shape"),
        *("elementwise_affine", "affine", "in_channels", "out_channels", "kernel_size", "num_channels"),
    }
)


@by_class
def layer_settings(kind: type) -> tuple[str, ...]:
    """List the numbers and flags that torch's own layers declare, of a class that may be derived from one."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("torch.nn.modules.")]
    return tuple(
        dict.fromkeys(name for base in bases for name in vars(base).get("__constants__", ()) if name not in _SIZES)
    )
