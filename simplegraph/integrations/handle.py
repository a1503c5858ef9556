"""The handle of a model that goes through graphs in place: `reset`, and `remove` to undo it."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Any, TypeVar

HandleType = TypeVar("HandleType", bound="Handle")


class Handle(abc.ABC):
    """Handle of a model that goes through graphs in place.

    As a context manager it calls `remove` at the end.

    Attributes:
        model: the model.
    """

    model: Any

    @property
    @abc.abstractmethod
    def graphed(self) -> Iterable[Any]:
        """The wrapped modules that have the graphs."""

    @abc.abstractmethod
    def report(self) -> Any:
        """Report captures, replays and eager calls, with the reasons."""

    @abc.abstractmethod
    def put_back(self) -> None:
        """Restore the model; a second call does nothing."""

    def reset(self) -> None:
        """Drop all graphs and the memory that they read; later calls capture again."""
        for wrapped in self.graphed:
            wrapped.reset_graphs()

    def remove(self) -> None:
        """Restore the model, and drop the graphs; a second call does nothing."""
        self.put_back()
        self.reset()

    def __enter__(self: HandleType) -> HandleType:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()
