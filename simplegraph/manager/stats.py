"""Counters of captures, replays and eager calls; every fallback has its reason here."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from simplegraph.reasons import Reason

logger = logging.getLogger("simplegraph")

# Reasons that are part of the normal course, or that the failed capture warned of; the others are worth a warning.
_EXPECTED = {Reason.FIRST_CALL, Reason.WARMUP, Reason.EAGER_CONTEXT, Reason.NESTED, Reason.MODE_NONE, Reason.PROOF}
_EXPECTED |= {Reason.CAPTURE_FAILED}


@dataclasses.dataclass(slots=True)
class GraphCounters:
    """One captured graph: what it is, what it cost, how often it ran.

    Attributes:
        label: what was captured, as in messages.
        mode: FULL or PIECEWISE.
        size: padded rows.
        seconds: capture time; bytes: device memory the capture took.
        replays: how often it was replayed; padded_tokens: padding rows in all of these together.
        segments, breaks: graphs it consists of, and eager calls between them.
        nodes: operations in it, where the device can say.
        proof: which calls were compared with eager and agreed, "exact" and "padded" ones, or why it is "unverified";
            proof_seconds: the time that took, the eager runs included.
        costs: its steps and their times; see `StepCost`.
    """

    label: str
    mode: str
    size: int
    seconds: float
    bytes: int
    segments: int = 1
    breaks: int = 0
    nodes: int | None = None
    replays: int = 0
    padded_tokens: int = 0
    proof: str = ""
    proof_seconds: float = 0.0
    costs: Callable[[], Sequence[Any]] = tuple


@dataclasses.dataclass(eq=False)
class GraphStats:
    """Counters of one wrapper or manager.

    Attributes:
        graphs: one `GraphCounters` for every graph captured and not dropped, by key.
        eager: eager calls by `Reason`; details: what the latest call of each reason was about, where that is known.
        captures: captures that succeeded; failures: captures that failed.
        recaptures: how often all graphs were dropped because what they read had moved.
        flushes: how often they were dropped because there were more signatures than `max_signatures`.
    """

    name: str = "model"
    graphs: dict[Hashable, GraphCounters] = dataclasses.field(default_factory=dict)
    eager: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)
    details: dict[Reason, str] = dataclasses.field(default_factory=dict)
    captures: int = 0
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    recaptures: int = 0
    flushes: int = 0
    _dropped_replays: int = 0
    _dropped_padding: int = 0

    @property
    def replays(self) -> int:
        """Replays of all graphs, dropped ones included."""
        return self._dropped_replays + sum(graph.replays for graph in self.graphs.values())

    @property
    def padded_tokens(self) -> int:
        """Padding rows in all replays together."""
        return self._dropped_padding + sum(graph.padded_tokens for graph in self.graphs.values())

    @property
    def graph_bytes(self) -> int:
        """Device memory that capturing the present graphs took."""
        return sum(graph.bytes for graph in self.graphs.values())

    @property
    def capture_seconds(self) -> float:
        """Time that capturing the present graphs took."""
        return sum(graph.seconds for graph in self.graphs.values())

    def ran_eagerly(self, reason: Reason, detail: str = "") -> None:
        """Count an eager call; the first of each reason is logged, as a warning if it costs speed."""
        first = reason not in self.eager
        self.eager[reason] += 1
        if detail:
            self.details[reason] = detail
        if first:
            level = logging.DEBUG if reason in _EXPECTED else logging.WARNING
            logger.log(level, "simplegraph: %s runs eagerly: %s.", self.name, self.explained(reason))

    def explained(self, reason: Reason) -> str:
        """Return a reason's text, and what the latest call of it was about."""
        detail = self.details.get(reason)
        return f"{reason.text} ({detail})" if detail else reason.text

    def captured(self, key: Hashable, counters: GraphCounters) -> None:
        """Count a graph that was captured."""
        self.captures += 1
        self.graphs[key] = counters

    def uncaptured(self, key: Hashable) -> None:
        """Take back a capture that turned out unusable before it was replayed."""
        self.captures -= 1
        del self.graphs[key]

    def dropped(self) -> None:
        """Keep the totals of graphs that were dropped."""
        self._dropped_replays, self._dropped_padding = self.replays, self.padded_tokens
        self.graphs.clear()
