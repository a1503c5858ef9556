"""What the core asks of extras, which it does not import: one object that the package's door installs.

An extra works without being imported: what is installed loads it when it is first asked.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

Notes = dict[str, int]
StateKey = Callable[[Any], Hashable]


class Extras(abc.ABC):
    """Answers what the core asks."""

    @abc.abstractmethod
    def probes(self, notes: Notes) -> list[Any]:
        """Make the probes of every run and capture of one model's graphs; see `simplegraph.program.probes`.

        Args:
            notes: what a probe notes of eager runs, under its own name, for the captures after them. They are kept with
                the graphs.
        """

    @abc.abstractmethod
    def engine_probes(self, table: Any, kept_alive: list[Any], forward: Any, jobs: Sequence[Any]) -> list[Any]:
        """Make the probes of an engine's captures.

        Args:
            table: of the graphs.
            kept_alive: is given the tensors that the graphs read.
            forward: the engine's.
            jobs: what is captured.
        """

    @abc.abstractmethod
    def prove_batch(self, table: Any, job: Any, state: Sequence[Any], run: Callable[[], Any]) -> Any:
        """Run an engine's batch eagerly, compare a replay of its graph with that, and return what eager returned."""

    @abc.abstractmethod
    def runner_kind(self, config: Any, module: Any) -> Any:
        """Return the class that serves the calls of a module wrapped with these settings; None for the core's own."""

    @abc.abstractmethod
    def know_libraries(self) -> None:
        """Let calls be passed the containers of other libraries, and modules of these be read; imports none of them."""

    @abc.abstractmethod
    def lengths(self, config: Any) -> Any:
        """Return what pads the lengths of calls before a wrapper's runner serves them; None if nothing does."""

    @abc.abstractmethod
    def touched_lines(self, module: Any, manager: Any) -> tuple[str, ...]:
        """Say what the kernels of a module's graphs touch."""

    @abc.abstractmethod
    def report_page(self, report: Any) -> str:
        """Return a report as a page of HTML."""

    @abc.abstractmethod
    def sleeper(self) -> Any:
        """Return what puts holders of graphs to sleep and wakes them; see `Sleeps`."""


installed: Extras = None  # type: ignore[assignment]  # until the package's door sets it
# Called before captures, outside of locks: what is loaded in threads meanwhile, beside which nothing may be captured.
before_captures: set[Callable[[], object]] = set()
# What allocates memory that can sleep, once the process asked for such: `graph_pool_id` and `static_memory`, see below.
memory_sources: list[Any] = []
# Hooks on the steps of all optimizers that change nothing of a step: graphs of steps need not hold what they do.
harmless_step_hooks: set[Callable[..., object]] = set()


class Sleeps:
    """Mixin of what holds graphs and can give the memory of these, and of what they read, back to the driver."""

    def sleep(self, **options: Any) -> Any:
        """Give the memory of graphs, static inputs, caches and weights back until `wake`; see `simplegraph.sleep`."""
        return installed.sleeper().sleep(self, **options)

    def wake(self, parts: Collection[str] | None = None) -> None:
        """Take the memory again, at the same addresses: of these parts, or of all; see `simplegraph.wake`."""
        installed.sleeper().wake(self, parts)


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
