"""Find what a function reaches without being passed it, by the names that its code has.

It reaches its closure, defaults, globals, the arguments of a partial, the object that it is a method of, and attributes
of these. The user's functions, methods and properties among them are looked into as well. A name alone does not tell
what it is an attribute of, so an attribute may be found that no code reads, because another object's has its name.
Instructions only tell if a name is a global's, and if it is called as a method: a loop's counter called ``step`` is not
what ``optimizer.step()`` reads.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.nested import ATOMS
from simplegraph.program.held import is_library

_MAX_OBJECTS = 2_000  # a bound for what hangs on by accident
_INNER = ("__func__", "fget", "func", "__wrapped__")  # where methods, properties and wrappers have their function
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_FLAGS_METHODS = "LOAD_METHOD" not in dis.opmap  # from Python 3.12 on
_WHOLE = (nn.Module, Tensor, Optimizer, torch.Generator)  # what they hold is looked for in other ways


class CodePlace(NamedTuple):
    """A place that code may read: ``holder[key]`` was `value`; `name` is as in code, such as ``self.model``."""

    name: str
    holder: Any
    key: Any
    value: Any


# No code runs where these are read; the last is a field of a named tuple.
_READABLE = (types.FunctionType, staticmethod, classmethod, types.MemberDescriptorType, type(vars(CodePlace)["name"]))


class Attributes:
    """Gives the attributes of an object, a class or a closure's cell as items; of a method its function."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getitem__(self, key: str) -> Any:
        value = getattr(self._owner, key)
        return getattr(value, "__func__", value)

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._owner, key, value)


class Reach:
    """Finds the places that functions, and the user's functions that they reach, may read.

    Attributes:
        opened: ids of the objects whose attributes are such places.
    """

    def __init__(self) -> None:
        self._names = {"__call__"}  # of all code that was looked into, now or earlier
        self._values: set[str] = set()  # those of attributes that may be plain values

    def find(self, functions: Iterable[Any]) -> list[CodePlace]:
        """List the places, and what they hold now."""
        roots, known = [(function, "self") for function in functions], 0
        while known != len(self._names):  # more code may name more attributes of what was looked into before
            known = len(self._names)
            self._places: dict[tuple[int, Any], CodePlace] = {}
            self._taken: set[str] = set()
            self._seen: set[int] = set()
            self.opened: set[int] = set()
            self._has_read = False
            self._left: list[tuple[Any, str]] = roots[::-1]
            while self._left and len(self._seen) < _MAX_OBJECTS:
                self._look_into(*self._left.pop())
        return list(self._places.values())

    def _look_into(self, value: Any, name: str) -> None:
        """Look into a function or an object; `name` is what messages call it."""
        if id(value) in self._seen or (isinstance(value, (*_WHOLE, *ATOMS)) and not isinstance(value, type)):
            return
        self._seen.add(id(value))
        if isinstance(value, types.FunctionType):
            self._read_code(value)
        elif isinstance(value, types.MethodType):
            self._left.append((value.__func__, name))
            self._add("self", {"self": value.__self__}, "self")
        elif isinstance(value, functools.partial):
            self._add("partial.func", Attributes(value), "func", value)
            self._add_all("partial.", value.args, range(len(value.args)))
            self._add_all("partial.", value.keywords, value.keywords)
        elif callable(value) and not isinstance(value, type) and is_library(type(value).__module__):
            self._left += ((inner, name) for inner in functions_in(value))
        else:
            self._open(value, name)

    def _read_code(self, function: types.FunctionType) -> None:
        code = function.__code__
        is_packaged = "site-packages" in code.co_filename or "dist-packages" in code.co_filename
        if (is_packaged or is_library(function.__module__)) and (self._has_read or hasattr(function, "__wrapped__")):
            self._left += ((inner, "self") for inner in functions_in(function)[1:])  # it may decorate a user's
            return
        self._has_read, names = True, _names_of(code)
        self._names |= names.all
        self._values |= names.values
        self._add(function.__qualname__, [function], 0, function)
        self._add_all("", function.__globals__, sorted(names.globals & function.__globals__.keys()))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(name, Attributes(cell), "cell_contents", cell)
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        for key in ("__defaults__", "__kwdefaults__") if defaults or keywords else ():  # they may be replaced
            self._add(f"{function.__qualname__}.{key}", Attributes(function), key, function)
        for index, name in enumerate(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]):
            self._add(name, defaults, index)
        self._add_all("", keywords, keywords)

    def _open(self, owner: Any, name: str) -> None:
        """Add the attributes of an object, or the items of a dict, that any of the code names."""
        for namespace in _namespaces(owner):
            for key in sorted(self._names & namespace.keys()):
                if key not in self._values and isinstance(namespace[key], ATOMS):
                    continue
                if namespace is owner:
                    self._add(f"{name}[{key!r}]", owner, key, owner)
                    continue
                if isinstance(namespace, dict):  # which may be replaced as a whole
                    self._seen.add(id(namespace))
                    self._add(f"{name}.__dict__", Attributes(owner), "__dict__", owner)
                self.opened |= {id(owner), id(namespace)}
                member, of_class = namespace[key], isinstance(namespace, types.MappingProxyType)
                computed = of_class and hasattr(type(member), "__get__") and not isinstance(member, _READABLE)
                if of_class:  # one that another class overrides may be called as well
                    self._left += ((inner, name) for inner in functions_in(member))
                self._add(f"{name}.{key}", Attributes(owner) if of_class and not computed else namespace, key, owner)

    def _add_all(self, prefix: str, holder: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            self._add(f"{prefix}{key}", holder, key)

    def _add(self, name: str, holder: Any, key: Any, owner: Any = None) -> None:
        """Add a place of a holder, or of the object that it belongs to, and look into what is there."""
        at = id(holder if owner is None else owner), key
        try:
            value = holder[key]
        except (LookupError, AttributeError, ValueError):  # the last of an empty cell
            return
        self._left.append((value, name))
        if at in self._places or isinstance(value, types.ModuleType):
            return
        while name in self._taken:  # two closures may have the same names
            name += "'"
        self._taken.add(name)
        self._places[at] = CodePlace(name, holder, key, value)


class _Names(NamedTuple):
    """The names and texts that code has, and functions inside of it.

    Attributes:
        all: an attribute's, a global's, a key's; globals: those of globals.
        values: all but names that are only called as methods.
    """

    all: frozenset[str]
    globals: frozenset[str]
    values: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> _Names:
    inner = [_names_of(value) for value in code.co_consts if isinstance(value, types.CodeType)]
    texts = frozenset(value for value in code.co_consts if isinstance(value, str))
    steps = [step for step in dis.get_instructions(code) if step.opcode in dis.hasname]
    named = frozenset(step.argval for step in steps if step.opname.endswith(("_GLOBAL", "_NAME")))
    values = frozenset(step.argval for step in steps if not _is_method(step))
    return _Names(
        frozenset(code.co_names).union(texts, *(each.all for each in inner)),
        named.union(*(each.globals for each in inner)),
        values.union(texts, *(each.values for each in inner)),
    )


def _is_method(step: dis.Instruction) -> bool:
    """True if an instruction loads an attribute to call it at once."""
    flagged = step.opname == "LOAD_ATTR" and _FLAGS_METHODS and bool((step.arg or 0) & 1)
    return step.opname == "LOAD_METHOD" or flagged


def functions_in(value: Any) -> list[Any]:
    """List the functions that a value is, or stands for."""
    inner = () if not hasattr(type(value), "__get__") and not callable(value) else _INNER
    return [each for each in (value, *(getattr(value, name, None) for name in inner)) if isinstance(each, _FUNCTIONS)]


def _namespaces(value: Any) -> list[Mapping[str, Any]]:
    """List what an object holds by name: items of a dict, attributes, and those of the user's classes that it is of."""
    is_class, own = isinstance(value, type), [value] if isinstance(value, dict) else []
    if not is_class and not (isinstance(value, types.ModuleType) and is_library(value.__name__)):
        own.append(getattr(value, "__dict__", {}))
    classes = value.__mro__ if is_class else type(value).__mro__
    return [*own, *(vars(base) for base in classes if not is_library(base.__module__))]
