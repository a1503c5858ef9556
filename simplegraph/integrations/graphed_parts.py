"""The handle of a model whose parts go through graphs in place: their reports, and `remove` to undo it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from simplegraph.integrations.handle import Handle
from simplegraph.manager.stats import GraphReport

_SHOWN = 4  # names in a line

Places = Sequence[tuple[Any, str]]  # objects, and the attribute of each that holds a part


@dataclasses.dataclass(frozen=True, repr=False)
class PartsReport:
    """The reports of a model's parts. ``print(report)`` shows them one after another.

    Attributes:
        parts: the report of each, by name.
        skipped: why other parts have no graphs, by name.
    """

    parts: Mapping[str, GraphReport]
    skipped: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return everything in the reports as plain values."""
        return {"parts": {name: part.to_dict() for name, part in self.parts.items()}, "skipped": dict(self.skipped)}

    def __str__(self) -> str:
        reasons: dict[str, list[str]] = collections.defaultdict(list)
        for name, why in self.skipped.items():
            reasons[why].append(name)
        lines = [f"{name}: {part}" for name, part in self.parts.items()]
        for why, names in reasons.items():
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            lines.append(f"{', '.join(names[:_SHOWN])}{more} {'runs' if len(names) == 1 else 'run'} eagerly: {why}")
        return "\n".join(lines) or "no part has graphs: the model has no submodules that could have any"

    __repr__ = __str__


@dataclasses.dataclass(repr=False, eq=False)
class GraphedParts(Handle):
    """Handle of a model whose parts go through graphs: has their reports, and `remove` to undo it.

    As a context manager it calls `remove` at the end. It can be dropped: the parts stay as they are.

    Args:
        model: the model that has the parts.

    Attributes:
        parts: the wrapped parts by name; skipped: why others are not, by name.
    """

    model: Any
    parts: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict, init=False)
    _before: dict[str, list[tuple[Any, str, Any]]] = dataclasses.field(default_factory=dict, init=False)

    def put(self, name: str, wrapped: Any, places: Places) -> None:
        """Put a wrapped part in its places."""
        self.parts[name] = wrapped
        self._before[name] = [(holder, attribute, getattr(holder, attribute)) for holder, attribute in places]
        for holder, attribute in places:
            setattr(holder, attribute, wrapped)

    @property
    def graphed(self) -> Iterable[Any]:
        """The wrapped parts."""
        return self.parts.values()

    def take_out(self, name: str) -> None:
        """Restore the original part in its places, and drop its graphs."""
        self._put_back(name)
        self.parts.pop(name).reset_graphs()

    def put_back(self) -> None:
        """Put the model's own parts back; a second call does nothing."""
        for name in self.parts:
            self._put_back(name)

    def _put_back(self, name: str) -> None:
        wrapped = self.parts[name]
        for holder, attribute, original in self._before.pop(name, ()):
            if getattr(holder, attribute, None) is wrapped:  # else somebody has replaced it since
                setattr(holder, attribute, original)

    def report(self) -> PartsReport:
        """Report captures, replays and eager calls of each part."""
        return PartsReport({name: part.graph_report() for name, part in self.parts.items()}, self.skipped)

    def __repr__(self) -> str:
        """Show the model and its parts that have graphs."""
        return f"<{type(self).__name__} of {type(self.model).__name__}: {', '.join(self.parts)}>"
