"""The wrappers of this process, and functions that are called at each eager call of theirs."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol

from simplegraph.base.extras import eager_listeners
from simplegraph.base.reasons import Reason
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphStats


class GraphHolder(Protocol):
    """What holds graphs: a manager of an engine, or the part of a wrapped module that serves its calls.

    Attributes:
        stats: its counters.
    """

    stats: GraphStats

    def report(self) -> GraphReport:
        """Report captures, replays and eager calls with their reasons."""


# Weakly, by the number of their counters: a wrapper ends with its last reference.
_holders: weakref.WeakValueDictionary[int, GraphHolder] = weakref.WeakValueDictionary()


def register(holder: GraphHolder) -> None:
    """List a holder of graphs among `wrappers` for as long as it lives."""
    _holders[holder.stats.number] = holder


def wrappers() -> list[GraphHolder]:
    """List everything in this process that holds graphs, oldest first: wrapped modules, functions, steps, managers.

        for wrapper in sg.wrappers():
            print(wrapper.report())

    Each has counters, `stats`, and a `report`. None is kept alive by this list.
    """
    found = [reference() for reference in _holders.valuerefs()]
    return sorted((holder for holder in found if holder is not None), key=lambda holder: holder.stats.number)


def on_eager(callback: Callable[[str, Reason, str], object]) -> Callable[[], None]:
    """Call a function at every eager call of every wrapper, before the forward runs; for metrics of your own.

    Args:
        callback: gets the wrapper's name, the reason and its detail, "" if there is none. It should return quickly, and
            what it raises ends the call.

    Returns:
        A function that ends it.
    """
    eager_listeners.append(callback)
    return lambda: eager_listeners.remove(callback)
