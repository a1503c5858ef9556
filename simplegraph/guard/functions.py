"""Make a module of a plain function, so that the function has graphs like a module.

The module holds everything that the function reaches. Beside its arguments, a function reaches its closure, defaults
and globals, the arguments of a partial, the object of a method, and attributes of all these, as far as code names them.
The code of users' functions, methods and properties among them is read, too. A name in code does not show whose
attribute it is, so an attribute that no code reads may be found because another object has one of the same name. But
instructions show if a name is a global's, and if it is only called as a method: the name in ``optimizer.step()`` does
not name a number called ``step``.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.nested import ATOMS
from simplegraph.base.objects import PROXIES, attribute_of, behind, own_dict
from simplegraph.base.patches import original_of
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.walk import MAX_BEYOND_CODE, Policy, Walk, imports_in, is_library
from simplegraph.guard.carried import carried_by
from simplegraph.guard.code_below import CodeNames, functions_in, is_descriptor, is_packaged, names_of
from simplegraph.program.snapshot import restore

_code_of = operator.attrgetter("__code__")
_WHOLE = (nn.Module, Tensor, Optimizer, torch.Generator)  # not opened: found in other ways


class CodePlace(NamedTuple):
    """A place that code may read: ``holder[key]`` was `value`. `name` is its name in code, such as ``self.model``."""

    name: str
    holder: Any
    key: Any
    value: Any


# Descriptors that run no user code; the last is a field of a named tuple.
_READABLE = (types.FunctionType, staticmethod, classmethod, types.MemberDescriptorType, type(vars(CodePlace)["name"]))


class Attributes:
    """Reads the attributes of an object, a class or a closure's cell as items; of a method its function.

    The object's own ``__getattribute__`` is not run, except through a weak proxy.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        kind = type(owner)
        reads: Any = type if issubclass(kind, type) else object
        self._read: Callable[[Any, str], Any] = getattr if kind in PROXIES else reads.__getattribute__

    def __getitem__(self, key: str) -> Any:
        value = self._read(self._owner, key)
        return value.__func__ if type(value) is types.MethodType else value

    def __setitem__(self, key: str, value: Any) -> None:
        setattr(self._owner, key, value)


class Items:
    """Reads the items of a dict of a user's class without running the methods of that class."""

    def __init__(self, owner: dict[Any, Any]) -> None:
        self._owner = owner

    def __getitem__(self, key: Any) -> Any:
        return dict.__getitem__(self._owner, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        dict.__setitem__(self._owner, key, value)

    def keys(self) -> Collection[Any]:
        return dict.keys(self._owner)


class Reach:
    """Finds the places that functions, and users' functions that they reach, may read.

    Attributes:
        unguarded: places, as (id of a dict, key), that are not guarded, nor is anything below them.
        opened: ids of the objects whose attributes were looked up.
        codes: the names in the code of each function; functions: the functions.
    """

    def __init__(self) -> None:
        self.unguarded: Collection[tuple[int, Any]] = ()
        self._names = {"__call__"}  # names in all code that was read, now or earlier
        self._values: set[str] = set()  # names of attributes that may be plain values

    def find(self, functions: Iterable[Any]) -> list[CodePlace]:
        """List the places, with their present values."""
        roots, number_of_names = list(functions), 0
        while number_of_names != len(self._names):  # further code may name further attributes of known objects
            number_of_names = len(self._names)
            self._places: dict[tuple[int, Any], CodePlace] = {}
            self._taken: set[str] = set()
            self._attributes: set[int] = set()  # ids of dicts of objects that were opened
            self.opened: set[int] = set()
            self.codes: list[CodeNames] = []
            self.functions: list[types.FunctionType] = []
            self._has_read = False
            self._pending: list[tuple[Any, str]] = []
            # Names of objects in messages, by id.
            self._called = {id(original_of(root)): "self" for root in roots}
            Walk(roots, Policy(self._kind, objects=MAX_BEYOND_CODE), self._attributes).collect_tensors()
        return list(self._places.values())

    def _kind(self, kind: type) -> Any:
        return None if issubclass(kind, (*_WHOLE, *ATOMS)) and not issubclass(kind, type) else self._look_into

    def _look_into(self, value: Any) -> list[Any]:
        """Read a function or an object, and list the objects that it leads to."""
        kind, name = type(behind(value)), self._called[id(value)]
        if self._kind(kind) is None:  # the target of a weak proxy
            return []
        if issubclass(kind, types.FunctionType):
            self._read_code(value)
        elif issubclass(kind, types.MethodType):
            self._pending.append((value.__func__, name))
            self._add("self", {"self": value.__self__}, "self")
        elif issubclass(kind, functools.partial):
            self._add("partial.func", Attributes(value), "func", value)
            self._add_all("partial.", value.args, range(len(value.args)))
            self._add_all("partial.", value.keywords, value.keywords)
        elif callable(value) and not issubclass(kind, type) and is_library(kind.__module__):
            self._pending += ((inner, name) for inner in functions_in(value))
        else:
            self._open(value, name)
        pending, self._pending = self._pending, []
        for thing, name in pending:
            self._called.setdefault(id(thing), name)
        return [thing for thing, _ in pending]

    def _read_code(self, function: types.FunctionType) -> None:
        code = function.__code__
        if (is_packaged(code) or is_library(function.__module__)) and (
            self._has_read or hasattr(function, "__wrapped__")
        ):
            self._pending += ((inner, "self") for inner in functions_in(function)[1:])  # it may decorate a user's
            return
        self._has_read, names = True, names_of(code)
        self.codes.append(names)
        self.functions.append(function)
        self._names |= names.all
        self._values |= names.values
        self._add(function.__qualname__, [function], 0, function)
        file = function.__globals__
        self._add_all("", file, sorted(names.globals & file.keys()))
        for name in sorted(imports_in(code, file.get("__package__")) & sys.modules.keys()):
            self._pending.append((sys.modules[name], name))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._add(name, Attributes(cell), "cell_contents", cell)
        defaults, keywords = function.__defaults__ or (), function.__kwdefaults__ or {}
        for key in ("__defaults__", "__kwdefaults__") if defaults or keywords else ():  # they may be replaced
            self._add(f"{function.__qualname__}.{key}", Attributes(function), key, function)
        for index, name in enumerate(code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]):
            self._add(name, defaults, index)
        self._add_all("", keywords, keywords)

    def _open(self, owner: Any, name: str) -> None:
        """Add the attributes of an object, or the items of a dict, that code names."""
        for namespace in _namespaces(owner):
            for key in sorted(self._names & namespace.keys()):
                if key not in self._values and issubclass(type(namespace[key]), ATOMS):
                    continue
                if namespace is owner or type(namespace) is Items:
                    self._add(f"{name}[{key!r}]", namespace, key, owner)
                    continue
                if isinstance(namespace, dict):  # which may be replaced as a whole
                    self._attributes.add(id(namespace))
                    self._add(f"{name}.__dict__", Attributes(owner), "__dict__", owner)
                self.opened |= {id(owner), id(namespace)}
                member, of_class = namespace[key], isinstance(namespace, types.MappingProxyType)
                computed = of_class and is_descriptor(type(member)) and not issubclass(type(member), _READABLE)
                if of_class:  # one that another class overrides may be called as well
                    self._pending += ((inner, name) for inner in functions_in(member))
                self._add(f"{name}.{key}", Attributes(owner) if of_class and not computed else namespace, key, owner)

    def _add_all(self, prefix: str, holder: Any, keys: Iterable[Any]) -> None:
        for key in keys:
            self._add(f"{prefix}{key}", holder, key)

    def _add(self, name: str, holder: Any, key: Any, owner: Any = None) -> None:
        """Add a place, and queue its value to be read; `owner` is the object that the holder belongs to."""
        if (id(holder), key) in self.unguarded:
            return
        at = id(holder if owner is None else owner), key
        try:
            value = holder[key]
        except (LookupError, AttributeError, ValueError, ReferenceError):  # the last two: an empty cell, a dead proxy
            return
        self._pending.append((value, name))
        if at in self._places or issubclass(type(value), types.ModuleType):
            return
        while name in self._taken:  # two closures may have the same names
            name += "'"
        self._taken.add(name)
        self._places[at] = CodePlace(name, holder, key, value)


def _namespaces(value: Any) -> list[Any]:
    """List the namespaces of an object: a dict's items, its attributes, and those of its user-defined classes."""
    value = behind(value)
    kind = type(value)
    namespaces: list[Any] = []
    if issubclass(kind, dict):
        namespaces.append(value if kind is dict else Items(value))
    if not issubclass(kind, type) and not (
        issubclass(kind, types.ModuleType) and is_library(attribute_of(value, "__name__"))
    ):
        namespaces.append(own_dict(value) or {})
    classes = value.__mro__ if issubclass(kind, type) else kind.__mro__
    return [*namespaces, *(vars(base) for base in classes if not is_library(base.__module__))]


_HOLDING = ("builtins", "collections", "functools", "types", "torch")  # packages with container classes
_PROXIED = "is a weak proxy of a module, which may end at any time: let the function reach the module itself"


class FunctionModule(nn.Module):
    """A module whose forward is a function. Its children are the modules that the function reaches.

    Args:
        function: a function, bound method, partial, or other callable.

    Attributes:
        is_function: True. The children are named as in code, so their names may contain dots.
        reached: tensors, containers and other objects that the function reaches, by name.
        watched: the places that the function may read.
        computes_gradients: True if the function calls backward itself.
        proves_any_size: True if proofs copy all memory that the function writes, whatever its size.
    """

    is_function = True
    computes_gradients = False
    proves_any_size = False

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.training = False
        named = function.__func__ if type(function) is types.MethodType else function
        self._name = attribute_of(named, "__qualname__") or type(function).__qualname__
        self.watched = ReachedPlaces()
        self.function = function
        self._reach = Reach()
        self._proxied: list[str] = []
        self.reached: dict[str, Any] = {}

        @functools.wraps(function)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        self.forward = forward

    def _run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self.function(*args, **kwargs)

    def _get_name(self) -> str:
        return self._name

    def resolve(self) -> None:
        """Find the reached objects again: globals and attributes may have been rebound."""
        self._reach.unguarded = carried_by(self).unguarded()
        places = self._find_places()
        functions = self._reach.functions
        self.watched.use(places, functions)
        proxies = ((place.name, behind(place.value)) for place in places if type(place.value) in PROXIES)
        self._proxied = [name for name, value in proxies if issubclass(type(value), nn.Module)]
        modules = {place.name: place.value for place in places if issubclass(type(place.value), nn.Module)}
        restore(self._modules, modules)
        reached = {place.name: place.value for place in places if self._may_hold(place)}
        # The code of a function may be replaced, too. The number distinguishes functions of one name.
        reached |= {f"code {at} of {function.__qualname__}": function.__code__ for at, function in enumerate(functions)}
        restore(self.reached, reached)

    def refresh(self) -> None:
        """Find again what the function reaches if that was replaced."""
        if self.watched.moved():
            self.resolve()

    def _find_places(self) -> list[CodePlace]:
        return self._reach.find([self.function])

    def _may_hold(self, place: CodePlace) -> bool:
        """True for functions, tensors, containers, and objects that have no attribute among the places."""
        value, home = place.value, type(place.value).__module__
        listed = issubclass(type(value), (*ATOMS, nn.Module)) or id(value) in self._reach.opened
        return not listed and (home.partition(".")[0] in _HOLDING or not is_library(home))

    def held(self) -> list[dict[str, Any]]:
        """List dicts of the objects that calls read, by name, beside modules and plain values."""
        return [self.reached]

    def state(self) -> Hashable:
        """Find the reached objects again if one was replaced; return the state in the key beside plain values.

        Raises:
            CannotBind: the function reaches a module by a weak proxy.
        """
        self.refresh()
        if self._proxied:
            raise CannotBind(Reason.PYTHON_STATE, f"{self._proxied[0]} {_PROXIED}")
        return ()

    # Overridden by training steps, which have effects beside their result.

    def serve(self, binding: Any) -> None:
        """Note the binding whose calls are served next."""

    def note_read(self, observers: Iterable[Any]) -> set[int]:
        """Note the memory that runs read; return the storage keys of earlier gradients that no graph reads."""
        return set()

    def is_over(self, context: Any) -> bool:
        """True if no more calls are expected in this context of a signature."""
        return False

    def with_effects(self, whole: Any) -> Any:
        """Return the result of a captured run with its effects."""
        return whole


class ReachedPlaces:
    """Checks the places that a function may read.

    Attributes:
        places: the places.
    """

    def __init__(self) -> None:
        self.use([], [])

    def use(self, places: list[CodePlace], functions: list[types.FunctionType]) -> None:
        """Check these places, and the code of these functions, from now on."""
        self.places, self._functions = places, functions
        self._codes = list(map(_code_of, functions))
        self._take(
            [place.holder for place in places], [place.key for place in places], [place.value for place in places]
        )

    def moved(self) -> bool:
        """True if an object other than a plain value was replaced or is gone: other places may be reached now."""
        if list(map(_code_of, self._functions)) != self._codes:
            return True
        holders, keys, before = self._last
        try:
            values = list(map(operator.getitem, holders, keys))
        except Exception:  # an attribute is gone, or a property by now
            return True
        if all(map(operator.is_, values, before)):
            return False
        for new, old in zip(values, before, strict=True):
            if new is not old and not (issubclass(type(new), ATOMS) and issubclass(type(old), ATOMS)):
                return True
        self._take(holders, keys, values)
        return False

    def _take(self, holders: list[Any], keys: list[Any], values: list[Any]) -> None:
        self._last = holders, keys, values


def computes_gradients(module: nn.Module) -> bool:
    """True if the calls of a module call backward themselves."""
    return isinstance(module, FunctionModule) and module.computes_gradients


def decorated_mode(function: Any) -> Callable[[], Any] | None:
    """Return the factory of a function's ``@torch.no_grad()`` or ``@torch.inference_mode()``; None if it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "__func__", function)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "ctx_factory" not in names:  # the name in torch's decorator
        return None
    make: Callable[[], Any] = function.__closure__[names.index("ctx_factory")].cell_contents
    return make if isinstance(getattr(make, "__self__", None), (torch.no_grad, torch.inference_mode)) else None
