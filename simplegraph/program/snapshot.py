"""Read what objects hold, running none of their code; remember it, find what changed of it, name that, and put it back.

A capture executes nothing on the device, but Python runs. What the forward changed meanwhile about its modules, and
tensors that it left anywhere, belong to no call of the user's, so they are put back; and tensors that a capture made
say that a replay cannot stand for a call. Other values in containers and objects stay, since another thread may have
put them there, unless they stop a graph: what a forward changes whenever it runs, and notes.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import operator
import sys
import threading
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from simplegraph.base.collection import without_collections
from simplegraph.base.nested import ATOMS, constant_key
from simplegraph.base.objects import attribute_of, by_class, own_dict
from simplegraph.base.patches import plain
from simplegraph.base.tensors import has_address, lies_at, parts

ABSENT = object()
_FLAGS = (bool, type(None))
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


def is_library(name: Any) -> bool:
    """True for modules of Python, by name, that keep no tensors of users."""
    return str(name).partition(".")[0] in _LIBRARIES


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


class _Kinds(dict[type, Any]):
    """Has `kind_of` each class, for the time of one walk: looking up is much quicker than a call."""

    def __missing__(self, kind: type) -> Any:
        self[kind] = found = kind_of(kind)
        return found


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
        held: dict[str, Any] = {}  # filled slots, and attributes
        for name, slot in _slots(kind).items():
            with contextlib.suppress(AttributeError):
                held[name] = slot.__get__(place)
        held |= own_dict(place) or {}
        held.pop(_RUNNER, None)
        return held
    if kind is types.CellType:
        return {"cell_contents": place.cell_contents} if gc.get_referents(place) else {}  # an empty one
    return dict(vars(place)) if base is OPAQUE and issubclass(kind, (type, types.FunctionType)) else None


def items_of(held: Any) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of what `held_by` returned."""
    return held.items() if isinstance(held, dict) else enumerate(held or ())


def put(place: Any, key: Any, value: Any) -> None:
    """Let a place hold a value by a key, or nothing if it is `ABSENT`.

    Args:
        place: anything that `held_by` returns a dict of, a list or a set.
        key: as `held_by` gives it; an index of a list, an item of a set.
        value: what it shall hold there.
    """
    kind, gone = type(place), value is ABSENT
    base: Any = next((base for base in (*_DICTS, list, set, type) if issubclass(kind, base)), object)
    if base is set:
        (base.discard if gone else base.add)(place, key)
        return
    if base is object and kind is not types.CellType and key not in _slots(kind):
        place, base = own_dict(place), dict
    if base in (type, object):
        base.__delattr__(place, key) if gone else base.__setattr__(place, key, value)
    else:
        base.__delitem__(place, key) if gone else base.__setitem__(place, key, value)


def value_at(place: Any, key: Any) -> Any:
    """Return what a place holds by a key, as `put` takes it; `ABSENT` if nothing."""
    held = held_by(place)
    if isinstance(held, dict):
        return held.get(key, ABSENT)
    return (key in held or ABSENT) if kind_of(type(place)) is set else held[key] if key < len(held) else ABSENT


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
    now = place if type(place) in _EXACT else held_by(place)
    if len(now) != len(before) or not all(map(operator.is_, now, before)):
        return False
    return isinstance(now, tuple) or all(map(operator.is_, now.values(), before.values()))


def is_same(now: Any, before: Any) -> bool:
    """True for the same object, and for equal values that nothing can change inside."""
    if now is before:
        return True
    if isinstance(now, tuple) and type(now) is type(before) and len(now) == len(before):
        return all(map(is_same, now, before))
    return type(now) is type(before) and issubclass(type(now), ATOMS) and constant_key(now) == constant_key(before)


def is_equal(now: Any, before: Any) -> bool:
    """True for what is the same, and for lists of such values: a forward may make the list that it begins with anew."""
    if type(now) is list and type(before) is list and len(now) == len(before):
        return all(map(is_equal, now, before))
    return is_same(now, before)


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
    return tuple(
        dict.fromkeys(
            name
            for base in kind.__mro__
            if base.__module__.startswith("torch.nn.modules.")
            for name in vars(base).get("__constants__", ())
            if name not in _SIZES
        )
    )


_MAX_PLACES = 20_000  # that code leads to, and that are looked into below a value
_LRU: Any = type(functools.lru_cache(bool))
_EXACT = frozenset({dict, collections.OrderedDict})  # whose methods are known to do no more than theirs
_REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})  # left out of names, as users know them
_CODE = (type, types.ModuleType, types.FunctionType)  # the first two lead to everything there is


NEAR = 3  # a class, its method, a function that it names: whole libraries take ten times as long
DEPTH = 4  # these, and a class or file that this names: further on lie libraries


class Note(NamedTuple):
    """A plain value that a place came to hold by a key, in place of another; `ABSENT` if there is none.

    Attributes:
        name: of the place.
    """

    name: str
    place: Any
    key: Any
    now: Any
    before: Any

    @property
    def tells(self) -> bool:
        """True if it may say that something is done; texts and other numbers are results."""
        kinds = {type(self.now), type(self.before)}
        changes = ABSENT in (self.now, self.before) or type(self.place) is list or not kinds.isdisjoint(_FLAGS)
        return changes and all(value is ABSENT or type(value) in (int, *_FLAGS) for value in (self.now, self.before))

    def exchange(self, held: Any, value: Any) -> None:
        """Let the place hold another value, if it holds this one."""
        if is_same(value_at(self.place, self.key), held):
            put(self.place, self.key, value)


class Snapshot:
    """Remembers what objects hold, and containers and users' objects below them, and where each tensor lies.

    Functions, classes, files, optimizers and objects of libraries (`nn.Module` excepted) are not looked into, unless
    `code` says so. Values of tensors are not copied: a capture writes none. A file of code leads to what functions that
    are looked into name there: what else it holds may be a notebook's whole state.

    Args:
        *roots: modules, functions and other objects.
        tensors: False leaves out where tensors lie, and dispatches no operator.
        code: how many classes, functions and files of code a place may be away.
        breaks: False leaves out the code of eager breaks.

    Attributes:
        things: everything that was looked into.
    """

    @without_collections()
    def __init__(self, *roots: Any, tensors: bool = True, code: int = 0, breaks: bool = True) -> None:
        # By id: the place, what it held, and True if no code lies on the way to it.
        self._places: dict[int, tuple[Any, Any, bool]] = {}
        self._ways: dict[int, tuple[Any, int]] = {}  # by id: a thing that was looked into, and what led to it
        # By id, without an object each, which Python would collect garbage for: empty dicts, and what led to them. They
        # are no places until they are filled. Of the first so many no code lies on the way.
        self._empty: dict[int, Any] = {}
        self._led: dict[int, int] = {}
        self._empty_near = 0
        self._modules: list[tuple[nn.Module, type]] = []
        found: list[Tensor] = []
        kinds = _Kinds()
        # What to look into, the id of what led there, and how much code lies on the way.
        near = collections.deque((plain(root), 0, 0) for root in roots)
        far: collections.deque[tuple[Any, int, int]] = collections.deque()
        while (near or (code and far)) and len(self._places) < (MAX_OBJECTS if near else _MAX_PLACES):
            own = bool(near)
            value, above, away = (near or far).popleft()
            at, kind = id(value), kinds[type(value)]
            if own and kind is OPAQUE:
                far.append((value, above, away))
            elif at not in self._ways and at not in self._empty:
                self._ways[at] = value, above
                away += issubclass(type(value), _CODE)
                if kind is Tensor:
                    found.append(value)
                if kind is Tensor or away > code or _is_closed(value, breaks):
                    continue
                before = held_by(value)
                if before is not None and (own or kind is not tuple):
                    self._places[at] = value, before, own
                is_module = issubclass(type(value), nn.Module)
                if is_module and own:
                    self._modules.append((value, type(value)))
                held = () if _is_globals(value) else before or ()
                for item in held.values() if isinstance(held, dict) else held:
                    if type(item) in _EXACT and not item:  # most are, a module's ten for hooks
                        if own or not is_module:
                            self._empty[id(item)] = item
                            self._led.setdefault(id(item), at)
                            self._empty_near = len(self._empty) if own else self._empty_near
                    elif (leads := kinds[type(item)]) is not None and (own or leads is not Tensor):
                        (near if own else far).append((item, at, away))
                far.extend(
                    (thing, at, away)
                    for thing in (_beyond(value, before) if code else ())
                    if kinds[type(thing)] not in (None, Tensor)
                )
        self.things = [thing for thing, _ in self._ways.values()]
        held = [(tensor, part) for tensor in found for part in parts(tensor) if has_address(part)] if tensors else []
        self._tensors = [(part, part.detach(), lies_at(part), tensor) for tensor, part in held]

    def changes(self, *, code: bool = False) -> dict[str, Any]:
        """Return what every place without code on the way holds that held something else, and tensors that were moved.

        By name. A dict, and hence an object, is told apart by its keys; a list, a set or a deque is one place. Equal
        numbers, texts, and tuples and lists of them are the same; a list that was changed itself is a place that was.

        Args:
            code: add numbers and texts, and lists of them, of places with code on the way; globals that it names.
        """
        found: dict[str, Any] = {}
        named = {
            name
            for thing in self.things
            if code and type(thing) is types.FunctionType
            for name in names_in(thing.__code__)
        }
        for holder, before in self._touched(code=code):
            now, own = held_by(holder), self._places[id(holder)][2]
            if isinstance(now, dict):
                keys = [
                    key
                    for key in now | before
                    if (own or (issubclass(type(now.get(key)), ATOMS) and (key in named or not _is_globals(now))))
                    and not is_equal(now.get(key, ABSENT), before.get(key, ABSENT))
                ]
                found |= {self._name(key, holder): now.get(key) for key in keys}
            elif not is_same(now, before) and (own or all(issubclass(type(item), ATOMS) for item in now)):
                found[self.name_of(holder)] = now
        return found | {self.name_of(tensor): part for part, _, _, tensor in self._moved()}

    def put_back(self, names: Collection[str] = ()) -> None:
        """Let modules hold what they held, and any place the tensors that it held; let tensors lie where they lay.

        Args:
            names: of places, as `changes` gives them, that shall hold again whatever they held; others with code on the
                way stay.
        """
        for module, kind in self._modules:
            if type(module) is not kind:
                module.__class__ = kind
        for holder, before in self._touched(code=bool(names)):
            (above, key), own = self._ways_up(holder), self._places[id(holder)][2]
            of_module = issubclass(type(holder), nn.Module) or (
                issubclass(type(above), nn.Module) and key in _REGISTERED
            )
            if (own and (of_module or next(tensors_in(_exchanged(holder, before)), None) is not None)) or (
                names and isinstance(before, tuple) and self.name_of(holder) in names
            ):
                restore(holder, before)
            else:
                for key, _, then in _changed_entries(holder, before) if names else ():
                    if self._name(key, holder) in names:
                        put(holder, key, then)
        for tensor, memory, *_ in self._moved():
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = memory

    def take_notes(self) -> list[Note]:
        """Put back the plain values of containers and objects, and return them, if one of them may be a note.

        That is a flag or a whole number, if it was not there before or is no longer: it may say that memory is filled,
        which neither a capture nor a run that is undone does. What another thread may wait for, in a list that grew or
        shrank or a deque, stays.
        """
        notes = [
            Note(self._name(key, place), place, key, now, then)
            for place, before in self._touched(code=True)
            for key, now, then in _changed_entries(place, before)
            if all(value is ABSENT or issubclass(type(value), ATOMS) for value in (now, then))
        ]
        if not any(note.tells for note in notes):
            return []
        for note in notes:
            note.exchange(note.now, note.before)
        return notes

    def _touched(self, *, code: bool = False) -> list[tuple[Any, Any]]:
        """List the places, those with `code` on the way or not, that hold other objects now, and what they held."""
        for number, (at, holder) in enumerate(self._empty.items()):
            if holder and at not in self._places:
                self._ways[at] = holder, self._led[at]
                self._places[at] = holder, {}, number < self._empty_near
        return [
            (holder, before)
            for holder, before, own in self._places.values()
            if (own or code) and not is_untouched(holder, before)
        ]

    def _moved(self) -> list[tuple[Tensor, Tensor, tuple[Any, ...], Tensor]]:
        return [entry for entry in self._tensors if lies_at(entry[0]) != entry[2]]

    def release(self, unwanted: Callable[[Any], bool], *, caches: bool = True) -> list[str]:
        """Let every place hold what it held where it came to hold something unwanted, or what leads to that.

        Args:
            unwanted: returns True for what no place shall hold.
            caches: clear those of functools where they hold it.

        Returns:
            The names of those places.
        """
        names = []
        for holder, held in self._touched(code=True):
            before = dict(items_of(held))
            keys = [
                key
                for key, value in items_of(held_by(holder))
                if value is not before.get(key, ABSENT) and self._leads_to(value, unwanted)
            ]
            if keys:
                names.append(self._name(keys[0], holder))
                restore(holder, held, keys)
        for cache in [thing for thing, *_ in self._places.values() if caches and type(thing) is _LRU]:
            if any(self._leads_to(item, unwanted) for item in gc.get_referents(cache)):
                names.append(f"the cache of {cache.__qualname__}")
                cache.cache_clear()
        return list(dict.fromkeys(names))

    def _leads_to(self, value: Any, unwanted: Callable[[Any], bool]) -> bool:
        """True if a value is unwanted, or holds what is; what is a place itself is asked by itself."""
        level, seen = [value], {id(value)}
        while level and len(seen) < _MAX_PLACES:
            if any(map(unwanted, level)):
                return True
            below = [
                thing for thing in level if id(thing) not in self._places and not issubclass(type(thing), _CODE[:2])
            ]
            level = [thing for thing in gc.get_referents(*below) if id(thing) not in seen]
            seen.update(map(id, level))
        return False

    def _ways_up(self, thing: Any) -> tuple[Any, Any]:
        """Return what led to a thing, and by which key it held that."""
        above = self._ways[id(thing)][1]
        if not above:
            return None, ""
        holder = self._ways[above][0]
        held = self._places[above][1] if above in self._places else held_by(holder)
        return holder, next((key for key, item in items_of(held) if item is thing), "?")

    def name_of(self, thing: Any) -> str:
        """Name the place that holds a thing."""
        holder, key = self._ways_up(thing)
        return "" if holder is None else self._name(key, holder, thing)

    def _name(self, key: Any, holder: Any, thing: Any = ABSENT) -> str:
        """Name what a holder holds by a key, which is this thing if it is known.

        It is dotted from the module, or after the first thing on the way of code to it that has a name.
        """
        way = [(thing, None), (holder, key)]
        while (above := self._ways_up(way[-1][0]))[0] is not None:
            way.append(above)
        if (at := id(holder)) in self._places and self._places[at][2]:
            return ".".join(map(str, reversed([key, *(up for _, up in way[2:] if up not in _REGISTERED)])))
        held = ""
        for at in range(1, len(way)):
            (owner, key), kind = way[at], type(way[at][0])
            if kind is types.FunctionType:
                return _name_in_function(owner, [below for below, _ in way[:at]], key)
            if _is_globals(owner):
                return f"the global {key} of {owner.get('__name__')}"
            if issubclass(kind, type):
                held = held or f"the attribute {key} of class {owner.__qualname__}"
            elif kind_of(kind) is object and not is_library(kind.__module__):
                held = held or f"the attribute {key} of a {kind.__qualname__}"
            if issubclass(kind, (type, nn.Module)):
                break
        return held or f"a {kind.__name__}"


def _is_closed(value: Any, breaks: bool) -> bool:
    """True for code of libraries, and of eager breaks unless these count."""
    kind = type(value)
    if not issubclass(kind, _CODE):
        return False
    is_break = not breaks and not {"_simplegraph_break", "_simplegraph_unbroken"}.isdisjoint(own_dict(value) or ())
    return is_break or is_library(
        attribute_of(value, "__name__") if issubclass(kind, types.ModuleType) else value.__module__
    )


def _is_globals(value: Any) -> bool:
    return type(value) is dict and "__builtins__" in value


def _beyond(value: Any, held: Any) -> Iterable[Any]:
    """Return what code, and objects that are not looked into, lead to beside what they hold."""
    kind = type(value)
    if issubclass(kind, types.ModuleType):
        return (own_dict(value),)
    if issubclass(kind, threading.local):  # what is this thread's
        return (vars(value),)
    if _is_globals(value) or issubclass(kind, _LRU):
        return ()  # functions lead to what they name there
    if kind is types.FunctionType:
        return value.__globals__, *_named_by(value), value.__closure__, value.__defaults__, value.__kwdefaults__
    if issubclass(kind, type):
        return *value.__bases__, own_dict(sys.modules.get(value.__module__))
    if issubclass(kind, nn.Module):
        return (kind,)
    if held is None:
        return gc.get_referents(value) if is_users(kind) else ()
    # An object's own dict is no place beside it; items of a tuple's subclass and such are no attributes.
    return [thing for thing in gc.get_referents(value) if type(thing) is not dict]


def _named_by(function: types.FunctionType) -> Iterator[Any]:
    """Yield what a function names in its file, and in files that it names there or has in its closure."""
    names, cells = sorted(names_in(function.__code__)), map(held_by, function.__closure__ or ())
    files = [function.__globals__, *_files_in(item for held in cells for item in (held or {}).values())]
    for file in files:  # which grows meanwhile
        things = [file[name] for name in names if name in file]
        files += [one for one in _files_in(things) if not any(one is other for other in files)]
        yield from things


def _files_in(things: Iterable[Any]) -> list[dict[str, Any]]:
    return [vars(thing) for thing in things if type(thing) is types.ModuleType and not is_library(thing.__name__)]


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes that code has, and the functions in it."""
    return set(code.co_names).union(*(names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def _name_in_function(function: types.FunctionType, way: Sequence[Any], key: Any) -> str:
    """Name a place that a function leads to; `way` leads up to the function from what is there."""
    below, closure = way[-1], function.__closure__ or ()
    name = next((name for name, item in function.__globals__.items() if item is below), None)
    if name is not None:
        return f"the global {name} of {function.__globals__.get('__name__')}"
    if below is closure:
        variable = function.__code__.co_freevars[next(at for at, cell in enumerate(closure) if cell is way[-2])]
        return f"the variable {variable} in the closure of {function.__qualname__}"
    if below is function.__defaults__ or below is function.__kwdefaults__:
        return f"a default argument of {function.__qualname__}"
    return f"the attribute {key} of {function.__qualname__}"


def _changed_entries(place: Any, before: Any) -> list[tuple[Any, Any, Any]]:
    """List by which keys a place holds something else than it held, and both; of a set the items that came or went.

    None of a list that is longer or shorter, or of a deque: these pass things on, maybe to another thread.
    """
    now, base = held_by(place), kind_of(type(place))
    if base is set:
        return [(it, *((ABSENT, True) if lost else (True, ABSENT))) for it, lost in _exchanged(place, before)]
    if base is list and len(now) == len(before):
        now, before = dict(enumerate(now)), dict(enumerate(before))
    return [
        (key, now.get(key, ABSENT), before.get(key, ABSENT))
        for key in (now | before if isinstance(now, dict) else ())
        if not is_same(now.get(key, ABSENT), before.get(key, ABSENT))
    ]


def _exchanged(container: Any, before: Any) -> list[tuple[Any, bool]]:
    """List what a container gained or lost, and True for the latter."""
    now, then = ({id(item): item for _, item in items_of(held)} for held in (held_by(container), before))
    both = now | then
    return [(both[key], key in then) for key in now.keys() ^ then.keys()]
