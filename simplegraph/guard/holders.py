"""Find the holders of plain values that calls of a module may read: objects, containers, classes, files, closures."""

from __future__ import annotations

import contextvars
import dataclasses
import dis
import functools
import gc
import itertools
import os
import threading
import types
import weakref
from collections.abc import Callable, Collection, Sequence, Sized
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef

from simplegraph.base.nested import ATOMS
from simplegraph.base.objects import by_class, class_dict, class_member, own_dict
from simplegraph.base.patches import Door, original_of
from simplegraph.base.walk import (
    ALIASES,
    DEPTH,
    DICTS,
    LIBRARY_SETTINGS,
    LRU,
    MAX_WIDTH,
    OPAQUE,
    Policy,
    Walk,
    held_by,
    is_break,
    is_closed,
    items_of,
    kind_of,
    slots_of,
)
from simplegraph.guard import versions
from simplegraph.guard.code_below import SPECIAL_METHODS, CodeBelow, is_packaged
from simplegraph.guard.links import HOOKS, REGISTRIES
from simplegraph.guard.scripted import ScriptedValues, python_below
from simplegraph.guard.value_check import ValueHolder, ValueSource
from simplegraph.guard.values import NOT_PLAIN, SCRIPTS, CompiledModule, can_be_referenced, dotted, value_key

_OF_TORCH = frozenset(vars(nn.Module())) | {"_simplegraph", "_simplegraph_optimized"}  # checked in other ways
# Attributes of torch's that are guarded if no survey sees the module.
_OF_HIDDEN = frozenset({"training", *REGISTRIES, *HOOKS})
# With these names, code may lead to any child of a module.
_THROUGH_CHILDREN = frozenset(
    {"children", "modules", "named_children", "named_modules", "get_submodule", "_modules", "apply"}
)
_MODULE_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
_OF_ENVIRONMENT = frozenset({"environ", "getenv"})
_OURS = "_simplegraph"  # the prefix of attributes that this library sets
# Types of values that may lead to code.
_LEADING = frozenset(
    {types.FunctionType, types.MethodType, functools.partial, CustomOpDef, dict, list, tuple, *ALIASES}
)
_VALUES = frozenset({"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_GLOBAL", "LOAD_FAST", "LOAD_FAST_BORROW"})
_NO_WORK = frozenset({"RESUME", "NOP", "CACHE", "RETURN_CONST", "RETURN_VALUE"})
_WITH_INIT = (
    "is a threading.local with an __init__, which Python would run when another thread reads it. Remove __init__ and "
    "read getattr(local, name, default), or use a contextvars.ContextVar"
)


def _in_context(variable: contextvars.ContextVar[Any]) -> dict[str, Any]:
    """Return the value of a context variable in this context, under the name "get()"."""
    try:
        return {"get()": variable.get()}
    except LookupError:
        return {}


def _in_thread(local: threading.local) -> dict[str, Any]:
    """Return the attributes of a thread-local object in this thread."""
    return dict(threading.local.__getattribute__(local, "__dict__"))


# What objects of these classes show as their attributes: the one object that they are made of.
_VIEWS: dict[type, Callable[[Any], dict[str, Any]]] = {
    types.MethodType: lambda method: {"__self__": method.__self__},
    types.MappingProxyType: lambda proxy: dict(zip(("items",), gc.get_referents(proxy), strict=True)),
    staticmethod: lambda static: {"__func__": static.__func__},
}
_WITH_CONTEXT: dict[type, Callable[[Any], dict[str, Any]]] = {
    contextvars.ContextVar: _in_context,
    threading.local: _in_thread,
}


def _attributes_of_tensor(tensor: Tensor) -> dict[str, Any] | None:
    """Return the attributes of a tensor; None if it has none, as most, or slots, as a `DTensor`."""
    return None if slots_of(type(tensor)) else own_dict(tensor) or None


def _unseen(_: threading.local) -> dict[str, Any]:
    """Return no values: reading them in a new thread would run the user's ``__init__``."""
    return {}


def _only_sets(code: types.CodeType) -> bool:
    """True if a method only sets attributes of its object to constants, globals and arguments."""
    steps = list(dis.get_instructions(code))
    targets = {before.argval for before, step in itertools.pairwise(steps) if step.opname == "STORE_ATTR"}
    return targets <= {*code.co_varnames[:1]} and {step.opname for step in steps} <= _VALUES | _NO_WORK | {"STORE_ATTR"}


@by_class
def _context_of(kind: type) -> Callable[[Any], dict[str, Any]] | None:
    """Return the reader of objects whose values depend on the context or thread; None for other classes."""
    init = class_member(kind, "__init__")
    if issubclass(kind, threading.local) and type(init) is types.FunctionType and not _only_sets(init.__code__):
        return _unseen
    return next((read for base, read in _WITH_CONTEXT.items() if issubclass(kind, base)), None)


@by_class
def _opens(kind: type) -> Any:
    """Return how walks open objects of a class, as `kind_of` does, but for tensors: only their attributes matter."""
    if kind is Door:
        return None
    if kind in _VIEWS:
        return _VIEWS[kind]
    if issubclass(kind, SCRIPTS):
        return python_below
    if (context := _context_of(kind)) is not None:
        return context
    base = kind_of(kind)
    return _attributes_of_tensor if base is Tensor else base


@by_class
def _opens_captured(kind: type) -> Any:
    """Return how walks open objects of a class, as `_opens` does; None for eager breaks, which are opened last."""
    return None if is_break(kind) else _opens(kind)


_POLICY = Policy(_opens, depth=DEPTH, width=MAX_WIDTH, objects=20_000)
_WITHOUT_BREAKS = dataclasses.replace(_POLICY, opens=_opens_captured)


class SearchRoot(NamedTuple):
    """An object at which a search begins, with its name; `find` returns the object if it must not be kept alive."""

    name: str
    thing: Any
    find: Callable[[], Any] | None = None


@dataclasses.dataclass
class _Way:
    """The way in which a search reached an object.

    Attributes:
        name: its dotted name.
        find: returns it without keeping it alive, or the dict that shows its values.
        keys: the keys that lead to it from a module; None if code leads to it.
        owner: the object that holds it, by `key`; None for a root.
        of_torch: True if it is one of torch's own attributes of a module.
        is_hidden: True if no survey sees it: code leads to it, or it is below an object that hides it.
        hides: True if no survey sees what is below it, as below slots and sets.
        is_unguarded: True if nothing below it is guarded: in objects of this library, or that refer to the module, such
            as a trainer.
    """

    name: str
    find: Callable[[], Any]
    keys: tuple[Any, ...] | None
    owner: Any = None
    key: Any = None
    of_torch: bool = False
    is_hidden: bool = False
    hides: bool = False
    is_unguarded: bool = False


def _way_to(thing: Any, walk: Walk, ways: dict[int, _Way], starts: dict[int, SearchRoot], *, by_code: bool) -> _Way:
    """Return how a search reached an object, from how it reached the object that holds it."""
    _, above, key, _ = walk.ways[id(thing)]
    if not above:
        start = starts[id(thing)]
        return _Way(start.name, start.find or _nothing, None if by_code else (), is_hidden=by_code)
    owner, parent = walk.ways[above][0], ways[above]
    of_torch = issubclass(type(owner), nn.Module) and type(key) is str and key in _OF_TORCH
    is_hidden = by_code or parent.hides
    name = parent.name if of_torch and not is_hidden else dotted(parent.name, key)
    base = dict if kind_of(type(owner)) in (object, OPAQUE, Tensor) else kind_of(type(owner))
    keys: tuple[Any, ...] | None = None
    if not by_code:
        keys = () if issubclass(type(thing), nn.Module) else (*(parent.keys or ()), key)
    is_unguarded = parent.is_unguarded or (type(key) is str and key.startswith(_OURS))
    find = functools.partial(_item, parent.find, base, key)
    return _Way(name, find, keys, owner, key, of_torch, is_hidden, is_unguarded=is_unguarded)


class Holders:
    """Finds all holders of plain values that calls of a module may read.

    Args:
        roots: the module, or the modules that a function reaches.
        gone: called when an object ends whose attributes are kept alive.
        function: the function, if calls run a function instead of a module.
        breaks: True if values that eager breaks read are guarded as well, since graphs hold them.
        closed: names of containers whose contents are not searched.

    Attributes:
        all: the holders.
        root: the holder of the first root's own attributes, which are not kept alive.
        opened: ids of objects that were opened.
        code: the code below a call.
        scripts: names of the TorchScript modules and functions among the opened objects.
        refused: why the values that a call reads cannot be determined; else empty.
    """

    def __init__(
        self,
        roots: Sequence[SearchRoot],
        module: Any,
        gone: Callable[[Any], object],
        function: Any = None,
        *,
        breaks: bool,
        closed: Collection[str] = (),
    ) -> None:
        self._module, self._gone, self._breaks, self._closed = original_of(module), gone, breaks, closed
        children = (own_dict(self._module) or {}).get("_modules") or {}
        self._unhooked = children.get(class_member(type(self._module), "_simplegraph_unhooked"))
        self._classes: dict[type, None] = {}
        self._functions: dict[int, Any] = {}
        self._of_breaks: tuple[dict[type, None], dict[int, Any]] = {}, {}  # the same of modules that are eager breaks
        self._policy = _POLICY if breaks else _WITHOUT_BREAKS
        self._objects: list[SearchRoot] = []
        if function is not None:
            self._functions[id(function)] = function
            thing = function.__self__ if type(function) is types.MethodType else function
            self._objects.append(SearchRoot("self", thing, lambda: thing))
        number_read = -1
        code: list[Sized] = [self._classes, self._functions, *self._of_breaks]
        while number_read != sum(map(len, code)):  # objects that code names may have code, too
            number_read = sum(map(len, code))
            self._find(roots)
        del self._things  # which kept objects alive
        for holder in list(self.all):
            self._read(holder)

    def _find(self, roots: Sequence[SearchRoot], left: Collection[int] = ()) -> None:
        """Find holders; `left` are ids of the objects that are left to eager breaks, if these are known."""
        self.all: list[ValueHolder] = []
        self.root: ValueHolder | None = None
        self.opened = set(left)
        self._surveyed: set[int] = set()
        self.deaths: list[weakref.ref[Any]] = []
        self.scripts: list[str] = []
        self.refused = ""
        self._names: set[str] = set()
        self._unguarded: set[str] = set()
        self._unguarded_keys: set[str] = set()
        self._open(roots, None)
        classes, functions = self._of_breaks
        self.code = CodeBelow(
            self._classes, self._functions.values(), breaks=self._breaks, of_breaks=(classes, functions.values())
        )
        self._unguarded |= self.code.eager_names
        self._unguarded_keys |= self.code.eager_keys
        if self.code.eager_names and not left and (found := self._left_to_breaks(roots)):
            self._find(roots, found)
            return
        self.opened -= set(left)  # code in graphs may lead to them
        self._open_code()

    def _left_to_breaks(self, roots: Sequence[SearchRoot]) -> set[int]:
        """Return ids of the opened objects to which only attributes lead that eager breaks alone name."""
        names = self.code.eager_names
        goes_through = not _THROUGH_CHILDREN.isdisjoint(self.code.names)
        contents_of = {id(thing): (thing, contents) for thing, contents in self._things}
        reached: set[int] = set()
        pending = [original_of(root.thing) for root in roots]
        while pending:
            at = id(pending.pop())
            if at in reached or at not in contents_of:
                continue
            reached.add(at)
            thing, contents = contents_of[at]
            is_object = kind_of(type(thing)) in (object, Tensor)
            pending += (item for key, item in items_of(contents) if not (is_object and key in names))
            if issubclass(type(thing), nn.Module) and not (goes_through or issubclass(type(thing), _MODULE_CONTAINERS)):
                children = contents.get("_modules", {})
                reached.add(id(children))  # only those are followed that code in graphs may name
                pending += (child for name, child in dict.items(children) if name not in names)
        return contents_of.keys() - reached

    def _read(self, holder: ValueHolder) -> None:
        for path, value in holder.read(self.opened):
            if holder.name in self._closed:
                continue
            self.opened.add(id(value))
            name = functools.reduce(dotted, path, holder.name)
            keys = None if holder.keys is None else (*holder.keys, *path)
            self._read(self._add(ValueHolder(name, ValueSource(value), is_container=True), keys))

    def _add(self, holder: ValueHolder, keys: tuple[Any, ...] | None = None) -> ValueHolder:
        """Add a holder.

        Args:
            holder: the holder.
            keys: they lead from a module to it; None if code leads to it.
        """
        holder.keys = keys
        while holder.name in self._names:
            holder.name += "'"
        self._names.add(holder.name)
        holder.gone, holder.surveyed = self._gone, self._surveyed
        self.all.append(holder)
        return holder

    def _open(self, roots: Sequence[SearchRoot], code: CodeBelow | None, *, are_breaks: bool = False) -> None:
        """Add the holders of values below roots. If code is given, only attributes that it names are guarded.

        Modules that are eager breaks come last: what they lead to alone has no code that graphs hold.
        """
        walk = Walk([root.thing for root in roots], _POLICY if are_breaks else self._policy, self.opened)
        starts = {id(original_of(root.thing)): root for root in reversed(roots)}
        things = [(thing, contents) for thing, contents, _ in walk]
        self.opened |= {id(thing) for thing, _ in things}
        if code is None and not are_breaks:
            self._things = things
        kept = self._kept(things)
        ways: dict[int, _Way] = {}
        for thing, contents in things:  # each comes after the object that holds it
            way = ways[id(thing)] = _way_to(thing, walk, ways, starts, by_code=code is not None)
            if way.is_unguarded:
                continue
            if type(thing) in _VIEWS:
                way.find, way.hides = functools.partial(_viewed, _VIEWS[type(thing)], way.find), True
            elif (context := _context_of(type(thing))) is not None:
                self._add_context(thing, context, way, code)
            elif issubclass(type(thing), SCRIPTS):
                self._add_script(thing, contents, way)
            elif kind_of(type(thing)) is object:
                is_module = issubclass(type(thing), nn.Module)
                if is_module and not way.is_hidden:
                    self._surveyed.add(id(thing))
                holder = self._add_object(thing, contents, way, code, of_break=are_breaks)
                holder.has_tensors |= way.is_hidden
                way.find, way.hides = holder.find, holder.has_tensors
                way.is_unguarded = not is_module and any(it is self._module for it in contents.values())
            elif issubclass(type(thing), Tensor):
                # Surveys see the tensors among the attributes of plain tensors, and nothing else.
                by_code, is_seen = code is not None, type(thing) in (Tensor, nn.Parameter)
                names = code.names if code is not None and not code.computes_names else None
                guards = functools.partial(_is_guarded, names, (self._unguarded,))
                holder = self._attributes_of(thing, way.name, guards, by_code=by_code or not is_seen)
                way.find, way.hides = self._add(holder, way.keys).find, True
            elif issubclass(type(thing), tuple):
                way.hides = way.is_hidden
            elif not way.of_torch or (way.is_hidden and way.key in _OF_HIDDEN):
                self._add_container(thing, way, code, is_kept=id(thing) in kept, of_break=are_breaks)
        kinds = set() if self._breaks or are_breaks else {*filter(is_break, walk.kinds)}
        if kinds:
            breaks = [
                SearchRoot(dotted(ways[id(thing)].name, key), item, self._reference(item))
                for thing, contents in things
                for key, item in items_of(contents)
                if type(item) in kinds and not ways[id(thing)].is_unguarded
            ]
            self._open(breaks, code, are_breaks=True)

    def _add_context(
        self, thing: Any, context: Callable[[Any], dict[str, Any]], way: _Way, code: CodeBelow | None
    ) -> None:
        """Add the holder of an object whose values depend on the context or thread."""
        if context is _unseen:
            self.refused = f"{way.name} {_WITH_INIT}"
        reference = self._reference(thing)
        way.find, way.hides = functools.partial(_viewed, context, reference), True
        variable = reference if context is _in_context else None
        names = code.names if code is not None and context is _in_thread else None
        guards = functools.partial(_is_guarded, names, (self._unguarded,))
        source = ValueSource(find=way.find, is_view=True, variable=variable)
        holder = ValueHolder(way.name, source, guards, has_tensors=True)
        self._add(holder, way.keys)

    def _add_script(self, thing: Any, contents: Any, way: _Way) -> None:
        """Note a TorchScript function or module and the Python functions that it calls; add the holder of a module."""
        self.scripts.append(way.name)
        self._functions |= {id(function): function for function in contents.values()}
        if issubclass(type(thing), CompiledModule):
            source = ValueSource(find=ScriptedValues(self._reference(thing)).read, is_view=True)
            self._add(ValueHolder(way.name, source, has_tensors=True), way.keys)

    def _add_container(self, thing: Any, way: _Way, code: CodeBelow | None, *, is_kept: bool, of_break: bool) -> None:
        """Add the holder of a container's items, and of its attributes if its class has some."""
        way.hides = way.is_hidden or issubclass(type(thing), set)
        # The mapping behind a view is read each time, since another view may take the place of one.
        is_kept = is_kept and type(way.owner) not in _VIEWS
        holder = ValueHolder(
            way.name,
            ValueSource(thing) if is_kept else ValueSource(find=way.find),
            functools.partial(_is_guarded, None, (self._unguarded_keys,)),
            is_container=True,
            has_tensors=way.hides,
        )
        self._add(holder, way.keys)
        if holder.name in self._closed:
            holder.gone = None  # the items of a closed container are not kept
            way.is_unguarded = True
        attributes = own_dict(thing)  # a subclass of a container may have attributes beside its items
        if type(thing) not in DICTS and attributes is not None and attributes is not thing:
            self._add_object(thing, {}, way, code, of_break=of_break)

    def _kept(self, things: Sequence[tuple[Any, Any]]) -> set[int]:
        """Return ids of the containers that hold only plain values, and containers of such values."""
        kept: set[int] = set()
        for thing, contents in reversed(things):  # inner containers come last in `things`
            values = contents.values() if isinstance(contents, dict) else contents
            if (
                kind_of(type(thing)) not in (object, Tensor)
                and len(values) <= MAX_WIDTH
                and all(id(value) in kept or value_key(value) is not NOT_PLAIN for value in values)
            ):
                kept.add(id(thing))
        return kept

    def _reference(self, thing: Any) -> Callable[[], Any]:
        """Return a function that returns an object: a weak reference, if its class supports it."""
        if not can_be_referenced(type(thing)):
            return lambda: thing
        self.deaths.append(weakref.ref(thing, self._gone))
        return self.deaths[-1]

    def _attributes_of(self, thing: Any, name: str, guards: Callable[[Any], bool], *, by_code: bool) -> ValueHolder:
        """Make the holder of an object's attributes, without keeping the object alive."""
        attributes = own_dict(thing)
        has_slots = bool(slots_of(type(thing))) or attributes is None
        reference = self._reference(thing)
        if type(thing) is LRU:  # its dict is never replaced
            source = ValueSource(attributes)
        elif has_slots:
            source = ValueSource(find=functools.partial(_viewed, held_by, reference), is_view=True, owner=reference)
        elif thing is self._module:
            source = ValueSource(find=functools.partial(_viewed, own_dict, reference))
        else:
            source = ValueSource(attributes, owner=reference)
        is_ordered = not issubclass(type(thing), nn.Module)
        holder = ValueHolder(name, source, guards, has_tensors=by_code or has_slots, is_ordered=is_ordered)
        if thing is self._module and not has_slots:
            self.root = holder
        return holder

    def _add_object(
        self, thing: Any, contents: Any, way: _Way, code: CodeBelow | None, *, of_break: bool
    ) -> ValueHolder:
        """Add the holder of an object's attributes, and note the code among them; `of_break` if only a break has it."""
        classes, functions = self._of_breaks if of_break else (self._classes, self._functions)
        classes[type(thing)] = None
        is_module = issubclass(type(thing), nn.Module)
        names = None if code is None or code.computes_names or is_module else code.names
        for key, value in contents.items():
            is_code = type(value) in _LEADING or issubclass(type(value), type)
            if is_code and key not in _OF_TORCH and (names is None or key in names):
                functions[id(value)] = value
        skipped: Collection[str] = (_OF_TORCH - _OF_HIDDEN if way.is_hidden else _OF_TORCH) if is_module else ()
        if str(type(thing).__module__).partition(".")[0] == "simplegraph":
            skipped = contents.keys()  # attributes of our own modules lead to users' objects, and are no values
        for hooks in map(contents.get, HOOKS) if is_module and thing is not self._unhooked else ():
            functions |= {id(hook): hook for hook in dict.values(hooks or {})}
        called = (
            {key for key, value in contents.items() if issubclass(type(value), ATOMS)} if names is not None else set()
        )
        if code is not None:  # numbers whose name code has only as the name of a method that it calls
            called -= code.values
        guards = functools.partial(_is_guarded, names, (skipped, called, self._unguarded))
        holder = self._attributes_of(thing, way.name, guards, by_code=code is not None)
        return self._add(holder, way.keys)

    def _open_code(self) -> None:
        """Add the holders that code names: classes, globals, variables of closures, and everything below them."""
        code = self.code
        guards = functools.partial(_is_named, None if code.computes_names else code.names)
        holders = [
            ValueHolder(kind.__qualname__, ValueSource(class_dict(kind)), guards, has_tensors=True)
            for kind in (*code.classes.values(), Tensor)
            if kind is Tensor or not is_closed(kind.__module__)
        ]
        # A script's loops set globals all the time. Large files of libraries without versions are read by names, too.
        holders += [
            ValueHolder(
                str(file.get("__name__")),
                ValueSource(file),
                names.__contains__,
                has_tensors=True,
                names=names
                if file.get("__name__") == "__main__"
                or (versions.dict_version is None and is_closed(file.get("__name__")))
                else None,
            )
            for file, names in code.files.values()
        ]
        holders += [ValueHolder(name, ValueSource(cell=cell), has_tensors=True) for name, cell in code.cells]
        holders += [
            ValueHolder(function.__qualname__, ValueSource(vars(function)), guards, has_tensors=True)
            for function in code.own
            if vars(function)
        ]
        holders += [
            ValueHolder(function.__qualname__, ValueSource(function=function), has_tensors=True)
            for function in code.own
            if not is_packaged(function.__code__)
        ]
        if not _OF_ENVIRONMENT.isdisjoint(code.names):
            holders.append(ValueHolder("os.environ", ValueSource(vars(os.environ)["_data"]), is_container=True))
        libraries = {str(base.__module__).partition(".")[0] for kind in self._classes for base in kind.__mro__}
        readers = {LIBRARY_SETTINGS[name]: None for name in sorted(LIBRARY_SETTINGS.keys() & libraries)}
        holders += [ValueHolder("settings of a library", ValueSource(find=read, is_view=True)) for read in readers]
        roots = [root for root in self._objects if _opens(type(root.thing)) not in (None, OPAQUE)]
        for holder in holders:
            self._add(holder)
            container = holder.find()
            items = [(key, value) for key, value in dict.items(container) if holder.guards(key)]
            roots += [
                SearchRoot(dotted(holder.name, key), value, functools.partial(_item, holder.find, dict, key))
                for key, value in items
                if _opens(type(value)) not in (None, OPAQUE) and not (type(value) in DICTS and not value)
            ]
        self._open(roots, code)


def _is_guarded(names: Collection[str] | None, skipped: Sequence[Collection[str]], key: Any) -> bool:
    if type(key) is not str:
        return True
    for keys in skipped:  # torch's own attributes come first: most keys are among them
        if key in keys:
            return False
    return (names is None or key in names) and not key.startswith(_OURS)


def _is_named(names: Collection[str] | None, key: Any) -> bool:
    """True for attributes of classes that code names, and for methods that are called without their names."""
    if key in SPECIAL_METHODS:
        return True
    is_special = key.startswith("__") and key.endswith("__")
    return not is_special and (names is None or key in names)


def _item(find: Callable[[], Any], base: Any, key: Any) -> Any:
    return base.__getitem__(find(), key)


def _viewed(view: Callable[[Any], Any], find: Callable[[], Any]) -> Any:
    return view(find())


def _nothing() -> Any:
    raise LookupError("the owner of a search's root holds it")
