"""Notices when something that captured graphs read was moved or replaced.

A graph reads addresses. Python can put other memory behind a name at any time: ``.to``, ``.data =``,
``load_state_dict(assign=True)``, a LoRA merge, a cache that grew. Comparing two hundred addresses costs
several times a replay, so whoever changes one raises a flag instead: the dicts that hold a module's
parameters, buffers and children count writes, and so do ``Tensor.data``'s setter and its kin. A call
compares one number; only when it changed are the addresses looked at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from simplegraph.graph import patches


class Changes:
    """Counts, for the whole process, writes that can put other memory behind a watched name.

    Attributes:
        watched: ids of the tensors and modules that any graph reads; others do not matter. An id
            that is used again costs a look, no more.
    """

    count = 0
    watched: ClassVar[set[int]] = set()


class _WatchedDict(dict[str, Any]):
    """A module's ``_parameters``, ``_buffers`` or ``_modules``; reading it costs what a dict costs.

    Copies and pickles are plain dicts: only the original is watched.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[dict[str, Any]]]:
        return dict, (dict(self),)

    def copy(self) -> dict[str, Any]:
        return dict(self)


def _counting(name: str) -> Callable[..., Any]:
    method = getattr(dict, name)

    def counted(self: _WatchedDict, *args: Any, **kwargs: Any) -> Any:
        Changes.count += 1
        return method(self, *args, **kwargs)

    counted.__name__ = name
    return counted


for _name in ("__setitem__", "__delitem__", "pop", "popitem", "clear", "update", "setdefault", "__ior__"):
    setattr(_WatchedDict, _name, _counting(_name))


def watch_module(module: nn.Module) -> None:
    """Count writes to the dicts of a module and of all below it."""
    for child in module.modules():
        for name in ("_parameters", "_buffers", "_modules"):
            if type(vars(child)[name]) is dict:
                vars(child)[name] = _WatchedDict(vars(child)[name])


# Calls that change what a graph would read or do without a write to a module's dicts: other memory, another
# view of it, other code to run.
_CHANGING: dict[Any, tuple[str, ...]] = {
    torch.Tensor: (
        *("set_", "resize_", "resize_as_", "as_strided_", "t_", "transpose_", "swapaxes_", "swapdims_"),
        *("squeeze_", "unsqueeze_"),
    ),
    torch.UntypedStorage: ("resize_",),
    torch._C: ("_swap_tensor_impl",),
    nn.Module: ("train", "register_forward_hook", "register_forward_pre_hook"),
    RemovableHandle: ("remove",),
}


@patches.installer
def watch_tensors() -> None:
    """Count, from the first capture of the process on, every call that gives a tensor other memory.

    Neither version counters nor hooks see ``tensor.data = other``. Reading ``.data`` stays a call into C.
    """
    setter = torch.Tensor.data.__set__  # type: ignore[attr-defined]

    def set_data(tensor: Tensor, value: Tensor) -> None:
        Changes.count += id(tensor) in Changes.watched
        setter(tensor, value)

    data = property(torch.Tensor.data.__get__, set_data, doc=torch.Tensor.data.__doc__)  # type: ignore[attr-defined]
    patches.replace(torch.Tensor, "data", data)
    for holder, names in _CHANGING.items():
        for name in names:
            if hasattr(holder, name):
                patches.replace(holder, name, _counting_call(getattr(holder, name)))


def _counting_call(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def counted(*args: Any, **kwargs: Any) -> Any:
        # Of tensors and modules only those that a graph reads matter: others change all the time.
        changed = args[0] if args else None
        Changes.count += id(changed) in Changes.watched or not isinstance(changed, (Tensor, nn.Module))
        return call(*args, **kwargs)

    return counted
