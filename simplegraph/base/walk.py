"""Find the objects that objects lead to, within the limits of a policy, without running their code.

`Walk` serves every search through Python objects: for state that captures save and restore, for state that guards
compare, and for objects that hold graph memory.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import contextvars
import dataclasses
import dis
import functools
import gc
import importlib.util
import itertools
import sys
import threading
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.nested import ATOMS
from simplegraph.base.objects import attribute_of, by_class, class_member, own_dict
from simplegraph.base.patches import original_of
from simplegraph.base.tensors import parts

# The limits of all walks, which docs/limits.md lists.
MAX_OBJECTS = 1_000_000  # far above a model's own (an 8B transformers model has 7,000): for objects held by accident
MAX_BEYOND_CODE = 20_000  # objects that only code leads to
DEPTH = 4  # a class, its method, a function that it names, and objects that this names: beyond lie whole libraries
MAX_WIDTH = 256  # the most entries of a container that count one by one
OPAQUE = object()  # the kind of objects whose contents are not read: code, and objects of libraries
_FILES_AND_NETWORKS = {"huggingface_hub", "httpx", "httpx2", "requests", "tqdm", "yaml", "packaging"}
_LIBRARIES = {
    *sys.stdlib_module_names,
    *("torch", "simplegraph", "numpy", "triton", "pytest", "_pytest", "pluggy"),
    *_FILES_AND_NETWORKS,
}
# Libraries whose objects hold users' objects.
_HOLDING = {"argparse", "builtins", "collections", "queue", "weakref", "types", "functools", "itertools"}
DICTS = (collections.OrderedDict, dict)
_SEQUENCES = (list, collections.deque, set, tuple)
_CONTAINERS = frozenset({*DICTS, *_SEQUENCES})
_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)
_DULL = (types.BuiltinFunctionType, types.CodeType, *ATOMS)  # nothing of these can change
_CLOSED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.CellType, threading.local, Optimizer)
_CODE = (type, types.ModuleType, types.FunctionType)  # all objects of the process are below the first two
_OF_C = frozenset(
    {"__dict__", "__dictoffset__", "__vectorcalloffset__", "__weaklistoffset__"}
)  # members of classes written in C
_CONSTANT = frozenset({property, types.GenericAlias})  # classes whose members do not change; those of subclasses may
_IMPORT = dis.opmap["IMPORT_NAME"]
_IMPORTING = frozenset({"modules", "import_module", "__import__"})  # with a text: sys.modules[text]
_RUNNER = "_simplegraph"  # the attribute of a wrapper, which is not the user's
# Classes of `Class[int]`, which leads to the class; the second is private to Python.
ALIASES = frozenset({types.GenericAlias, getattr(typing, "_GenericAlias", types.GenericAlias)})
LRU: Any = type(functools.lru_cache(bool))
_EXACT = frozenset({dict, collections.OrderedDict})  # the builtin dicts, whose methods are not overridden
_SHOWN = frozenset({str, int, float, bool, bytes, type(None)})
REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # left out of names, as users know them


def is_library(name: Any) -> bool:
    """True for names of Python modules that keep no tensors of users."""
    return str(name).partition(".")[0] in _LIBRARIES


# Library's name -> reader of the settings on which its modules depend. The code of these libraries is not followed,
# like torch's, and the contents of their objects count. Extras fill the table.
LIBRARY_SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {}

# Globals of libraries, as (library, name), with an entry for each class used so far. A class reads only its own entry,
# so changes do not count. Extras fill the table.
CLASS_REGISTRIES: set[tuple[str, str]] = set()


def is_closed(name: Any) -> bool:
    """True for modules of Python, by name, whose code is not followed."""
    return is_library(name) or str(name).partition(".")[0] in LIBRARY_SETTINGS


@by_class
def is_users(kind: type) -> bool:
    """True for classes whose objects may hold users' objects."""
    return (
        issubclass(kind, nn.Module)
        or not is_library(kind.__module__)
        or str(kind.__module__).partition(".")[0] in _HOLDING
    )


@by_class
def kind_of(kind: type) -> Any:
    """Return the kind of a class: `Tensor`, a builtin container class, `object` if attributes count, `OPAQUE`, or None.

    Containers are read and written by the methods of their builtin class, since methods of a subclass may refuse,
    decode or have effects. None is for values that lead to no objects.
    """
    for base in (Tensor, *DICTS, *_SEQUENCES):
        if issubclass(kind, base):
            return base
    if issubclass(kind, _CLOSED):
        return OPAQUE
    if issubclass(kind, _DULL):
        return None
    # Entries of weak dictionaries vanish by themselves, and are not restored.
    has_attributes = kind.__module__ not in ("builtins", "weakref") and (kind.__dictoffset__ or slots_of(kind))
    return object if has_attributes and is_users(kind) else OPAQUE


@by_class
def is_record(kind: type) -> bool:
    """True for builtin containers, and for classes of which objects are nested as in a configuration."""
    is_container = kind_of(kind) in _CONTAINERS
    return is_container or issubclass(kind, _NAMESPACES) or class_member(kind, "__dataclass_fields__") is not None


@by_class
def referring_kind(kind: type) -> Any:
    """Return the kind for walks that open everything the garbage collector sees, except classes and files."""
    if issubclass(kind, Tensor):
        return Tensor
    return None if issubclass(kind, (type, types.ModuleType, types.CodeType, *ATOMS)) else _referents


@by_class
def slots_of(kind: type) -> dict[str, types.MemberDescriptorType]:
    """Return the slots of a class's objects by name."""
    members = (member for base in kind.__mro__[::-1] for member in vars(base).items())
    slots = {name: member for name, member in members if type(member) is types.MemberDescriptorType}
    return {
        name: member for name, member in slots.items() if name not in _OF_C and member.__objclass__ not in _CONSTANT
    }


def held_by(place: Any, base: Any = None) -> Any:
    """Return the contents of a container, a cell, a function, a class or a user's object; None for other objects.

    The contents of lists, deques, sets and tuples are returned as a tuple, all others as a dict.

    Args:
        place: any object.
        base: the kind of its class by the walk's policy.
    """
    kind = type(place)
    if base is None:
        base = kind_of(kind)
    if type(base) in (types.FunctionType, types.MethodType):
        return base(place)
    if kind is dict:
        return place.copy()  # calls no key's ``__hash__``
    if base in DICTS:
        return dict(items_in_order(place))
    if base in _SEQUENCES:
        return tuple(base.__iter__(place))
    if base is object:
        attributes: dict[str, Any] = {}  # filled slots, and attributes
        for name, slot in slots_of(kind).items():
            with contextlib.suppress(AttributeError):  # an empty slot
                attributes[name] = slot.__get__(place)
        attributes |= own_dict(place) or {}
        attributes.pop(_RUNNER, None)
        return attributes
    if kind is types.CellType:
        return {"cell_contents": place.cell_contents} if gc.get_referents(place) else {}
    return dict(vars(place)) if base is OPAQUE and issubclass(kind, (type, types.FunctionType)) else None


def _referents(thing: Any) -> tuple[Any, ...]:
    """List the objects that an object refers to for the garbage collector; of a function, without its code."""
    if issubclass(type(thing), types.FunctionType):
        return thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)
    return tuple(gc.get_referents(thing))


def keys_in_order(mapping: Any) -> list[Any]:
    """List the keys of a dict in its order of iteration, without running methods of its class."""
    keys = list(dict.keys(mapping))
    # An OrderedDict has its own order, and reading it calls keys' ``__hash__``.
    is_told = issubclass(type(mapping), collections.OrderedDict) and _SHOWN.issuperset(map(type, keys))
    return list(collections.OrderedDict.__iter__(mapping)) if is_told else keys


def items_in_order(mapping: Any) -> list[tuple[Any, Any]]:
    """List the keys and values of a dict in iteration order, without running methods of its class."""
    items = list(dict.items(mapping))
    order = keys_in_order(mapping) if issubclass(type(mapping), collections.OrderedDict) else ()
    if all(key is moved for (key, _), moved in zip(items, order, strict=False)):
        return items
    return [(key, dict.__getitem__(mapping, key)) for key in order]


def values_in_order(mapping: Any) -> list[Any]:
    """List the values of a dict in iteration order, without running methods of its class."""
    return [value for _, value in items_in_order(mapping)]


def length_of(container: Any) -> int:
    """Return the length of a container, past its class's own ``__len__``."""
    length: int = kind_of(type(container)).__len__(container)
    return length


def items_of(contents: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of contents that `held_by` returned."""
    return contents.items() if isinstance(contents, dict) else enumerate(contents or ())


def shown(key: Any) -> str:
    """Format a key for names; of an object the class, since the object's text would run code."""
    if type(key) is tuple:
        return f"({', '.join(map(shown, key))})"
    text = str(key) if type(key) in _SHOWN else f"<{type(key).__name__}>"
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def holder_of(thing: Any, key: Any) -> Any:
    """Return the object that has a key of a thing's contents: the dict of its attributes, or the thing itself."""
    attributes = None if issubclass(type(thing), (*DICTS, *_SEQUENCES)) else own_dict(thing)
    return thing if attributes is None or key not in attributes else attributes


@dataclasses.dataclass(frozen=True)
class Policy:
    """Limits a walk.

    Attributes:
        opens: returns the kind of a class, like `kind_of`, or a function that reads its objects.
        depth: the deepest nesting of opened objects below an attribute of a module or a root. Containers and records
            between them are not counted.
        width: the most entries of a container that is searched.
        objects: the most objects that are opened without code on the way; beyond_code: the most below code.
        code: the most classes, functions and files on the way to an object; 0 follows no code.
        breaks: True to read the code of eager breaks as well.
    """

    opens: Callable[[type], Any] = kind_of
    depth: int = MAX_OBJECTS
    width: int = MAX_OBJECTS
    objects: int = MAX_OBJECTS
    code: int = 0
    beyond_code: int = MAX_BEYOND_CODE
    breaks: bool = True


# An opened object, its contents from `held_by`, and True if no code is on the way to it.
Opened = tuple[Any, Any, bool]


class _Kinds(dict[type, Any]):
    """Caches the kind of each class during one walk, since a lookup is much faster than a call."""

    opens: Callable[[type], Any]

    def __missing__(self, kind: type) -> Any:
        self[kind] = opened_kind = self.opens(kind)
        return opened_kind


class Walk:
    """Opens the objects that roots lead to, each once: registered parts of modules, then near objects, then code.

    Functions, classes, files, optimizers and objects of libraries (except `nn.Module`) are not opened, unless the
    policy says so. A file leads only to objects that opened functions name, since a notebook's file holds the whole
    state of the notebook.

    Args:
        roots: modules, functions and other objects.
        policy: how far to go.
        closed: ids of objects that are not opened.

    Attributes:
        ways: id -> (the object, the id of the object that led to it first or 0 for a root, its key there, True if no
            code is on the way).
        tensors: tensors that were found without code on the way, each once.
        empty: id -> empty dict. Empty dicts are not opened; they have no tuple in `ways`, since so many objects would
            trigger garbage collections. led: id of an empty dict -> id of the object that led to it. empty_near: the
            number of empty dicts without code on the way, which come first.
    """

    def __init__(self, roots: Iterable[Any], policy: Policy = Policy(), closed: Collection[int] = ()) -> None:
        self.policy = policy
        self.kinds = _Kinds()
        self.kinds.opens = policy.opens
        self.ways: dict[int, tuple[Any, int, Any, bool]] = {}
        self.tensors: list[Tensor] = []
        self.empty: dict[int, Any] = {}
        self.led: dict[int, int] = {}
        self.empty_near = 0
        self._roots, self._closed = [original_of(root) for root in roots], closed

    def __iter__(self) -> Iterator[Opened]:
        policy, kinds, ways, closed = self.policy, self.kinds, self.ways, self._closed
        empty, led = self.empty, self.led
        # Objects to open, the id of the object that led there, the key, and the number of containers, or code, between.
        tree: list[tuple[Any, int, Any, int]] = []
        near: collections.deque[tuple[Any, int, Any, int]] = collections.deque()
        far: collections.deque[tuple[Any, int, Any, int]] = collections.deque()
        for root in self._roots:
            if (leads := kinds[type(root)]) is not None:
                (far if leads is OPAQUE else near).append((root, 0, "", 0))
        counts = [0, 0]
        while (is_near := bool(tree or near)) or (policy.code and far):
            if counts[is_near] >= (policy.objects if is_near else policy.beyond_code):
                return
            registered = bool(tree)
            value, above, key, steps = tree.pop() if registered else (near or far).popleft()
            at, kind, is_module = id(value), kinds[type(value)], issubclass(type(value), nn.Module)
            is_deep = is_near and steps > policy.depth and not is_module and kind is not Tensor
            if is_deep or at in ways or at in empty or at in closed:
                continue
            ways[at] = value, above, key, is_near
            if kind is Tensor:
                self.tensors.append(value)
                continue
            if not is_near and issubclass(type(value), _CODE):
                steps += 1
                if steps > policy.code or _is_closed(value, policy.breaks):
                    continue
            contents = held_by(value, kind)
            if contents is not None and (is_near or kind is not tuple):
                counts[is_near] += 1
                yield value, contents, is_near
            away, inside = (0, 1 if is_module else steps + (not is_record(type(value)))) if is_near else (steps, steps)
            first: list[tuple[Any, int, Any, int]] = []
            is_wide = kind in _CONTAINERS and len(contents) > policy.width
            for name, item in () if is_wide or is_globals(value) else items_of(contents):
                kind = type(item)
                if kind in _EXACT and not item:  # most are, a module's ten for hooks
                    if is_near or not is_module:
                        empty[id(item)] = item
                        led.setdefault(id(item), at)
                elif (leads := kinds[kind]) is None:
                    continue
                elif leads is OPAQUE:
                    far.append((item, at, name, away))
                elif not is_near:
                    if leads is not Tensor:
                        far.append((item, at, name, away))
                elif name in REGISTERED if is_module else registered:
                    first.append((item, at, name, 0))
                else:
                    near.append((item, at, name, inside))
            if is_near:
                tree += reversed(first)
                self.empty_near = len(empty)
            for name, thing in _beyond(value, contents) if policy.code else ():
                if kinds[type(thing)] not in (None, Tensor):
                    far.append((thing, at, name, away))

    def collect_tensors(self) -> list[Tensor]:
        """Walk to the end, and return the tensors."""
        collections.deque(self, maxlen=0)
        return self.tensors

    def filled(self) -> Iterator[tuple[Any, bool]]:
        """Yield the dicts that were empty and are not any more, with True if no code is on the way."""
        for number, (at, place) in enumerate(self.empty.items()):
            if place and at not in self.ways:
                above = self.led[at]
                key = next((key for key, item in items_of(held_by(self.ways[above][0])) if item is place), "?")
                self.ways[at] = place, above, key, number < self.empty_near
                yield place, number < self.empty_near

    def way_to(self, thing: Any) -> tuple[Any, Any]:
        """Return the object that led to a thing, and the key in it; None for a root."""
        _, above, key, _ = self.ways[id(thing)]
        return (self.ways[above][0], key) if above else (None, "")

    def path(self, thing: Any) -> str:
        """Return the name of the place of a thing."""
        holder, key = self.way_to(thing)
        return "" if holder is None else self.path_of(key, holder)

    def path_of(self, key: Any, holder: Any) -> str:
        """Return the name of a key of a holder.

        It is the dotted path from the root. If code is on the way, it starts at the first object with a name.
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
    """True for functions that are eager breaks."""
    return not {"_simplegraph_break", "_simplegraph_unbroken"}.isdisjoint(own_dict(value) or ())


def is_globals(value: Any) -> bool:
    """True for the dict of a file's globals."""
    return type(value) is dict and "__builtins__" in value


def _beyond(value: Any, contents: Any) -> Iterable[tuple[Any, Any]]:
    """Return (key, object) of the objects that a value leads to beside its contents, such as those of code."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return (("__dict__", own_dict(value)),)
    if issubclass(kind, threading.local):  # its attributes in this thread
        return (("__dict__", vars(value)),)
    if kind is contextvars.ContextVar:  # its value in this context
        with contextlib.suppress(LookupError):
            return (("get()", value.get()),)
        return ()
    if kind in ALIASES:
        return (("__origin__", value.__origin__),)
    if is_globals(value) or issubclass(kind, LRU):
        return ()  # functions lead to the globals that they name
    if kind is types.FunctionType:
        return _beyond_function(value)
    if issubclass(kind, type):
        return (*enumerate(value.__bases__), ("__module__", own_dict(sys.modules.get(value.__module__))))
    if issubclass(kind, nn.Module):
        return (("__class__", kind),)
    if kind in _EXACT:
        return [(key, key) for key in contents if type(key) is not str]
    if contents is None:
        return enumerate(gc.get_referents(value) if is_users(kind) else ())
    # An object's own dict does not count; items of a tuple's subclass and the like are not attributes.
    return [(at, thing) for at, thing in enumerate(gc.get_referents(value)) if type(thing) is not dict]


def _beyond_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield a function's file, the globals that it names in this and other files, its closure and its defaults."""
    names, code = sorted(names_in(function.__code__)), function.__code__
    cells = list(zip(code.co_freevars, function.__closure__ or (), strict=True))
    imported = map(sys.modules.get, imports_in(code, function.__globals__.get("__package__")))
    things = (*imported, *(held_by(cell).get("cell_contents") for _, cell in cells))
    files = [function.__globals__, *_files_in(things)]
    yield "__globals__", function.__globals__
    for file in files:  # the list grows meanwhile
        named = [(name, file[name]) for name in names if name in file]
        files += [one for one in _files_in(thing for _, thing in named) if not any(one is other for other in files)]
        yield from ((f"the global {name} of {file.get('__name__')}", thing) for name, thing in named)
    yield from ((f"the variable {name} in the closure of {function.__qualname__}", cell) for name, cell in cells)
    for defaults in (function.__defaults__, function.__kwdefaults__):
        yield f"a default argument of {function.__qualname__}", defaults


def _files_in(things: Iterable[Any]) -> list[dict[str, Any]]:
    return [vars(thing) for thing in things if type(thing) is types.ModuleType and not is_library(thing.__name__)]


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in code, inner functions included."""
    return set(code.co_names).union(
        *(names_in(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    )


@functools.lru_cache(maxsize=4096)
def imports_in(code: types.CodeType, package: str | None) -> frozenset[str]:
    """Return the names of the Python modules that code of a package imports, inner functions included."""
    inner = (imports_in(constant, package) for constant in code.co_consts if isinstance(constant, types.CodeType))
    names = set[str]()
    if _IMPORT in code.co_code[::2]:  # few functions import, and their instructions take long to list
        steps = list(dis.get_instructions(code))
        for level, listed, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opcode == _IMPORT and (package or not level.argval):
                name = importlib.util.resolve_name("." * level.argval + step.argval, package)
                names.add(name if listed.argval else name.partition(".")[0])
    if not _IMPORTING.isdisjoint(code.co_names):
        names.update(constant for constant in code.co_consts if type(constant) is str)
    return frozenset(names).union(*inner)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in a value, also inside containers and users' objects."""
    for tensor in Walk([value]).collect_tensors():
        yield from parts(tensor)


def all_tensors(*kinds: type) -> list[Any]:
    """List all tensors of the process, and objects of other `kinds`, among the objects of the garbage collector."""
    things = gc.get_objects()
    types_of = list(map(type, things))  # an engine has a million
    wanted = {kind for kind in set(types_of) if issubclass(kind, (Tensor, *kinds))}
    return list(itertools.compress(things, map(wanted.__contains__, types_of)))
