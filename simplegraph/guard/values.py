"""Keys of plain values, made without running user code.

A value is plain if nothing can change inside it: numbers, texts, None, enumerations and the like, and tuples and frozen
sets of plain values.
"""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import fractions
import functools
import pathlib
import sys
import uuid
import weakref
from collections.abc import Callable, Hashable, Set
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.nested import ATOMS, constant_key
from simplegraph.base.objects import by_class, own_dict
from simplegraph.base.patches import replaced
from simplegraph.base.walk import MAX_WIDTH, shown

_name_of = vars(type)["__name__"].__get__  # ignores the metaclass's own `__name__`
NOT_PLAIN = object()
ORDER = object()  # the key of the entry for the order of a container's keys
PARTS = object()  # the first item of the entry of a tuple whose values are not all plain
Place = tuple[str, Hashable]  # the name of a holder, and a key in it
ALL = object()  # in a place, all keys of a container
CLASS = "__class__"  # in a place, the key of an object's class
MAX_DEPTH = 8  # the deepest nesting of tuples
HEAP_TYPE = 1 << 9  # a flag of classes that Python made at run time, not C
CompiledModule: Any = torch._C.ScriptModule  # the class of a TorchScript module's object in C++
SCRIPTS = (CompiledModule, torch.jit.ScriptFunction)
_MAX_BYTES = 4096  # of the largest array whose values are guarded; a call compares one in about a microsecond
_OF_FUNCTIONS = frozenset({property, classmethod})  # descriptors that nothing but their functions determines
_DIRECT = frozenset({type(None), bool, int, str, bytes})
_DIRECT |= {torch.dtype, torch.device, torch.layout, torch.memory_format}
# Classes of immutable values that their text determines.
_TEXTS = frozenset({decimal.Decimal, fractions.Fraction, datetime.date, datetime.timedelta, uuid.UUID})
_TEXTS |= {pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath}


class SameObject:
    """Represents an object in a key: equal for the same object only. The object is not kept alive."""

    def __init__(self, thing: Any) -> None:
        self._id, self._kind = id(thing), type(thing)
        is_class = issubclass(self._kind, type)
        self._name: str = _name_of(thing) if is_class else f"a {self._kind.__name__}"
        self._thing: Callable[[], Any] = _nobody  # another object of the class may reuse the id later
        if can_be_referenced(type(thing)):
            self._thing = weakref.ref(thing)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SameObject) or (other._id, other._kind) != (self._id, self._kind):
            return False
        return self._thing is other._thing is _nobody or self._thing() is other._thing() is not None

    def thing(self) -> Any:
        """Return the object; None if it has ended, or cannot be referenced."""
        return self._thing()

    def __hash__(self) -> int:
        return self._id

    def __repr__(self) -> str:
        return self._name


def identity_key(value: Any) -> Hashable:
    """Return a key that is equal for the same object only.

    For tensors the id is enough: graphs keep the tensors that they read alive. A weak reference would keep torch from
    swapping a tensor. A property, which supports no weak reference, is the same as long as its functions are.
    """
    if issubclass(type(value), Tensor):
        return Tensor, id(value)
    if type(value) in _OF_FUNCTIONS:
        functions = (getattr(value, name, None) for name in ("fget", "fset", "fdel", "__func__"))
        return PARTS, type(value), tuple(map(SameObject, functions))
    return SameObject(replaced(value))


def _nobody() -> None:
    return None


@by_class
def can_be_referenced(kind: type) -> bool:
    """True for classes whose objects can have weak references.

    Torch's own streams and events accept weak references but do not clear them at their end, which crashes Python's
    garbage collector.
    """
    built_in = (base for base in kind.__mro__ if not base.__flags__ & HEAP_TYPE)
    return bool(kind.__weakrefoffset__) and not any(str(base.__module__).startswith("torch") for base in built_in)


def value_key(value: Any, depth: int = 0) -> Hashable:
    """Return the key of a plain value, which includes its class; `NOT_PLAIN` for other values.

    Of containers, only tuples and frozen sets can be plain.
    """
    kind = type(value)
    if kind in _DIRECT:
        return kind, value
    read = _reader(kind)
    return NOT_PLAIN if read is None else read(value, depth)


@by_class
def _reader(kind: type) -> Callable[[Any, int], Hashable] | None:
    """Return the function that makes the keys of values of a class; None if they are not plain."""
    if issubclass(kind, (tuple, frozenset)):
        return _items_key
    if issubclass(kind, enum.Enum):
        return _enum_key
    if issubclass(kind, type):
        return lambda value, depth: SameObject(value)
    if kind in (slice, range):  # two ranges of the same numbers are equal, whatever their ends
        return lambda value, depth: _items_key((value.start, value.stop, value.step), depth)
    if issubclass(kind, ATOMS):
        return lambda value, depth: (class_key(type(value)), constant_key(value))
    if kind in _TEXTS:
        return lambda value, depth: (type(value), str(value))
    if kind in (datetime.datetime, datetime.time):
        return _time_key
    numpy = sys.modules.get("numpy")
    if numpy is not None and issubclass(kind, numpy.generic) and not issubclass(kind, (numpy.void, numpy.object_)):
        return lambda value, depth: (class_key(type(value)), str(value.dtype), value.tobytes())
    return None


def _items_key(value: Any, depth: int) -> Hashable:
    base: Any = frozenset if issubclass(type(value), frozenset) else tuple
    if base.__len__(value) > MAX_WIDTH or depth >= MAX_DEPTH:
        return NOT_PLAIN
    items = [value_key(item, depth + 1) for item in base.__iter__(value)]
    plain = all(item is not NOT_PLAIN for item in items)
    return (class_key(type(value)), base(items)) if plain else NOT_PLAIN


def _enum_key(value: Any, depth: int) -> Hashable:
    attributes = own_dict(value) or {}
    return class_key(type(value)), attributes.get("_name_"), value_key(attributes.get("_value_"), depth + 1)


def _time_key(value: Any, _: int) -> Hashable:
    return (type(value), value.isoformat()) if type(value.tzinfo) in (type(None), datetime.timezone) else NOT_PLAIN


@by_class
def class_key(kind: type) -> Hashable:
    """Return the key of a class, whatever equality its metaclass defines."""
    return kind if type(kind) is type and kind.__module__ == "builtins" else SameObject(kind)


def buffer_key(value: Any) -> Hashable | None:
    """Return the key of the present contents of a small array or mutable bytes; None for all other values."""
    read = _buffer_reader(type(value))
    return None if read is None else read(value)


def is_small_array(value: Any) -> bool:
    """True for a NumPy array that is small enough for its values to be guarded."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray and buffer_key(value) is not None


@by_class
def _buffer_reader(kind: type) -> Callable[[Any], Hashable | None] | None:
    """Return the function that reads the contents of arrays of a class; None if the class is no array's."""
    if kind in (bytearray, array.array):
        return _bytes_key
    numpy = sys.modules.get("numpy")
    bases = () if numpy is None else (numpy.ndarray, numpy.void)
    base = next((base for base in bases if issubclass(kind, base)), None)
    return None if base is None else functools.partial(_array_key, base)


def _bytes_key(value: Any) -> Hashable:
    """Return the bytes of an array if it is small, and otherwise its length."""
    length = len(value)
    is_small = length * getattr(value, "itemsize", 1) <= _MAX_BYTES
    return type(value), getattr(value, "typecode", ""), bytes(value) if is_small else length


def _array_key(base: Any, value: Any) -> Hashable | None:
    """Return the values of a small NumPy array, without running methods of its class."""
    dtype, size = base.dtype.__get__(value), base.nbytes.__get__(value)
    if size > _MAX_BYTES or dtype.hasobject:
        return None
    return class_key(type(value)), dtype, base.shape.__get__(value), base.tobytes(value)


def is_of_tensor(entry: Any) -> bool:
    """True for an entry of a tensor, or of a tuple of tensors."""
    if type(entry) is tuple and len(entry) == 3 and entry[0] is PARTS:
        return bool(entry[2]) and all(map(is_of_tensor, entry[2]))
    if type(entry) is tuple and len(entry) == 2 and issubclass(type(entry[0]), type):
        return issubclass(entry[0], Tensor)
    return entry in (class_key(Tensor), class_key(nn.Parameter))


def has_object(entry: Hashable) -> bool:
    """True if the entry of a value contains an object, which may lead to more values."""
    if type(entry) is tuple and entry and entry[0] is PARTS:
        return any(map(has_object, entry[2]))
    return type(entry) is SameObject


def shown_entry(entry: Hashable) -> str:
    """Format a key that `value_key` made, for messages."""
    if not isinstance(entry, tuple) or not entry:
        return "nothing" if type(entry) is object else repr(entry)
    try:
        text = _shown_value(entry)
    except ValueError:  # Python refuses to write very long numbers
        return "a long number"
    return text if len(text) <= 40 else f"{text[:37]}..."


def _shown_value(entry: tuple[Any, ...]) -> str:
    kind, value = entry[0], entry[-1]
    if kind in (float, complex):
        return str(value)
    if len(entry) == 2 and type(value) in (tuple, frozenset):
        items = map(shown_entry, value)
        return f"({', '.join(items if type(value) is tuple else sorted(items))})"
    is_enum = len(entry) == 3 and type(entry[1]) is str and type(value) is tuple
    return str(entry[1]) if is_enum else repr(value)


def is_among(place: Place, places: Set[Place]) -> bool:
    """True if a place, or the container that it is in, is one of these places."""
    return not places.isdisjoint((place, (place[0], ALL)))


def place_name(place: Place) -> str:
    """Return the name of a place, for messages."""
    holder, key = place
    if key is ORDER:
        return f"the order of {holder}"
    return dotted(holder, key[1] if type(key) is tuple else key)  # a key of a dict has its class beside it


def dotted(prefix: str, key: Any) -> str:
    """Return the name of a key below a place; `prefix` is the name of that place, and may be empty."""
    return f"{prefix}.{shown(key)}" if prefix else shown(key)


_MAX_NAMES = 3  # the most places that a message names


class PlainValues:
    """The plain values that a call finds, as a part of its key. Calls with equal values share one object.

    Args:
        parts: the values of each holder, by its name.
    """

    def __init__(self, parts: dict[str, frozenset[Any]]) -> None:
        self.parts = parts

    def difference(self, other: PlainValues) -> str:
        """Describe the first places whose values differ in `other`."""
        changed = {
            place_name((name, key))
            for name in self.parts | other.parts
            for key, _ in self.parts.get(name, frozenset()) ^ other.parts.get(name, frozenset())
            if key is not ORDER
        }
        names = sorted(changed)[:_MAX_NAMES] or ["an object"]
        names += [f"{len(changed) - _MAX_NAMES} more"] if len(changed) > _MAX_NAMES else []
        return f"{' and '.join(filter(None, (', '.join(names[:-1]), names[-1])))} changed"

    def described(self) -> dict[str, str]:
        """Describe all values as texts, by the names of their places."""
        entries = ((name, *entry) for name, part in self.parts.items() for entry in part)
        texts = ((place_name((name, key)), shown_entry(value)) for name, key, value in entries if key is not ORDER)
        return dict(sorted(texts))

    def __repr__(self) -> str:
        return "plain values"
