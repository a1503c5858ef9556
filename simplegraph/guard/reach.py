"""Find what a function reaches without being passed it: through globals, its closure, defaults and the object it is of.

The code tells: names that it loads or sets, and attributes of these, in it and in the user's functions that it calls.
Each is a place (holder, key), which may be bound to something else later.
"""

from __future__ import annotations

import collections
import dis
import functools
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.nested import ATOMS
from simplegraph.program.places import ABSENT, is_library

_MAX_FUNCTIONS = 500  # a bound for what hangs on by accident
_MAX_ALIASES = 8
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_LOCALS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
_ATTRIBUTES = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# Between a name and its attributes; a copy is for ``self.count += 1``.
_BETWEEN = frozenset({"CACHE", "PUSH_NULL", "EXTENDED_ARG", "COPY", "DUP_TOP", "DUP_TOP_TWO"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})
_CONTAINERS = (dict, collections.OrderedDict, list, tuple)  # and no class of the user's, whose items may be computed
_NAME_STORES = {"STORE_GLOBAL": "LOAD_GLOBAL", "STORE_DEREF": "LOAD_DEREF"}
_WHOLE = (nn.Module, Tensor, Optimizer, torch.Generator)  # what they hold is looked for in other ways
# Attributes of these are not looked up; of a class they are.
_ENDS = tuple({*ATOMS, *_FUNCTIONS, types.BuiltinFunctionType} - {type})


class Item(NamedTuple):
    """An item that code reads of what is there, by a key that it has itself."""

    key: Any

    def __str__(self) -> str:
        return f"[{self.key!r}]"


Step = str | Item  # from a place to another: an attribute or an item
Chain = tuple[str, str, list[Step]]


class CodePlace(NamedTuple):
    """A place that code reads: ``holder[key]``.

    Attributes:
        name: as the code has it, such as ``self.model``; last: True if the code reads no attribute of what is there.
    """

    name: str
    holder: Any
    key: Any
    last: bool = True

    @property
    def value(self) -> Any:
        """Return what it holds; `ABSENT` if nothing."""
        try:
            return self.holder[self.key]
        except (LookupError, ValueError):  # the latter of an empty cell
            return ABSENT


class CellItem:
    """Gives a closure's cell the ways of a container: its item 0 is what it holds."""

    def __init__(self, cell: types.CellType) -> None:
        self._cell = cell

    def __getitem__(self, key: int) -> Any:
        return self._cell.cell_contents

    def __setitem__(self, key: int, value: Any) -> None:
        self._cell.cell_contents = value


def places_of(function: Any) -> list[CodePlace]:
    """List the places that a function, and the user's functions that it calls, read."""
    return list(_Reach(function).places.values())


class _Reach:
    def __init__(self, function: Any) -> None:
        self.places: dict[tuple[int, Any], CodePlace] = {}
        self._seen: set[tuple[int, int]] = set()
        self._left: list[tuple[Any, str]] = [(function, "")]
        while self._left and len(self._seen) < _MAX_FUNCTIONS:
            self._look_into(*self._left.pop())

    def _look_into(self, function: Any, name: str) -> None:
        """Look into a callable; `name` is what messages call the object that it belongs to."""
        if isinstance(function, functools.partial):
            for key, value in (*enumerate(function.args), *function.keywords.items()):
                holder = function.args if isinstance(key, int) else function.keywords
                self._add(CodePlace(f"partial.{key}", holder, key), value)
            self._left.append((function.func, name))
            return
        if isinstance(function, types.MethodType):
            function, bound_to = function.__func__, function.__self__
        elif not isinstance(function, types.FunctionType):
            bound_to, function = function, inspect.getattr_static(type(function), "__call__", None)
        else:
            bound_to = ABSENT
        if not isinstance(function, types.FunctionType):
            return
        key = id(function), id(bound_to)
        if key in self._seen:
            return
        self._seen.add(key)
        if _is_packaged(function) and len(self._seen) > 1:
            return
        if is_library(function.__module__):  # but what it decorates may be the user's
            inner = getattr(function, "__wrapped__", None)
            if isinstance(inner, types.FunctionType):
                self._left.append((inner if bound_to is ABSENT else types.MethodType(inner, bound_to), name))
            return
        code = function.__code__
        owner = {} if bound_to is ABSENT else dict.fromkeys(code.co_varnames[: code.co_argcount][:1], bound_to)
        self._read_code(function, code, _locals_of(function, owner))

    def _read_code(self, function: types.FunctionType, code: types.CodeType, local: Mapping[str, CodePlace]) -> None:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        for load, root, attributes in _chains(code):
            place = None
            if load in _LOCALS or root in local:
                place = local.get(root)
            elif load != "LOAD_GLOBAL" and root in cells:
                place = self.places.get((id(cells[root]), 0)) or CodePlace(root, CellItem(cells[root]), 0)
            elif load in ("LOAD_GLOBAL", "LOAD_NAME") and root in function.__globals__:
                place = CodePlace(root, function.__globals__, root)
            if place is not None:
                self._follow(place, attributes)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                inside = {name: place for name, place in local.items() if name in inner.co_freevars}
                self._read_code(function, inner, inside)

    def _follow(self, place: CodePlace, attributes: Sequence[Step]) -> None:
        """Follow a chain of attributes and items from a place, as far as it leads through the user's objects."""
        value = place.value
        for attribute in attributes:
            if isinstance(attribute, Item):
                self._add(place, value)  # its other items may be read by keys that the code does not tell
                place = CodePlace(f"{place.name}{attribute}", value, attribute.key)
                if type(value) not in _CONTAINERS or place.value is ABSENT:
                    return
                value = place.value
                continue
            step = _attribute(place, value, attribute)
            if step is None:
                break
            self._add(place._replace(last=False), value)
            if not isinstance(step, CodePlace):
                if isinstance(step, types.MethodType) and getattr(type(value), attribute, None) is step.__func__:
                    method = CodePlace(f"{place.name}.{attribute}", _Method(value), attribute, last=False)
                    self.places[id(value), f".{attribute}"] = method
                self._left.append((step, place.name))
                return
            place, value = step, step.value
        self._add(place, value)

    def _add(self, place: CodePlace, value: Any) -> None:
        if value is ABSENT or isinstance(value, types.ModuleType):
            return
        holder = place.holder._cell if isinstance(place.holder, CellItem) else place.holder
        at = id(holder), place.key
        known = self.places.get(at)
        self.places[at] = place._replace(last=place.last or (known is not None and known.last))
        if place.last and (isinstance(value, _FUNCTIONS) or _is_users_callable(value)):
            self._left.append((value, place.name))


def _is_packaged(function: types.FunctionType) -> bool:
    """True for a function of an installed package, and none that decorates a user's."""
    path = function.__code__.co_filename
    return ("site-packages" in path or "dist-packages" in path) and not hasattr(function, "__wrapped__")


def _locals_of(function: types.FunctionType, bound: Mapping[str, Any]) -> dict[str, CodePlace]:
    """List the arguments whose values are known: what a method is of, and defaults."""
    code = function.__code__
    positional = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    known = {
        name: CodePlace(name, defaults, index)
        for index, name in enumerate(positional[len(positional) - len(defaults) :])
    }
    keyword = function.__kwdefaults__ or {}
    known |= {name: CodePlace(name, keyword, name) for name in keyword}
    return known | {name: CodePlace(name, {name: value}, name) for name, value in bound.items()}


@functools.lru_cache(maxsize=4096)
def _chains(code: types.CodeType) -> tuple[Chain, ...]:
    """List (opcode, name, steps) for every name that the code loads or sets, and attributes and items that follow.

    A local variable that the code sets to one of them stands for it.
    """
    aliases: dict[str, list[Chain]] = {}
    chains = list(_read_chains(code, aliases))
    return tuple(known for chain in chains for known in _without_aliases(chain, aliases))


def _without_aliases(
    chain: Chain, aliases: Mapping[str, list[Chain]], seen: frozenset[str] = frozenset()
) -> list[Chain]:
    load, root, steps = chain
    if load not in _LOCALS or root not in aliases or root in seen or len(seen) > _MAX_ALIASES:
        return [chain]
    meant = [(known, name, [*before, *steps]) for known, name, before in aliases[root]]
    return [chain, *(found for each in meant for found in _without_aliases(each, aliases, seen | {root}))]


def _read_chains(code: types.CodeType, aliases: dict[str, list[Chain]]) -> Iterator[Chain]:
    load, root, attributes = "", "", list[Step]()
    key: Item | None = None
    for instruction in dis.get_instructions(code):
        name, value = instruction.opname, instruction.argval
        if name in _BETWEEN:
            continue
        if root and key is not None:
            found, key = key, None
            if name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
                attributes.append(found)
                continue
        if root and name in _CONSTANTS:
            key = Item(value)
            continue
        if root and (name in _ATTRIBUTES or name == "STORE_ATTR"):
            attributes.append(str(value))
            if name in _ATTRIBUTES:
                continue
        if root:
            yield load, root, attributes
            if name.startswith("STORE_FAST"):
                aliases.setdefault(value[0] if isinstance(value, tuple) else str(value), []).append(
                    (load, root, attributes)
                )
        load, root, attributes = "", "", []
        if name in _NAME_STORES:
            yield _NAME_STORES[name], str(value), []
        if name in _LOADS or name in _LOCALS:
            load, root = name, str(value)
        elif name.endswith(("LOAD_FAST", "LOAD_FAST_BORROW")) and isinstance(value, tuple):  # two instructions in one
            if name.startswith("LOAD"):
                yield "LOAD_FAST", str(value[0]), []
            load, root = "LOAD_FAST", str(value[1])
    if root:
        yield load, root, attributes


def _attribute(place: CodePlace, value: Any, attribute: str) -> Any:
    """Find the place of an attribute, or the function that it is; None where the chain ends."""
    if isinstance(value, types.ModuleType):
        return None if is_library(value.__name__) else CodePlace(f"{place.name}.{attribute}", vars(value), attribute)
    if isinstance(value, (*_WHOLE, *_ENDS)):
        return None
    name = f"{place.name}.{attribute}"
    if isinstance(value, type):
        member = inspect.getattr_static(value, attribute, ABSENT)
        owner = next((base for base in value.__mro__ if attribute in vars(base)), None)
        if isinstance(member, (staticmethod, classmethod)):
            return _bound(member, value)
        return None if owner is None or is_library(owner.__module__) else CodePlace(name, _ClassItems(owner), attribute)
    if attribute in getattr(value, "__dict__", {}):
        return CodePlace(name, vars(value), attribute)
    owner = next((base for base in type(value).__mro__ if attribute in vars(base)), None)
    if owner is None or is_library(owner.__module__):
        return None
    member = vars(owner)[attribute]
    if isinstance(member, property):
        return types.MethodType(member.fget, value) if member.fget is not None else None
    if isinstance(member, types.FunctionType):
        return types.MethodType(member, value)
    if isinstance(member, (staticmethod, classmethod)):
        return _bound(member, type(value))
    if type(member) is types.MemberDescriptorType:
        return CodePlace(name, _Slots(value), attribute)
    return CodePlace(name, _ClassItems(owner), attribute)


def _bound(member: Any, owner: type) -> Any:
    """Return the function of a static method, or of a class method with its class."""
    function = member.__func__
    bound = isinstance(member, classmethod) and isinstance(function, types.FunctionType)
    return types.MethodType(function, owner) if bound else function


class _Method:
    """Gives an object the ways of a container of its methods: functions of its class, unless it has its own."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getitem__(self, key: str) -> Any:
        own = getattr(self.thing, "__dict__", {}).get(key, ABSENT)
        return getattr(type(self.thing), key, ABSENT) if own is ABSENT else own


class _ClassItems:
    """Gives a class the ways of a container of its attributes."""

    def __init__(self, owner: type) -> None:
        self.thing = owner

    def __getitem__(self, key: str) -> Any:
        return vars(self.thing)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.thing, key, value)


class _Slots:
    """Gives an object with slots the ways of a container."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self.thing, key, value)

    def __getitem__(self, key: str) -> Any:
        try:
            return getattr(self.thing, key)
        except AttributeError:
            raise KeyError(key) from None


def is_code(value: Any) -> bool:
    """True for functions, classes and modules of Python, which hold no values of a call."""
    return isinstance(value, (*_FUNCTIONS, type, types.ModuleType, types.BuiltinFunctionType))


def _is_users_callable(value: Any) -> bool:
    """True for an object of a user's class that can be called, a module of torch or a class excepted."""
    kind = type(value)
    own = not isinstance(value, (*_WHOLE, type, types.BuiltinFunctionType)) and callable(value)
    return own and not is_library(kind.__module__) and kind.__module__ != "builtins"
