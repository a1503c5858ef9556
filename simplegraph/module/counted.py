"""Python state that every run of a forward changes, and hence no replay does: ``self.calls += 1``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from simplegraph.module.snapshot import Snapshot


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
        before = Snapshot(module, tensors=False) if self._changed is None else None
        yield
        if before is not None:
            self._changed = before.changed_names()

    @contextlib.contextmanager
    def captured_run(self, module: Any, state_key: Callable[[Any], Any] | None) -> Iterator[None]:
        """Find what a captured run changes as well, but for what changes `state_key`: then the caller knows of it."""
        if not self._changed or self.names is not None:
            yield
            return
        before, key = Snapshot(module, tensors=False), state_key and state_key(module)
        complete = False
        try:
            yield
            complete = True
        finally:
            in_key = state_key is not None and state_key(module) != key
            names = [] if in_key else sorted(self._changed & before.changed_names())
            if complete or names:  # a capture that failed may not have come to what changes
                self.names = names

    @property
    def refusal(self) -> tuple[str, str]:
        """Say why there can be no graph, and what to do."""
        cause = (
            f"{', '.join(self.names or [])} changes whenever the forward runs, in Python, and a replay runs no Python"
        )
        return cause, "Keep it in a buffer that the forward writes in place, or change it outside the forward."
