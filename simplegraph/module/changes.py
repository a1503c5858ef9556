"""Notices when something that captured graphs read was moved or replaced.

A graph reads addresses. Python can put other memory behind a name at any time: ``.to``, ``.data =``,
``load_state_dict(assign=True)``, a LoRA merge, a cache that grew. Comparing two hundred addresses costs
several times a replay, so whoever changes one says so instead: the dicts that hold a module's parameters,
buffers, children and hooks, ``Module.__setattr__``, ``Tensor.data``'s setter and its kin. A call compares
two numbers; only when they differ does anybody look at what the module holds.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Set
from typing import Any, ClassVar

import torch
from torch import Tensor, nn, optim
from torch.utils.hooks import RemovableHandle

from simplegraph.graph import patches
from simplegraph.graph.tensors import storage_key
from simplegraph.module.torch_modules import setting_names

# Each number is given once: two threads that count at the same time cannot leave a count that was there before.
_NUMBERS = itertools.count(1)


class Watcher:
    """Is told of every change to what it watches.

    Attributes:
        watched: ids of tensors, of dicts of modules and of dicts in them, of optimizers and dicts of hooks, and storage
            keys. One that is used again after its object is gone costs a look, no more.
        count: another number after every change; nan, which equals nothing, while changes are not counted.
    """

    def __init__(self) -> None:
        self.watched: Set[int] = frozenset()
        self.count: float = next(_NUMBERS)

    def disturb(self, count: float) -> None:
        """Take note that something watched is about to change, or has just changed."""
        self.count = count


class Changes:
    """Counts, for the whole process, writes that can put other memory behind a watched name.

    Attributes:
        count: another number after every such write; nan, which equals nothing, while they are not counted.
        watched: everything that any watcher watches.
    """

    count: ClassVar[float] = math.nan
    watched: ClassVar[Set[int]] = frozenset()
    _watchers: ClassVar[tuple[weakref.ref[Watcher], ...]] = ()
    _lock: ClassVar[threading.RLock] = threading.RLock()

    @classmethod
    def add(cls, watcher: Watcher) -> None:
        """Tell a watcher of changes from now on, or after it watches other things; it is held weakly."""
        with cls._lock:
            known = {id(each): each for each in (*cls.watchers(), watcher)}
            cls._watchers = tuple(map(weakref.ref, known.values()))
            cls.watched = frozenset().union(*(each.watched for each in known.values()))

    @classmethod
    def watchers(cls) -> list[Watcher]:
        """List those that live."""
        return [watcher for ref in cls._watchers if (watcher := ref()) is not None]

    @classmethod
    def note(cls, things: Iterable[int]) -> None:
        """Count a change of these. Call it before the change, so that its memory is free, and after it.

        A replay of another thread may lie between the two, and look before the change.
        """
        if math.isnan(cls.count):
            return
        cls.count = next(_NUMBERS)
        if not cls.watched.isdisjoint(things):
            for watcher in cls.watchers():
                if not watcher.watched.isdisjoint(things):
                    watcher.disturb(cls.count)

    @classmethod
    def begin(cls) -> None:
        """Count from now on; earlier changes are not known."""
        cls._set(next(_NUMBERS))

    @classmethod
    def end(cls) -> None:
        """Let every call look for itself, since changes are not counted any more."""
        cls._set(math.nan)

    @classmethod
    def _set(cls, count: float) -> None:
        cls.count = count
        for watcher in cls.watchers():
            watcher.disturb(count)


class _WatchedDict(dict[str, Any]):
    """A module's ``_parameters``, ``_buffers`` or ``_modules``; reading it costs what a dict costs.

    Copies and pickles are plain dicts: only the original is watched.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        return dict(self)


class _WatchedOrderedDict(collections.OrderedDict[Any, Any]):
    """The same for hooks, and for a module that has such a dict of parameters."""

    def __reduce__(self) -> tuple[type, tuple[dict[Any, Any]]]:
        return collections.OrderedDict, (dict(self),)

    def copy(self) -> collections.OrderedDict[Any, Any]:  # type: ignore[override]
        return collections.OrderedDict(self)


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(self: dict[Any, Any], *args: Any, **kwargs: Any) -> Any:
        things = (id(self),)
        Changes.note(things)
        try:
            return method(self, *args, **kwargs)
        finally:
            Changes.note(things)

    return counted


def _counting_others(method: Callable[..., Any]) -> Callable[..., Any]:
    """Count writes of another object than is there: libraries move modules where they are before every call."""
    counted = _counting(method)

    @functools.wraps(method)
    def set_item(self: dict[Any, Any], key: Any, value: Any) -> Any:
        return (method if value is not None and self.get(key) is value else counted)(self, key, value)

    return set_item


for _kind in (_WatchedDict, _WatchedOrderedDict):
    _kind.__setitem__ = _counting_others(_kind.__setitem__)  # type: ignore[method-assign]
    for _name in ("__delitem__", "pop", "popitem", "clear", "update", "setdefault", "__ior__"):
        setattr(_kind, _name, _counting(getattr(_kind, _name)))
_WatchedOrderedDict.move_to_end = _counting(_WatchedOrderedDict.move_to_end)  # type: ignore[method-assign]

_WATCHED: dict[type, Callable[[Any], Any]] = {dict: _WatchedDict, collections.OrderedDict: _WatchedOrderedDict}
HOLDERS = ("_parameters", "_buffers", "_modules")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def watch_module(module: nn.Module) -> list[dict[Any, Any]]:
    """Count writes to the dicts of one module.

    Returns:
        The dicts that cannot be watched: of a class of their own, or with hooks, whose handles know the very dict.
    """
    attributes, unwatched = vars(module), []
    for name in (*HOLDERS, *HOOKS):
        holder = attributes.get(name)
        watched = None if name in HOOKS and holder else _WATCHED.get(type(holder))
        if watched is not None:
            attributes[name] = watched(holder)
        elif type(holder) not in (_WatchedDict, _WatchedOrderedDict) and isinstance(holder, dict):
            unwatched.append(holder)
    return unwatched


def _tensors(args: tuple[Any, ...]) -> list[int]:
    """Identify tensors; and their storage, which others may be views of."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    dense = [arg for arg in tensors if arg.layout is torch.strided]
    return [*map(id, tensors), *(key for key in map(_storage, dense) if key is not None)]


def _storage(tensor: Tensor) -> int | None:
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # a wrapper of a transform has none
        return None


def _module(args: tuple[Any, ...]) -> list[int]:
    return [id(vars(args[0]))]


def _owner(args: tuple[Any, ...]) -> list[int]:
    return [id(args[0])]


def _data(args: tuple[Any, ...]) -> list[int]:
    return _owner(args) if args[0] is not args[1] else []  # `Module.to` sets what was where it is already


def _attribute(args: tuple[Any, ...]) -> list[int]:
    return _module(args) if id(vars(args[0])) in Changes.watched and _matters(*args) else []


def _step(args: tuple[Any, ...]) -> list[int]:
    return _owner(args) if args[1] == "step" else []


def _hooks(args: tuple[Any, ...]) -> list[int]:
    return [id(args[0].hooks_dict_ref())]


# Calls that change what a graph would read or do without a write to a module's dicts: other memory, another
# view of it, other code to run. By whom they belong to, with what tells which things are changed.
_CHANGING: tuple[tuple[Any, tuple[str, ...], Callable[[tuple[Any, ...]], list[int]]], ...] = (
    (
        torch.Tensor,
        (
            *("set_", "resize_", "resize_as_", "as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_"),
            *("squeeze_", "unsqueeze_"),
        ),
        _tensors,
    ),
    (torch, ("resize_as_", "as_strided_"), _tensors),
    (torch._C, ("_swap_tensor_impl",), _tensors),
    (torch.UntypedStorage, ("resize_", "share_memory_"), lambda args: [args[0]._cdata]),
    (nn.Module, ("__setattr__", "__delattr__"), _attribute),
    (optim.Optimizer, ("__setattr__", "__delattr__"), _step),
    (nn.Module, ("register_forward_hook", "register_forward_pre_hook"), _module),
    (nn.Module, ("register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook"), _module),
    (torch.Tensor, ("register_hook", "register_post_accumulate_grad_hook"), _owner),
    (optim.Optimizer, ("register_step_pre_hook", "register_step_post_hook"), _owner),
    (RemovableHandle, ("remove",), _hooks),
)


@patches.installer
def watch_tensors() -> None:
    """Count, from the first capture of the process on, every call that changes what a graph would read or do.

    Neither version counters nor hooks see ``tensor.data = other``. Reading ``.data`` stays a call into C.
    """
    Changes.begin()
    patches.record("simplegraph.module.changes", Changes.end)
    setter = _door(torch.Tensor.data.__set__, _data)  # type: ignore[attr-defined]
    data = property(torch.Tensor.data.__get__, setter, doc=torch.Tensor.data.__doc__)  # type: ignore[attr-defined]
    patches.replace(torch.Tensor, "data", data)
    for holder, names, things in _CHANGING:
        for name in names:
            if hasattr(holder, name):
                patches.replace(holder, name, _door(getattr(holder, name), things))


def _door(call: Callable[..., Any], things_of: Callable[[tuple[Any, ...]], list[int]]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # Of tensors and modules only those that a graph reads matter: others change all the time.
        things = things_of(args)
        if Changes.watched.isdisjoint(things):
            return call(*args, **kwargs)
        Changes.note(things)
        try:
            return call(*args, **kwargs)
        finally:
            Changes.note(things)

    return counted


_PYTHON_STATE = frozenset({bool, int, float, str})  # what `state_key` is for, but for settings of torch's layers


def _matters(module: nn.Module, name: str, value: Any = None) -> bool:
    """True if setting an attribute can change what a graph would read or do."""
    old = vars(module).get(name)
    if name == "training":
        return old is not value
    if type(value) in _PYTHON_STATE and type(old) in _PYTHON_STATE:
        return value != old and name in setting_names(type(module))
    # A tensor that no graph reads, in place of another: such as what was computed last.
    return not (isinstance(old, Tensor) and type(value) is Tensor and id(old) not in Changes.watched)
