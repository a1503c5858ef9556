"""Remembers everything about a module that captures may change in Python, and puts it back."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from simplegraph.base.context import CALLS
from simplegraph.base.failures import BREAK
from simplegraph.base.user_code import described_line
from simplegraph.device.generators import HostRandom
from simplegraph.device.protocol import GraphDevice, GraphPool
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.reach import CodePlace
from simplegraph.guard.snapshot import Snapshot, holds_graph_memory
from simplegraph.program.escapes import PythonState

logger = logging.getLogger("simplegraph")


class ModuleState(PythonState):
    """Remembers a module before captures: snapshots, which tell also what holds graph memory.

    Args:
        roots: the module, and other objects that its forward may change.
        device, pool: where it is captured.
        counted: what every run changes, of the module.
    """

    def __init__(self, roots: Sequence[Any], device: GraphDevice, pool: GraphPool, counted: CountedState) -> None:
        super().__init__(roots)
        self._device, self._pool, self._counted = device, pool, counted
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


class CountedState:
    """Finds what the first eager run of a signature changed below the module, and its first captured run, too.

    A cache that is filled once is changed by the first alone; what eager breaks change, by eager runs alone.

    Attributes:
        names: the places, dotted from the module; None before the first capture.
    """

    def __init__(self) -> None:
        self.names: list[str] | None = None
        self._changed: set[str] | None = None

    @contextlib.contextmanager
    def eager_run(self, module: Any) -> Iterator[None]:
        """Note what a real run changes, if it is the first: looking costs milliseconds."""
        before = (Snapshot(module, tensors=False), HostRandom()) if self._changed is None else None
        yield
        if before is not None:
            snapshot, host = before
            self._changed = snapshot.changed_names() | host.drawn()

    @contextlib.contextmanager
    def captured_run(self, module: Any, state_key: Callable[[Any], Any] | None) -> Iterator[None]:
        """Find what a captured run changes as well, but for what changes `state_key`: then the caller knows of it.

        Args:
            module: whose run it is.
            state_key: of the configuration.
        """
        if not self._changed or self.names is not None:
            yield
            return
        before, key = Snapshot(module, tensors=False), state_key and state_key(module)
        host = HostRandom()
        complete = False
        try:
            yield
            complete = True
        finally:
            in_key = state_key is not None and state_key(module) != key
            names = [] if in_key else sorted(self._changed & (before.changed_names() | host.drawn()))
            if complete or names:  # a capture that failed may not have come to what changes
                self.names = sorted({*(self.names or ()), *names})

    def look_again(self) -> None:
        """Let the next eager run find what it changes: that may be another object by now, or other code."""
        self._changed, self.names = None, None

    @property
    def refusal(self) -> tuple[str, str]:
        """Say why there can be no graph, and what to do."""
        cause = (
            f"{', '.join(self.names or [])} changes whenever the forward runs, in Python, and a replay runs no Python"
        )
        return cause, "Keep it in a buffer that the forward writes in place, or change it outside the forward."
