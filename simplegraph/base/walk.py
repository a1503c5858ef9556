"""Walk what objects lead to, as far as a policy says, running none of their code.

One walk serves everything that looks through Python's objects: what captures remember and put back, what graphs guard,
and who holds their memory.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import functools
import gc
import itertools
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.nested import ATOMS
from simplegraph.base.objects import attribute_of, by_class, own_dict
from simplegraph.base.patches import plain
from simplegraph.base.tensors import parts

# The caps of all walks, which docs/limits.md names.
MAX_OBJECTS = 1_000_000  # far above a model's own (an 8B transformers model has 7,000): for what hangs on by accident
MAX_BEYOND_CODE = 20_000  # objects with code on the way
DEPTH = 4  # a class, its method, a function that it names, and what that names: further on lie whole libraries
OPAQUE = object()  # the kind of what holds nothing that counts as its own: code, and objects of libraries
_LIBRARIES = sys.stdlib_module_names | {"torch", "simplegraph", "numpy", "triton", "pytest", "_pytest", "pluggy"}
# Libraries whose objects hold what users put there.
_HOLDING = {"argparse", "builtins", "collections", "queue", "weakref", "types", "functools", "itertools"}
DICTS = (collections.OrderedDict, dict)
_SEQUENCES = (list, collections.deque, set, tuple)
_CONTAINERS = frozenset({*DICTS, *_SEQUENCES})
_DULL = (types.BuiltinFunctionType, types.CodeType, *ATOMS)
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.CellType, threading.local, Optimizer)
_CODE = (type, types.ModuleType, types.FunctionType)  # the first two lead to everything there is
_OF_C = frozenset(
    {"__dict__", "__dictoffset__", "__vectorcalloffset__", "__weaklistoffset__"}
)  # members of C's classes
_RUNNER = "_simplegraph"  # a wrapper's own, which is not the user's
LRU: Any = type(functools.lru_cache(bool))
_EXACT = frozenset({dict, collections.OrderedDict})  # whose methods are known to do no more than theirs
_SHOWN = frozenset({str, int, float, bool, bytes, type(None)})
REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # left out of names, as users know them


def is_library(name: Any) -> bool:
    """True for modules of Python, by name, that keep no tensors of users."""
    return str(name).partition(".")[0] in _LIBRARIES


# Readers of the settings by which other libraries choose what their modules do, by the library's name. As of torch, the
# code of these is not followed, and what their objects hold counts. Extras fill it.
LIBRARY_SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {}


def is_closed(name: Any) -> bool:
    """True for modules of Python, by name, whose code is not followed."""
    return is_library(name) or str(name).partition(".")[0] in LIBRARY_SETTINGS


@by_class
def is_users(kind: type) -> bool:
    """True for classes of objects that hold what users put there."""
    return (
        issubclass(kind, nn.Module)
        or not is_library(kind.__module__)
        or str(kind.__module__).partition(".")[0] in _HOLDING
    )


@by_class
def kind_of(kind: type) -> Any:
    """Return `Tensor`, the container class that a class is of, `object` if attributes count, `OPAQUE`, or None.

    The methods of the container class read and write it: subclasses may refuse, decode or do more. None is for values
    that lead to nothing.
    """
    for base in (Tensor, *DICTS, *_SEQUENCES):
        if issubclass(kind, base):
            return base
    if issubclass(kind, _CLOSED):
        return OPAQUE
    if issubclass(kind, _DULL):
        return None
    # Entries of weak dictionaries go by themselves, and are not put back.
    has_attributes = kind.__module__ not in ("builtins", "weakref") and (kind.__dictoffset__ or slots_of(kind))
    return object if has_attributes and is_users(kind) else OPAQUE


@by_class
def referring_kind(kind: type) -> Any:
    """Return the kind for walks that open everything but classes and files, as the garbage collector sees it."""
    if issubclass(kind, Tensor):
        return Tensor
    return None if issubclass(kind, (type, types.ModuleType, types.CodeType, *ATOMS)) else _referents


@by_class
def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class's objects by name."""
    members = (member for base in kind.__mro__[::-1] for member in vars(base).items())
    slots = {name: member for name, member in members if type(member) is types.MemberDescriptorType}
    return {name: member for name, member in slots.items() if name not in _OF_C}


def held_by(place: Any, base: Any = None) -> Any:
    """Return what a container, a cell, a function, a class or a user's object holds; None if it is none of these.

    Lists, deques, sets and tuples are returned as a tuple, all else as a dict.

    Args:
        place: anything.
        base: its kind, as a policy opens it.
    """
    kind = type(place)
    if base is None:
        base = kind_of(kind)
    if type(base) in (types.FunctionType, types.MethodType):
        return base(place)
    if kind is dict:
        return place.copy()  # asks no key for its hash
    if base in DICTS:
        return dict(items_in_order(place))
    if base in _SEQUENCES:
        return tuple(base.__iter__(place))
    if base is object:
        held: dict[str, Any] = {}  # filled slots, and attributes
        for name, slot in slots_of(kind).items():
            with contextlib.suppress(AttributeError):  # an empty one
                held[name] = slot.__get__(place)
        held |= own_dict(place) or {}
        held.pop(_RUNNER, None)
        return held
    if kind is types.CellType:
        return {"cell_contents": place.cell_contents} if gc.get_referents(place) else {}
    return dict(vars(place)) if base is OPAQUE and issubclass(kind, (type, types.FunctionType)) else None


def _referents(thing: Any) -> tuple[Any, ...]:
    """List what the garbage collector sees a thing hold; of a function what it alone holds, which is no code."""
    if issubclass(type(thing), types.FunctionType):
        return thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)
    return tuple(gc.get_referents(thing))


def keys_in_order(held: Any) -> list[Any]:
    """List the keys of a dict as it is iterated over, past what its class makes of that."""
    keys = list(dict.keys(held))
    # An OrderedDict has an order of its own, and asks keys for their hashes to tell it.
    is_told = issubclass(type(held), collections.OrderedDict) and _SHOWN.issuperset(map(type, keys))
    return list(collections.OrderedDict.__iter__(held)) if is_told else keys


def items_in_order(held: Any) -> list[tuple[Any, Any]]:
    """List the keys and values of a dict, likewise."""
    items = list(dict.items(held))
    order = keys_in_order(held) if issubclass(type(held), collections.OrderedDict) else ()
    if all(key is moved for (key, _), moved in zip(items, order, strict=False)):
        return items
    return [(key, dict.__getitem__(held, key)) for key in order]


def values_in_order(held: Any) -> list[Any]:
    """List the values of a dict, likewise."""
    return [value for _, value in items_in_order(held)]


def items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of what `held_by` returned."""
    return held.items() if isinstance(held, dict) else enumerate(held or ())


def shown(key: Any) -> str:
    """Return a key as names have it; of objects, whose own text is code, their class."""
    if type(key) is tuple:
        return f"({', '.join(map(shown, key))})"
    return str(key) if type(key) in _SHOWN else f"<{type(key).__name__}>"


def holder_of(thing: Any, key: Any) -> Any:
    """Return what has a key of what a thing holds: the dict of its attributes, or it, a container or one with slots."""
    attributes = None if issubclass(type(thing), (*DICTS, *_SEQUENCES)) else own_dict(thing)
    return thing if attributes is None or key not in attributes else attributes


@dataclasses.dataclass(frozen=True)
class Policy:
    """Limits a walk.

    Attributes:
        opens: returns the kind of a class as `kind_of` does, or a function that reads its objects.
        depth: containers and objects inside each other that are opened, from an attribute of a module or a root on.
        width: entries of a container beyond which no walk goes into them.
        objects: opened at most where no code is on the way; beyond_code: where some is.
        code: classes, functions and files that a place may be away; 0 reads no code.
        breaks: reads the code of eager breaks as well.
    """

    opens: Callable[[type], Any] = kind_of
    depth: int = MAX_OBJECTS
    width: int = MAX_OBJECTS
    objects: int = MAX_OBJECTS
    code: int = 0
    beyond_code: int = MAX_BEYOND_CODE
    breaks: bool = True


# A thing that a walk looked into, what it holds, as `held_by` tells, and True if no code is on the way to it.
Opened = tuple[Any, Any, bool]


class _Kinds(dict[type, Any]):
    """Has the kind of each class, for the time of one walk: looking up is much quicker than a call."""

    opens: Callable[[type], Any]

    def __missing__(self, kind: type) -> Any:
        self[kind] = found = self.opens(kind)
        return found


class Walk:
    """Opens what roots lead to, each thing once: registered parts of modules first, then what is near, then code.

    Functions, classes, files, optimizers and objects of libraries (`nn.Module` excepted) are not looked into, unless
    the policy says so. A file of code leads to what functions that are looked into name there: what else it holds may
    be a notebook's whole state.

    Args:
        roots: modules, functions and other objects.
        policy: how far to go.
        known: ids of things that are not opened.

    Attributes:
        ways: by id: a thing, the id of what led to it first (0 for a root), by which key that holds it, and True if no
            code is on the way.
        tensors: those found without code on the way, each once.
        empty: by id, without an object each, which Python would collect garbage for: dicts that hold nothing. They are
            not opened. led: the ids of what led to them. empty_near: to so many no code leads.
    """

    def __init__(self, roots: Iterable[Any], policy: Policy = Policy(), known: Collection[int] = ()) -> None:
        self.policy = policy
        self.kinds = _Kinds()
        self.kinds.opens = policy.opens
        self.ways: dict[int, tuple[Any, int, Any, bool]] = {}
        self.tensors: list[Tensor] = []
        self.empty: dict[int, Any] = {}
        self.led: dict[int, int] = {}
        self.empty_near = 0
        self._roots, self._known = [plain(root) for root in roots], known

    def __iter__(self) -> Iterator[Opened]:
        policy, kinds, ways, known = self.policy, self.kinds, self.ways, self._known
        empty, led = self.empty, self.led
        # What to look into, the id of what led there, its key, and how many containers, or how much code, is between.
        tree: list[tuple[Any, int, Any, int]] = []
        near: collections.deque[tuple[Any, int, Any, int]] = collections.deque()
        far: collections.deque[tuple[Any, int, Any, int]] = collections.deque()
        for root in self._roots:
            if (leads := kinds[type(root)]) is not None:
                (far if leads is OPAQUE else near).append((root, 0, "", 0))
        counts = [0, 0]
        while (own := bool(tree or near)) or (policy.code and far):
            if counts[own] >= (policy.objects if own else policy.beyond_code):
                return
            registered = bool(tree)
            value, above, key, steps = tree.pop() if registered else (near or far).popleft()
            at, kind, is_module = id(value), kinds[type(value)], issubclass(type(value), nn.Module)
            is_deep = own and steps > policy.depth and not is_module and kind is not Tensor
            if is_deep or at in ways or at in empty or at in known:
                continue
            ways[at] = value, above, key, own
            if kind is Tensor:
                self.tensors.append(value)
                continue
            if not own and issubclass(type(value), _CODE):
                steps += 1
                if steps > policy.code or _is_closed(value, policy.breaks):
                    continue
            held = held_by(value, kind)
            if held is not None and (own or kind is not tuple):
                counts[own] += 1
                yield value, held, own
            away, inside = (0, 1 if is_module else steps + 1) if own else (steps, steps)
            first: list[tuple[Any, int, Any, int]] = []
            is_wide = kind in _CONTAINERS and len(held) > policy.width
            for name, item in () if is_wide or is_globals(value) else items_of(held):
                kind = type(item)
                if kind in _EXACT and not item:  # most are, a module's ten for hooks
                    if own or not is_module:
                        empty[id(item)] = item
                        led.setdefault(id(item), at)
                elif (leads := kinds[kind]) is None:
                    continue
                elif leads is OPAQUE:
                    far.append((item, at, name, away))
                elif not own:
                    if leads is not Tensor:
                        far.append((item, at, name, away))
                elif name in REGISTERED if is_module else registered:
                    first.append((item, at, name, 0))
                else:
                    near.append((item, at, name, inside))
            if own:
                tree += reversed(first)
                self.empty_near = len(empty)
            for name, thing in _beyond(value, held) if policy.code else ():
                if kinds[type(thing)] not in (None, Tensor):
                    far.append((thing, at, name, away))

    def found(self) -> list[Tensor]:
        """Walk to the end, and return the tensors."""
        collections.deque(self, maxlen=0)
        return self.tensors

    def filled(self) -> Iterator[tuple[Any, bool]]:
        """Yield the dicts that were empty and are not by now, with True if no code is on the way."""
        for number, (at, place) in enumerate(self.empty.items()):
            if place and at not in self.ways:
                above = self.led[at]
                key = next((key for key, item in items_of(held_by(self.ways[above][0])) if item is place), "?")
                self.ways[at] = place, above, key, number < self.empty_near
                yield place, number < self.empty_near

    def way_to(self, thing: Any) -> tuple[Any, Any]:
        """Return what led to a thing, and by which key it held that; None for a root."""
        _, above, key, _ = self.ways[id(thing)]
        return (self.ways[above][0], key) if above else (None, "")

    def path(self, thing: Any) -> str:
        """Name the place that holds a thing."""
        holder, key = self.way_to(thing)
        return "" if holder is None else self.path_of(key, holder)

    def path_of(self, key: Any, holder: Any) -> str:
        """Name what a holder holds by a key.

        It is dotted from the root, or after the first thing on the way of code to it that has a name.
        """
        way = [(holder, key)]
        while (above := self.way_to(way[-1][0]))[0] is not None:
            way.append(above)
        if self.ways[id(holder)][3]:
            return ".".join(map(shown, reversed([key, *(up for _, up in way[1:] if shown(up) not in REGISTERED)])))
        name = ""
        for owner, key in ((owner, shown(key)) for owner, key in way):
            kind = type(owner)
            if kind is types.FunctionType:
                return f"the attribute {key} of {owner.__qualname__}" if key.isidentifier() else key
            if is_globals(owner):
                return f"the global {key} of {owner.get('__name__')}"
            if issubclass(kind, type):
                name = name or f"the attribute {key} of class {owner.__qualname__}"
            elif kind_of(kind) is object and not is_library(kind.__module__):
                name = name or f"the attribute {key} of a {kind.__qualname__}"
            if issubclass(kind, (type, nn.Module)):
                break
        return name or f"a {type(way[-1][0]).__name__}"


def _is_closed(value: Any, breaks: bool) -> bool:
    """True for code of libraries, and of eager breaks unless these count."""
    kind = type(value)
    if not issubclass(kind, _CODE):
        return False
    return (not breaks and is_break(value)) or is_library(
        attribute_of(value, "__name__") if issubclass(kind, types.ModuleType) else value.__module__
    )


def is_break(value: Any) -> bool:
    """True for functions that run eagerly between the segments of a graph."""
    return not {"_simplegraph_break", "_simplegraph_unbroken"}.isdisjoint(own_dict(value) or ())


def is_globals(value: Any) -> bool:
    """True for the dict of a file."""
    return type(value) is dict and "__builtins__" in value


def _beyond(value: Any, held: Any) -> Iterable[tuple[Any, Any]]:
    """Return what code, and objects that are not looked into, lead to beside what they hold, with keys."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return (("__dict__", own_dict(value)),)
    if issubclass(kind, threading.local):  # what is this thread's
        return (("__dict__", vars(value)),)
    if kind is contextvars.ContextVar:  # what it is in this context
        with contextlib.suppress(LookupError):
            return (("get()", value.get()),)
        return ()
    if is_globals(value) or issubclass(kind, LRU):
        return ()  # functions lead to what they name there
    if kind is types.FunctionType:
        return _beyond_function(value)
    if issubclass(kind, type):
        return (*enumerate(value.__bases__), ("__module__", own_dict(sys.modules.get(value.__module__))))
    if issubclass(kind, nn.Module):
        return (("__class__", kind),)
    if kind in _EXACT:
        return [(key, key) for key in held if type(key) is not str]
    if held is None:
        return enumerate(gc.get_referents(value) if is_users(kind) else ())
    # An object's own dict is no place beside it; items of a tuple's subclass and such are no attributes.
    return [(at, thing) for at, thing in enumerate(gc.get_referents(value)) if type(thing) is not dict]


def _beyond_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield a function's file, what it names there and in files that it names, its closure and its defaults."""
    names, code = sorted(names_in(function.__code__)), function.__code__
    cells = list(zip(code.co_freevars, function.__closure__ or (), strict=True))
    files = [function.__globals__, *_files_in(held_by(cell).get("cell_contents") for _, cell in cells)]
    yield "__globals__", function.__globals__
    for file in files:  # which grows meanwhile
        things = [(name, file[name]) for name in names if name in file]
        files += [one for one in _files_in(thing for _, thing in things) if not any(one is other for other in files)]
        yield from ((f"the global {name} of {file.get('__name__')}", thing) for name, thing in things)
    yield from ((f"the variable {name} in the closure of {function.__qualname__}", cell) for name, cell in cells)
    for defaults in (function.__defaults__, function.__kwdefaults__):
        yield f"a default argument of {function.__qualname__}", defaults


def _files_in(things: Iterable[Any]) -> list[dict[str, Any]]:
    return [vars(thing) for thing in things if type(thing) is types.ModuleType and not is_library(thing.__name__)]


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that code has, and the functions in it."""
    return set(code.co_names).union(*(names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor that a value is or holds, in containers and users' objects."""
    for tensor in Walk([value]).found():
        yield from parts(tensor)


def all_tensors(*kinds: type) -> list[Any]:
    """List all tensors there are, and objects of other kinds, by a look at all that the garbage collector knows."""
    things = gc.get_objects()
    types_of = list(map(type, things))  # an engine has a million
    wanted = {kind for kind in set(types_of) if issubclass(kind, (Tensor, *kinds))}
    return list(itertools.compress(things, map(wanted.__contains__, types_of)))
