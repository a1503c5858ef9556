"""Find the code that a module's calls may run, by the names in it: functions, classes, and globals of files."""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._library.custom_ops import OPDEFS
from torch.nn import functional

from simplegraph.base.nested import ATOMS
from simplegraph.base.objects import attribute_of, by_class, class_member, own_dict
from simplegraph.base.walk import (
    ALIASES,
    CLASS_REGISTRIES,
    DEPTH,
    MAX_WIDTH,
    held_by,
    imports_in,
    is_break,
    is_closed,
    names_in,
)

# Attributes in which methods, properties and wrappers hold their functions.
_INNER = ("__func__", "fget", "fset", "fdel", "func", "__wrapped__")
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
_REPLACEABLE = (types.FunctionType, types.BuiltinFunctionType)
_FLAGS_METHODS = sys.version_info >= (3, 12)  # LOAD_ATTR has a bit that tells if it loads a method
# Methods that make, copy, show and change objects. A module's are called before and after its calls.
_MAKING = frozenset(
    f"__{name}__"
    for name in (
        *("init", "new", "post_init", "init_subclass", "del", "repr", "str", "dir", "setattr", "delattr"),
        *("reduce", "reduce_ex", "getstate", "setstate", "getnewargs", "getnewargs_ex", "copy", "deepcopy"),
    )
)
_CONSTRUCTING = frozenset({"__init__", "__new__", "__post_init__"})
_BY_AUTOGRAD = frozenset({"backward", "vjp", "jvp", "vmap", "setup_context"})  # methods of torch.autograd.Function
# All methods that operators, statements, built-in functions and autograd call.
SPECIAL_METHODS = frozenset(
    f"__{name}__"
    for name in (
        *("call", "getattr", "getattribute", "get", "set", "enter", "exit", "class_getitem"),
        *("instancecheck", "subclasscheck", "torch_function", "torch_dispatch", "bytes", "length_hint"),
        *("getitem", "setitem", "delitem", "missing", "contains", "len", "iter", "next", "reversed", "hash", "format"),
        *("bool", "index", "int", "float", "complex", "abs", "neg", "pos", "invert", "round", "trunc", "floor", "ceil"),
        *("eq", "ne", "lt", "le", "gt", "ge"),
        *(
            f"{prefix}{operation}"
            for prefix in ("", "r", "i")
            for operation in (
                *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow"),
                *("lshift", "rshift", "and", "or", "xor"),
            )
        ),
    )
).union(_MAKING, _BY_AUTOGRAD)
_FILLING = frozenset({"append", "appendleft", "extend", "add", "update"})
_METHOD_LOADS = frozenset({"LOAD_METHOD", "LOAD_ATTR"})
_NO_LOADS = frozenset({"LOAD_CLOSURE", "COPY_FREE_VARS", "MAKE_CELL", "CACHE", "PRECALL", "EXTENDED_ARG", "LOAD_CONST"})
_SETTING = frozenset({"setattr", "__setattr__", "delattr", "vars", "__dict__"})  # by computed names
_STORES = frozenset({"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "STORE_DEREF"})
_ITEM_STORES = frozenset({"STORE_SUBSCR", "DELETE_SUBSCR"})
_CONSTANT_KEYS = frozenset({"LOAD_CONST", "BUILD_SLICE"})
_CHANGING = frozenset({"update", "setdefault", "pop", "popitem", "clear", "move_to_end", "__setitem__", "__delitem__"})
_COMPUTING = frozenset({"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "asdict", "astuple"})
_CONTAINERS = "torch.nn.modules.container"
_MAX_FUNCTIONS = 2_000
# The functions of torch.nn.functional, which layers and libraries call, and which users replace.
_FUNCTIONAL = frozenset(name for name, value in vars(functional).items() if isinstance(value, _REPLACEABLE))
_TABLES = frozenset({dict, list, tuple})
_WITH_CODE = (types.FunctionType, types.MethodType, type, nn.Module)  # callable objects whose code is read


class CodeNames(NamedTuple):
    """The names and strings in code, inner functions included.

    Attributes:
        all: names of attributes and globals, and strings; globals: names of globals.
        values: all except names that are only called as methods; texts: strings.
        loaded: names that are not only set.
    """

    all: frozenset[str]
    globals: frozenset[str]
    values: frozenset[str]
    texts: frozenset[str]
    loaded: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> CodeNames:
    """Return the names and strings in code, inner functions included."""
    inner = [names_of(value) for value in code.co_consts if issubclass(type(value), types.CodeType)]
    texts = frozenset(_texts_in(code.co_consts))
    steps = [step for step in dis.get_instructions(code) if step.opcode in dis.hasname]
    named = frozenset(step.argval for step in steps if step.opname.endswith(("_GLOBAL", "_NAME")))
    values = frozenset(step.argval for step in steps if not _is_method(step))
    loaded = frozenset(step.argval for step in steps if step.opname not in _STORES)
    return CodeNames(
        frozenset(code.co_names).union(texts, *(inner_names.all for inner_names in inner)),
        named.union(*(inner_names.globals for inner_names in inner)),
        values.union(texts, *(inner_names.values for inner_names in inner)),
        texts.union(*(inner_names.texts for inner_names in inner)),
        loaded.union(*(inner_names.loaded for inner_names in inner)),
    )


def _texts_in(constants: Iterable[Any]) -> Iterator[str]:
    """Yield the strings among constants, and in tuples and sets of them."""
    for value in constants:
        if issubclass(type(value), str):
            yield value
        elif type(value) in (tuple, frozenset):
            yield from _texts_in(value)


@functools.lru_cache(maxsize=4096)
def only_fills(code: types.CodeType, name: str) -> bool:
    """True if code only adds to the container in a variable or attribute, such as a log, and never reads it."""
    inner = (inner_code for inner_code in code.co_consts if issubclass(type(inner_code), types.CodeType))
    steps = [step for step in dis.get_instructions(code) if step.opname not in _NO_LOADS]
    loads = [following for step, following in itertools.pairwise(steps) if step.argval == name]
    return all(step.opname in _METHOD_LOADS and step.argval in _FILLING for step in loads) and all(
        only_fills(inner_code, name) for inner_code in inner
    )


@functools.lru_cache(maxsize=4096)
def set_in(code: types.CodeType) -> frozenset[str]:
    """Return the names of attributes, globals and closures' variables that code sets, inner functions included."""
    inner = (set_in(value) for value in code.co_consts if issubclass(type(value), types.CodeType))
    own = (step.argval for step in dis.get_instructions(code) if step.opname in _STORES)
    return frozenset(own).union(*inner)


@functools.lru_cache(maxsize=4096)
def keys_set_in(code: types.CodeType) -> frozenset[str]:
    """Return the texts that code may set or remove as keys of dicts, inner functions included."""
    inner = (keys_set_in(value) for value in code.co_consts if issubclass(type(value), types.CodeType))
    pairs = list(itertools.pairwise(dis.get_instructions(code)))
    by_constant = [key.argval for key, step in pairs if step.opname in _ITEM_STORES and key.opname == "LOAD_CONST"]
    keys = {key for key in by_constant if issubclass(type(key), str)}
    if not _CHANGING.isdisjoint(code.co_names):
        keys.update(_texts_in(code.co_consts))
    elif any(step.opname in _ITEM_STORES and key.opname not in _CONSTANT_KEYS for key, step in pairs):
        # By a variable, such as one that goes through a tuple. A text that only looks up an item is no key of these.
        loaded = (key.argval for key, step in pairs if key.opname == "LOAD_CONST" and step.opname != "BINARY_SUBSCR")
        keys.update(_texts_in(loaded))
    return frozenset(keys).union(*inner)


def _is_method(step: dis.Instruction) -> bool:
    """True if an instruction loads an attribute that the next instructions call as a method."""
    flagged = step.opname == "LOAD_ATTR" and _FLAGS_METHODS and bool((step.arg or 0) & 1)
    return step.opname == "LOAD_METHOD" or flagged


def is_packaged(code: types.CodeType) -> bool:
    """True for code of installed packages, which users do not edit."""
    return "site-packages" in code.co_filename or "dist-packages" in code.co_filename


def functions_in(value: Any) -> list[Any]:
    """List the functions that a value is, or wraps, at any depth; outer ones first."""
    found: dict[int, Any] = {}
    candidates = [value]
    for candidate in candidates:  # the list grows meanwhile
        is_function = issubclass(type(candidate), _FUNCTIONS)
        if id(candidate) in found or not (is_function or candidate is value):
            continue
        if is_function:
            found[id(candidate)] = candidate
        if is_descriptor(type(candidate)) or callable(candidate):
            candidates += (attribute_of(candidate, name) for name in _INNER)
    return list(found.values())


def is_users_function(value: Any) -> bool:
    """True for functions and methods that are no library's."""
    return issubclass(type(value), _FUNCTIONS[:2]) and not is_closed(value.__module__)


@by_class
def is_descriptor(kind: type) -> bool:
    """True for classes of descriptors, whose objects compute attributes."""
    return class_member(kind, "__get__") is not None


class CodeBelow:
    """Lists the functions, classes and globals that the code of some classes leads to, starting at their forwards.

    The code of a method is read if other code contains its name, whatever the object; that of operators always.

    Args:
        classes: classes of modules and other objects.
        functions: further functions that are called, tables of functions, and classes.
        breaks: True to read the code of eager breaks as well.
        called: names of methods that are called.
        of_breaks: classes and functions to which only eager breaks lead.

    Attributes:
        names: names and strings in the code; values: all except names that are only called as methods.
        classes: the given classes, and classes that code names.
        files: by id, the dict of a file, and the names of its globals that are guarded; of a library, its functions.
        cells: cells of closures, with the variable's name.
        functions: functions whose code was read; own: those of users, which may wrap a library's, or be wrapped by it.
        has_breaks: True if it leads to eager breaks, whose code is not among it.
        eager_names: names that only eager breaks contain, which run eagerly whenever a graph is replayed. There are
            none if the other code computes names.
        eager_keys: those of these names that no eager break sets as a key of a dict, through which graphs' code may go.
    """

    def __init__(
        self,
        classes: Collection[type],
        functions: Iterable[Any] = (),
        *,
        breaks: bool,
        called: Collection[str] = ("forward",),
        of_breaks: tuple[Collection[type], Iterable[Any]] = ((), ()),
    ) -> None:
        self._breaks = None if breaks else list[Any]()
        self.names, self.values = set(called), set[str]()
        self._followed = set(called)  # names whose methods are read
        self.classes: dict[int, type] = {}
        self.files = {id(vars(functional)): (vars(functional), set(_FUNCTIONAL))}
        self.cells: list[tuple[str, types.CellType]] = []
        self.functions: list[types.FunctionType] = []
        self.own: list[types.FunctionType] = []
        self._members: dict[str, list[tuple[Any, int]]] = collections.defaultdict(list)
        self._read: set[int] = set()
        # Functions to read, and the number of functions, classes and files that lead to each.
        self._to_read: collections.deque[tuple[types.FunctionType, int]] = collections.deque()
        for kind in classes:
            self._add_class(kind, 0)
        for function in functions:
            self._add(function, 0)
        for value in (*vars(functional).values(), *vars(Tensor).values()):
            if is_users_function(value):
                self._add(value, 1)
        while self._to_read and len(self._read) < _MAX_FUNCTIONS:
            self._read_code(*self._to_read.popleft())
        self._eager: CodeBelow | None = None
        further, functions_of_breaks = of_breaks
        if self._breaks or further:
            self._eager = CodeBelow([*classes, *further], [*(self._breaks or ()), *functions_of_breaks], breaks=True)
        # Operators of torch's containers are always read, and set children alone: `ModuleList.__setitem__`.
        setting = [function for function in self.functions if function.__module__ != _CONTAINERS]
        self._sets_any = any(
            not _SETTING.isdisjoint(names_of(function.__code__).all)
            for function in setting
            if function.__name__ not in _MAKING
        )
        self._set = frozenset[str]().union(*(set_in(function.__code__) for function in setting))
        self.has_breaks, self.eager_names = self._eager is not None, set[str]()
        self.eager_keys = set[str]()
        if self._eager is not None and not self.computes_names:
            self.eager_names = self._eager.names - self.names
            eager_code = [function.__code__ for function in self._eager.functions]
            self.eager_keys = self.eager_names.difference(*map(keys_set_in, eager_code))

    @property
    def computes_names(self) -> bool:
        """True if code may read attributes by names that it computes."""
        return not _COMPUTING.isdisjoint(self.names)

    def sets(self, name: str) -> bool:
        """True if the code, eager breaks included, may set or delete an attribute or a variable of this name."""
        if self._eager is not None and self._eager.sets(name):
            return True
        return self._sets_any or name in self._set

    def only_fills(self, name: str) -> bool:
        """True if the code only adds to containers in attributes of this name, such as logs, and never reads them."""
        codes = [function.__code__ for function in self.functions]
        if self.computes_names or name not in self.values or any(name in names_of(code).texts for code in codes):
            return False
        return all(only_fills(code, name) for code in codes)

    def _add_class(self, kind: type, away: int) -> None:
        metaclass: type = type(kind)
        is_module, is_function = issubclass(kind, nn.Module), issubclass(kind, torch.autograd.Function)
        called = _BY_AUTOGRAD if is_function else {"__init__"}
        not_called = _MAKING if is_module else ()
        for base in (*kind.__mro__, *metaclass.__mro__):  # both have attributes of the class
            is_layer = not away and issubclass(base, nn.Module) and base is not nn.Module  # torch's own, too
            if id(base) in self.classes or (is_closed(base.__module__) and not is_layer):
                continue
            self.classes[id(base)] = base
            for name, member in list(vars(base).items()):
                if name == "__init__" and is_module and not away:
                    continue  # the module exists; constructors of other classes name it
                is_special = name.startswith("__") and name.endswith("__") and name not in not_called
                if name in self._followed or is_special or name in called:
                    self._add(member, away)
                else:
                    self._members[name].append((member, away))

    def _add(self, member: Any, away: int) -> None:
        if self._breaks is not None and is_break(member):
            self._breaks += functions_in(member)[1:]
        elif type(member) in ALIASES:
            self._add(member.__origin__, away)
        elif issubclass(type(member), type):
            if not is_closed(member.__module__) and away < DEPTH:
                self._add_class(member, away + 1)
        elif away <= DEPTH:
            self._to_read += ((inner, away) for inner in functions_in(member) if type(inner) is types.FunctionType)
            for item in _items_of_table(member):
                is_inner_table = type(item) is dict and type(member) not in _TABLES
                if is_inner_table or issubclass(type(item), type) or functions_in(item):
                    self._add(item, away + 1)

    def _read_code(self, function: types.FunctionType, away: int) -> None:
        if id(function) in self._read:
            return
        self._read.add(id(function))
        self.functions.append(function)
        code, file = function.__code__, function.__globals__
        is_library = is_closed(file.get("__name__"))
        is_own = not (is_library and is_closed(function.__module__))
        if is_own:
            self.own.append(function)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            content = held_by(cell).get("cell_contents")
            # What a library's decorator calls is the user's.
            is_read = is_own or type(content) is functools.partial
            if is_read and not only_fills(code, name):
                self.cells.append((f"{function.__qualname__}.{name}", cell))
            self._add(content, away)
        attributes = (value for key, value in vars(function).items() if key in names_of(code).all)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values(), *attributes):
            self._add(value, away)
        if is_library and is_own:
            return  # a decorator of a library
        names = names_in(code)
        if "globals" in names:
            names = names | names_of(code).all
        if not is_library:
            self._add_globals(file, names & file.keys(), function, away)
        for name, operation in list(OPDEFS.items()) if "ops" in names else ():  # torch.ops.library.name
            if names.issuperset(name.split("::")):
                self._add(operation, away)
        read = names_of(code)
        if function.__name__ in _MAKING:  # it sets attributes of new objects, or shows and copies all of an object
            loaded = read.loaded - _COMPUTING if function.__name__ in _CONSTRUCTING else frozenset[str]()
            self.names |= loaded
            self.values |= loaded & read.values
        else:
            self.names |= read.all
            self.values |= read.values
        for name in read.all - self._followed:
            self._followed.add(name)
            for member, of_class in self._members.pop(name, ()):
                self._add(member, of_class)

    def _add_globals(self, file: dict[str, Any], names: Iterable[str], function: Any, away: int) -> None:
        guarded = self.files.setdefault(id(file), (file, set()))[1]
        package, read = str(file.get("__name__")).partition(".")[0], names_of(function.__code__)
        things = [file.get(name) for name in names]
        if file is function.__globals__:
            things += map(sys.modules.get, imports_in(function.__code__, file.get("__package__")))
        for thing in things:
            inner = own_dict(thing) if issubclass(type(thing), types.ModuleType) else None
            if inner is not None and inner is not file and away < DEPTH:
                # A number is not read if its name is only called.
                numbers = {name for name in read.all - read.values if issubclass(type(inner.get(name)), ATOMS)}
                self._add_globals(inner, (read.all - numbers) & inner.keys(), function, away + 1)
                self._add(inner.get("__getattr__"), away + 1)  # which makes the other globals
        is_library = is_closed(file.get("__name__"))
        for name in names:
            value: Any = file.get(name)
            kind = type(value)
            if is_library:  # its functions may be replaced; only that of users is followed
                if callable(value) and not issubclass(kind, type):
                    guarded.add(name)
                if is_users_function(value):
                    self._add(value, away + 1)
                continue
            if (package, name) in CLASS_REGISTRIES or issubclass(kind, types.ModuleType):
                continue
            if issubclass(kind, type) or kind in ALIASES:
                self._add(value, away)
            elif functions_in(value) or kind in _TABLES or _items_of_table(value):
                self._add(value, away + 1)
            elif file is function.__globals__ and not read.globals & {name, "globals"}:
                continue  # an attribute of the same name
            is_global = file is function.__globals__ and name in read.globals
            if not (is_global and only_fills(function.__code__, name)):
                guarded.add(name)


def _items_of_table(member: Any) -> Sequence[Any]:
    """Return what may be functions in a table of activations and the like, a partial, or a callable of a library."""
    kind = type(member)
    if issubclass(kind, functools.partial):
        return (*member.args, *member.keywords.values())
    if kind in _TABLES and len(member) <= MAX_WIDTH:
        return list(member.values()) if kind is dict else list(member)
    is_wrapper = is_closed(kind.__module__) and (callable(member) or is_descriptor(kind))
    return list((own_dict(member) or {}).values()) if is_wrapper and not issubclass(kind, _WITH_CODE) else ()
