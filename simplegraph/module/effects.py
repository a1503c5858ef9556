"""Remembers everything about a module that captures may change in Python, and puts it back."""

from __future__ import annotations

import contextlib
import functools
import logging
import types
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from simplegraph.context import CALLS
from simplegraph.graph.device import GraphDevice, GraphPool
from simplegraph.graph.escapes import PythonState
from simplegraph.graph.failures import BREAK
from simplegraph.graph.user_code import described_line
from simplegraph.module.functions import FunctionModule
from simplegraph.module.left import CountedState
from simplegraph.module.reach import CodePlace
from simplegraph.module.snapshot import Snapshot, holds_graph_memory

logger = logging.getLogger("simplegraph")


class ModuleState(PythonState):
    """Remembers a module before captures: snapshots, which tell also what holds graph memory.

    Args:
        roots: the module, and other objects that its forward may change.
        device, pool: where it is captured.
        counted: what every run changes, of the module.
    """

    def __init__(self, roots: Sequence[Any], device: GraphDevice, pool: GraphPool, counted: CountedState) -> None:
        super().__init__(_code_of(roots[0]))
        self._roots, self._device, self._pool, self._counted = roots, device, pool, counted
        self._before: list[Snapshot] = []
        self._values: list[CodePlace] = []

    def remember(self) -> None:
        super().remember()
        self._before = [Snapshot(root) for root in self._roots]
        function = self._roots[0]
        self._values = function.values.now() if isinstance(function, FunctionModule) else []

    def put_back(self) -> list[str]:
        changes = [change for before in self._before for change in before.changes()]
        kept = [name for name, value in changes if holds_graph_memory(value, self._device, self._pool)]
        if self._values:
            changed = self._roots[0].values.put_back(self._values)
            self._counted.names = sorted({*(self._counted.names or ()), *changed})
        for index, before in enumerate(self._before):
            before.put_back(() if index else self._counted.names or ())
        of_function = isinstance(self._roots[0], FunctionModule)
        return [name.removeprefix("reached.") for name in kept] if of_function else kept

    def forget(self) -> None:
        super().forget()
        self._before, self._values = [], []


_CODE = frozenset({types.FunctionType, types.MethodType, functools.partial})


def _code_of(module: nn.Module) -> Iterator[Any]:
    """Yield the classes below a module, and the functions that hang on it, hooks included."""
    children = list(module.modules())
    yield from {type(child): None for child in children}
    for child in children:
        for value in vars(child).values():
            if type(value) in _CODE:
                yield value
            elif type(value) is OrderedDict:  # hooks
                yield from (hook for hook in value.values() if callable(hook) and not isinstance(hook, nn.Module))


@contextlib.contextmanager
def warning_of_eager(name: str) -> Iterator[None]:
    """Warn of a ``with simplegraph.eager()`` in a forward that is captured in here: it has no effect there."""
    CALLS.eager_inside = None
    try:
        yield
    finally:
        if CALLS.eager_inside is not None:
            _warn_of_eager(name, CALLS.eager_inside)


@functools.lru_cache(maxsize=256)
def _warn_of_eager(name: str, line: tuple[str, int]) -> None:
    """Warn once of each line: every size is captured."""
    logger.warning(
        "simplegraph: %s: eager() at %s has no effect inside a forward that is captured; the part is captured, too.\n"
        "  To run it eagerly between two graphs %s. eager() is for calls of wrapped modules.",
        *(name, described_line(*line), BREAK),
    )
