"""Counters of captures, replays and eager calls; every fallback has its reason here."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import string
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from simplegraph.base.extras import eager_listeners
from simplegraph.base.reasons import Reason
from simplegraph.device.protocol import Inventory

logger = logging.getLogger("simplegraph")

# Reasons of the normal course, and those that a failed capture or proof warned of; the others are worth a warning.
_EXPECTED = {Reason.FIRST_CALL, Reason.WARMUP, Reason.SWITCHED_OFF, Reason.NESTED, Reason.PROOF}
_EXPECTED |= {Reason.CAPTURE_FAILED, Reason.PADDING_SHOWS}
_MOST_LOGGED = 100  # causes of one wrapper
_NO_DIGITS = str.maketrans("", "", string.digits)
_MOST_SIZES = 1 << 16  # different ones that are counted, of calls above every captured size


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 graph" and "2 graphs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@dataclasses.dataclass(slots=True)
class GraphCounters:
    """One captured graph: what it is, what it cost, how often it ran.

    Attributes:
        label: what was captured, as in messages.
        mode: FULL or PIECEWISE; FORWARD or BACKWARD of a training call.
        size: padded rows.
        seconds: capture time; bytes: device memory the capture took.
        segments, breaks: graphs it consists of, and eager calls between them.
        nodes: operations in it, where the device can say.
        proof: which calls were compared with eager and agreed, "exact" and "padded" ones, or why it is "unverified";
            proof_seconds: the time that took, the eager runs included.
        inputs: what it was captured for, by argument, as text: dtype and shape, or value.
        inventory: what it touches, if the driver was asked.
        steps: describes its segments and breaks; see `Program.described_steps`.
        paddings: how often it was replayed, by the number of padding rows, up to the largest that came.
    """

    label: str
    mode: str
    size: int
    seconds: float
    bytes: int
    segments: int = 1
    breaks: int = 0
    nodes: int | None = None
    proof: str = ""
    proof_seconds: float = 0.0
    inputs: Mapping[str, str] = dataclasses.field(default_factory=dict)
    steps: Callable[[], Sequence[dict[str, Any]]] = dataclasses.field(default=tuple, repr=False)
    inventory: Inventory | None = None
    paddings: list[int] = dataclasses.field(default_factory=list, init=False)

    @property
    def replays(self) -> int:
        """Count its replays."""
        return sum(self.paddings)

    @property
    def padded_tokens(self) -> int:
        """Padding rows in all replays together."""
        return sum(itertools.accumulate(self.paddings[:0:-1]))  # a call with p padding rows is in p of these sums

    def batch_sizes(self) -> dict[int, int]:
        """Return how many calls it served of each number of real rows; those of a backward are its forward's."""
        if self.mode == "BACKWARD":
            return {}
        return {self.size - padding: count for padding, count in enumerate(self.paddings) if count}


@dataclasses.dataclass(eq=False, repr=False)
class GraphStats:
    """Counters of one wrapper or manager.

    Attributes:
        number: tells those of one process apart that have one name.
        graphs: one `GraphCounters` for every graph captured and not dropped, by key.
        unit: what batches are counted in, "rows" or "tokens"; "calls" if each call counts as one.
        eager: eager calls by `Reason`; slower: those that graphs served, but in a slower way than they were asked to;
            details: what the latest call of each reason was about, where that is known.
        texts: for a library in front of the wrapper, texts of reasons that advise none of the wrapper's settings.
        captures: captures that succeeded; failures: captures that failed.
        recaptures: how often all graphs were dropped because what they read had moved.
        flushes: how often they were dropped because there were more signatures than `max_signatures`.
    """

    name: str = "model"
    unit: str = "tokens"
    graphs: dict[Hashable, GraphCounters] = dataclasses.field(default_factory=dict)
    eager: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)
    slower: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)
    details: dict[Reason, str] = dataclasses.field(default_factory=dict)
    texts: dict[Reason, str] = dataclasses.field(default_factory=dict)
    captures: int = 0
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    recaptures: int = 0
    flushes: int = 0
    _eager_sizes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    _dropped_sizes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    _dropped_padding: int = 0
    _logged: set[tuple[Reason, int, str]] = dataclasses.field(default_factory=set)
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__, init=False)

    def __repr__(self) -> str:
        """Name the wrapper, and sum up its calls; the report has all of it."""
        return f"<{type(self).__name__} of {self.name}: {self.summary}>"

    @property
    def summary(self) -> str:
        """Say in one line what came of the calls."""
        counts = ((len(self.graphs), "graph"), (self.replays, "replay"), (self.eager.total(), "eager call"))
        return ", ".join(counted(number, noun) for number, noun in counts)

    @property
    def replays(self) -> int:
        """Replays of all graphs, dropped ones included."""
        return self._dropped_sizes.total() + sum(graph.replays for graph in list(self.graphs.values()))

    @property
    def batch_sizes(self) -> dict[int, int]:
        """Count the calls of each batch size, before padding: the histogram that `plan_sizes` takes.

        Eager calls are in it where a graph of some size could have served them: not in training mode, say.
        """
        sizes = self._eager_sizes + self._dropped_sizes
        for graph in list(self.graphs.values()):
            sizes.update(graph.batch_sizes())
        return {size: sizes[size] for size in sorted(sizes) if size > 0}

    @property
    def padded_tokens(self) -> int:
        """Padding rows in all replays together."""
        return self._dropped_padding + sum(graph.padded_tokens for graph in list(self.graphs.values()))

    @property
    def replayed_tokens(self) -> int:
        """Real rows in all replays together."""
        graphs = [graph for graph in list(self.graphs.values()) if graph.mode != "BACKWARD"]
        served = sum(graph.size * graph.replays - graph.padded_tokens for graph in graphs)
        return served + sum(size * count for size, count in list(self._dropped_sizes.items()))

    @property
    def graph_bytes(self) -> int:
        """Device memory that capturing the present graphs took."""
        return sum(graph.bytes for graph in list(self.graphs.values()))

    @property
    def capture_seconds(self) -> float:
        """Time that capturing the present graphs took."""
        return sum(graph.seconds for graph in list(self.graphs.values()))

    def ran_eagerly(self, reason: Reason, detail: str = "", size: int | None = None) -> None:
        """Count an eager call; the first of each cause is logged, as a warning if it costs speed.

        Args:
            reason: why no graph served it.
            detail: what it was about.
            size: the batch's size, if a graph of some size could serve it.
        """
        self.eager[reason] += 1
        if size is not None and (size in self._eager_sizes or len(self._eager_sizes) < _MOST_SIZES):
            self._eager_sizes[size] += 1
        for listener in (*eager_listeners,):
            listener(self.name, reason, detail)
        learning = reason is Reason.OUTPUT_SHAPE_UNKNOWN and not detail  # this very call makes it known
        self._explain("runs eagerly", reason, detail, warn=not learning and reason not in _EXPECTED)

    def ran_slower(self, reason: Reason, detail: str) -> None:
        """Count a call that graphs served in a slower way than asked for; the first of each cause is logged."""
        self.slower[reason] += 1
        self._explain("runs slower", reason, detail, warn=True)

    def _explain(self, what: str, reason: Reason, detail: str, *, warn: bool) -> None:
        if detail:
            self.details[reason] = detail
        level = logging.WARNING if warn else logging.DEBUG
        cause = reason, level, detail.translate(_NO_DIGITS)  # the same of another size is no news
        if cause not in self._logged and len(self._logged) < _MOST_LOGGED:
            self._logged.add(cause)
            text = self.explained(reason)
            logger.log(level, "simplegraph: %s %s: %s.\n  See %s", self.name, what, text, reason.link)

    def explained(self, reason: Reason) -> str:
        """Return a reason's text, and what the latest call of it was about."""
        text, detail = self.texts.get(reason, reason.text), self.details.get(reason)
        return f"{text} ({detail})" if detail else text

    def uncaptured(self, key: Hashable) -> None:
        """Take back a capture that turned out unusable; the totals of its replays stay."""
        self.captures -= not self.graphs[key].replays
        self.dropped([key])

    def dropped(self, keys: Iterable[Hashable]) -> None:
        """Keep the totals of graphs that were dropped."""
        for graph in [self.graphs.pop(key) for key in list(keys) if key in self.graphs]:
            self._dropped_padding += graph.padded_tokens
            self._dropped_sizes.update(graph.batch_sizes())
