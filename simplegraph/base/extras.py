"""What extras register with the core, which asks these lists and names none of those that are in them.

The package's door has `simplegraph.integrations` fill them, so an extra works without being imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager
from typing import Any

Notes = dict[str, int]
StateKey = Callable[[Any], Hashable]

# notes -> a `simplegraph.program.probes.Probe` of every run and capture of one model's graphs. It may note of eager
# runs, under its own name, what the captures after them must know. Notes are kept with the graphs.
probes: list[Callable[[Notes], Any]] = []
# (table, tensors to keep alive, forward, jobs) -> the probes of an engine's captures; the last one is used.
engine_probes: list[Callable[[Any, Any, Any, Any], Any]] = []
# (table, job, state, run) -> what an eager run returned, with which a replay was compared; the last one is used.
batch_provers: list[Callable[[Any, Any, Any, Any], Any]] = []
# module -> a function that reads Python state which its graphs depend on, or None.
state_keys: list[Callable[[Any], StateKey | None]] = []
# Called before captures, outside of locks: what is loaded in threads meanwhile, beside which nothing may be captured.
before_captures: set[Callable[[], object]] = set()
# configuration -> the class that serves the calls of a module wrapped with it, or None.
runner_kinds: list[Callable[[Any], Any]] = []
# configuration -> what pads the lengths of calls before a wrapper's runner serves them, or None.
length_servers: list[Callable[[Any], Any]] = []
# Called with (wrapper's name, reason, detail) at each eager call.
eager_listeners: list[Callable[[str, Any, str], object]] = []
# (module, its manager or None) -> lines about what the kernels of its graphs touch; the last one is used.
touch_displays: list[Callable[[Any, Any], tuple[str, ...]]] = []
# report -> it as a page of HTML; the last one is used.
report_pages: list[Callable[[Any], str]] = []
# What allocates memory that can sleep, once the process asked for such: `graph_pool_id` and `static_memory`, see below.
memory_sources: list[Any] = []
# -> what puts holders of graphs to sleep and wakes them, see `Sleeps`; the last one is used.
sleepers: list[Callable[[], Any]] = []


class Sleeps:
    """Mixin of what holds graphs and can give the memory of these, and of what they read, back to the driver."""

    def sleep(self, **options: Any) -> Any:
        """Give the memory of graphs, static inputs, caches and weights back until `wake`; see `simplegraph.sleep`."""
        return sleepers[-1]().sleep(self, **options)

    def wake(self, parts: Collection[str] | None = None) -> None:
        """Take the memory again, at the same addresses: of these parts, or of all; see `simplegraph.wake`."""
        sleepers[-1]().wake(self, parts)


def graph_pool_id(device: Any, new_id: Callable[[], Any]) -> Any:
    """Make a memory pool of torch's allocator for the graphs of a device, and return its id."""
    return memory_sources[-1].graph_pool_id(device) if memory_sources else new_id()


def static_memory(args: Any) -> AbstractContextManager[Any]:
    """Surround the allocation of the static inputs of some arguments."""
    return memory_sources[-1].static_memory(args) if memory_sources else contextlib.nullcontext()


def wait_before_captures() -> None:
    """Call all `before_captures`."""
    for wait in tuple(before_captures):
        wait()


def state_key_of(module: Any) -> StateKey | None:
    """Return a function that reads what `state_keys` find in a module; None if they find nothing."""
    keys = [key for key in (find(module) for find in state_keys) if key is not None]
    if len(keys) < 2:
        return keys[0] if keys else None
    return lambda called: tuple(key(called) for key in keys)
