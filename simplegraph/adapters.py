"""The Python state of peft's adapters, which a forward reads and a graph would freeze.

Which adapter is active, whether adapters are disabled or merged, and how much they count are plain attributes of
peft's layers. Writing to them moves no tensor, so they are compared at every call of a module that has any.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
from collections.abc import Callable, Hashable
from typing import Any

from torch import nn

_NAMES = ("_active_adapter", "active_adapter", "_disable_adapters", "merged_adapters", "scaling")


def adapter_state(module: nn.Module) -> AdapterState | None:
    """What reads the state of all adapters below a module; None where there are none. peft need not be installed."""
    readers = [_reader(child) for child in module.modules() if _is_of_peft(type(child))]
    found = [reader for reader in readers if reader is not None]
    return AdapterState(found) if found else None


class AdapterState:
    """A `state_key`: the same key for as long as no adapter was switched, disabled, merged or scaled.

    Args:
        readers: each returns the state of one layer.
    """

    def __init__(self, readers: list[Callable[[], Any]]) -> None:
        self._readers = readers
        self._known: list[Any] = []
        self._key = ""

    def __call__(self, module: nn.Module) -> Hashable:
        found = [read() for read in self._readers]
        if found != self._known:
            self._known = copy.deepcopy(found)  # peft changes its lists and dicts in place
            self._key = repr(found)
        return self._key


def _is_of_peft(kind: type[Any]) -> bool:
    return any(base.__module__.partition(".")[0] == "peft" for base in kind.__mro__)


def _reader(layer: nn.Module) -> Callable[[], Any] | None:
    """Returns what one of peft's modules says of its adapters; None for a module that says nothing."""
    names = [name for name in _NAMES if hasattr(layer, name) and not isinstance(_declared(layer, name), property)]
    return functools.partial(operator.attrgetter(*names), layer) if names else None


def _declared(layer: nn.Module, name: str) -> Any:
    return inspect.getattr_static(type(layer), name, None)
