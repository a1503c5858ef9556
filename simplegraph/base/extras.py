"""The interface through which the core calls extras without importing them: one object, which the package installs.

An extra works without being imported: the installed object loads it at its first use.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Collection, Hashable
from contextlib import AbstractContextManager
from typing import Any

ProbeCounts = dict[str, int]
StateKey = Callable[[Any], Hashable]


class Extras(abc.ABC):
    """The functions of extras that the core calls."""

    @abc.abstractmethod
    def probes(self, counts: ProbeCounts) -> list[Any]:
        """Make the probes of every run and capture of one model's graphs; see `simplegraph.program.probes`.

        Args:
            counts: counts that probes make in eager runs, each under its own name, for later captures. They are kept
                with the graphs.
        """

    @abc.abstractmethod
    def runner_kind(self, config: Any, module: Any) -> Any:
        """Return the runner class for a module wrapped with these settings; None for the core's own class."""

    @abc.abstractmethod
    def register_libraries(self) -> None:
        """Register how containers and modules of other libraries are read; imports none of these libraries."""

    @abc.abstractmethod
    def lengths(self, config: Any) -> Any:
        """Return the object that pads the lengths of calls before a runner serves them; None if no length is padded."""

    @abc.abstractmethod
    def touched_lines(self, module: Any, manager: Any) -> tuple[str, ...]:
        """Return lines about the memory that the kernels of a module's graphs touch."""

    @abc.abstractmethod
    def report_page(self, report: Any) -> str:
        """Return a report as a page of HTML."""

    @abc.abstractmethod
    def sleeper(self) -> Any:
        """Return the object that puts holders of graphs to sleep and wakes them; see `Sleeps`."""


installed: Extras = None  # type: ignore[assignment]  # until the package sets it
# Called before captures, outside of locks: they wait for threads that load libraries, which must not run in a capture.
before_captures: set[Callable[[], object]] = set()
# Allocators of memory that can sleep, once the process uses such memory; called by the two functions below.
memory_sources: list[Any] = []
# Hooks on the steps of all optimizers that have no effect on steps: graphs of steps need not contain them.
harmless_step_hooks: set[Callable[..., object]] = set()


class Sleeps:
    """Mixin of holders of graphs that can release the memory of their graphs and weights to the driver."""

    def sleep(self, **options: Any) -> Any:
        """Release the memory of graphs, static inputs, caches and weights until `wake`; see `simplegraph.sleep`."""
        return installed.sleeper().sleep(self, **options)

    def wake(self, parts: Collection[str] | None = None) -> None:
        """Restore the memory of these parts, or of all, at the same addresses; see `simplegraph.wake`."""
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
