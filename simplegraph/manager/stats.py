"""Counters of captures, replays and eager calls, with the reason of each eager call; and the report of them."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import logging
import re
import string
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from simplegraph.base import extras
from simplegraph.base.errors import CaptureError, ConfigError
from simplegraph.base.reasons import Reason, explain_command
from simplegraph.device.protocol import Inventory

logger = logging.getLogger("simplegraph")

# Called with (wrapper's name, reason, detail) at each eager call.
_eager_listeners: list[Callable[[str, Reason, str], object]] = []

# Expected reasons: first calls, calls that the user runs eagerly, and calls with nothing to compute.
_NORMAL = {Reason.FIRST_CALL, Reason.WARMUP, Reason.PROOF, Reason.SWITCHED_OFF, Reason.NESTED, Reason.EMPTY_BATCH}
_WARNED = {Reason.CAPTURE_FAILED, Reason.PADDING_SHOWS}  # the failed capture or proof has logged the warning
# Refusals that last until graphs are reset, even if their cause is removed.
_LASTING = frozenset(
    {
        *(Reason.CAPTURE_FAILED, Reason.PADDING_SHOWS, Reason.CHANGED_ARGUMENTS, Reason.UNSUPPORTED_OUTPUT),
        *(Reason.UNTRAINABLE, Reason.STALE_TOO_OFTEN),
    }
)
_MAX_LOGGED = 100  # the most causes that are logged for one wrapper
_NO_DIGITS = str.maketrans("", "", string.digits)
_MAX_SIZES = 1 << 16  # the most batch sizes of eager calls that are counted


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 graph" and "2 graphs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


_BATCH_SIZE = "batch size "  # the prefix of the labels of jobs
_MAX_LISTED = 8  # the most sizes that a message lists


def joined_labels(labels: Sequence[str]) -> str:
    """Join the labels of jobs: "batch sizes 8, 4". Labels that differ in more than the size are listed in full."""
    sizes = [label.removeprefix(_BATCH_SIZE).partition(",") for label in labels]
    sized = all(label.startswith(_BATCH_SIZE) for label in labels)
    if len(labels) == 1 or not sized or len({suffix for _, _, suffix in sizes}) > 1:
        return ", ".join(labels)
    numbers = sorted((int(size) for size, _, _ in sizes), reverse=True)
    shown = [str(number) for number in numbers]
    if len(shown) > _MAX_LISTED:
        shown[_MAX_LISTED - 1 : -1] = [f"... ({len(numbers)} of them)"]
    _, comma, suffix = sizes[0]
    return f"batch sizes {', '.join(shown)}{comma}{suffix}"


def origin(label: str, message: str) -> str:
    """Return a failure's message without its batch size, which is equal for sizes that fail for one cause."""
    first, *further = message.splitlines()
    return "\n".join([first.replace(label, "", 1), *(re.sub(r"\d+", "", line) for line in further)])


def merged_failures(failures: Mapping[str, str]) -> list[tuple[str, str]]:
    """Merge the messages of failures with one cause; return (joined labels, merged message) of each cause.

    Args:
        failures: messages by label.
    """
    groups: dict[str, list[str]] = {}
    for label, message in failures.items():
        groups.setdefault(origin(label, message), []).append(label)
    merged = [(labels[0], joined_labels(labels)) for labels in groups.values()]
    return [(labels, failures[first].replace(first, labels, 1)) for first, labels in merged]


def headline(message: str) -> str:
    """Return an error's first three lines as two lines: the failure with its cause, and the advice."""
    lines = [line.strip() for line in message.splitlines()]
    return "\n    ".join([": ".join(lines[:2]), *lines[2:3]])


def where_failed(error: CaptureError) -> str:
    """Return the label of the failed job and the user's line, from the first line of an error; else the cause."""
    where = re.sub("^capturing |^the graph of | failed$| is dropped$", "", str(error).splitlines()[0])
    return f"{where}: {error.cause}" if error.location is None and error.cause else where


class Described(Protocol):
    """Values that a graph was captured for."""

    def described(self) -> Mapping[str, str]:
        """Describe all values as texts, by name."""


@dataclasses.dataclass(slots=True)
class GraphCounters:
    """The counters of one captured graph: its description, its cost, and its replays.

    Attributes:
        label: its name in messages.
        mode: FULL or PIECEWISE; FORWARD or BACKWARD of a training call.
        size: padded rows.
        seconds: capture time; bytes: device memory that the capture took.
        segments, breaks: its number of segments, and of eager breaks between them.
        nodes: the number of operations; None if the device cannot say.
        proof: the kinds of calls that equalled eager in a comparison, "exact" and "padded", or why it is "unverified";
            proof_seconds: the time of the comparisons, eager runs included.
        inputs: the arguments that it was captured for, by name, as text: dtype and shape, or value.
        values: the Python values that it was captured for; None if none count.
        inventory: the memory and kernels that it touches, if the driver was asked; else None.
        costs: its steps and their times; see `StepCost`.
        paddings: the number of replays by the number of padding rows, up to the largest number so far.
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
    costs: Callable[[], Sequence[Any]] = dataclasses.field(default=tuple, repr=False)
    inventory: Inventory | None = None
    values: Described | None = dataclasses.field(default=None, repr=False)
    paddings: list[int] = dataclasses.field(default_factory=list, init=False)

    @property
    def replays(self) -> int:
        """The number of replays."""
        return sum(self.paddings)

    @property
    def padded_tokens(self) -> int:
        """Padding rows in all replays together."""
        return sum(itertools.accumulate(self.paddings[:0:-1]))  # a call with p padding rows is in p of the sums

    def batch_sizes(self) -> dict[int, int]:
        """Return the number of replayed calls by their number of real rows; none for a backward."""
        if self.mode == "BACKWARD":
            return {}
        return {self.size - padding: count for padding, count in enumerate(self.paddings) if count}


@dataclasses.dataclass(eq=False, repr=False)
class GraphStats:
    """Counters of one wrapper or manager.

    Attributes:
        number: distinguishes wrappers of one process that have the same name.
        graphs: the counters of every graph that is not dropped, by key.
        unit: the unit of batch sizes, "rows" or "tokens"; "calls" if shapes are exact, without batch sizes.
        eager: eager calls by `Reason`; slower: calls that graphs served in a slower way than asked for;
            details: details of the latest call of each reason, or of the largest call that was too large, if known.
        texts: texts of an integration in place of `Reason.text`, for users who do not know the wrapper's settings.
        capture_method: name of the user's method that captures before the first call; empty if there is none.
        reset_method: name of the user's method that drops all graphs and refusals.
        captures: captures that succeeded; failures: captures that failed.
        recaptures: how often all graphs were dropped because memory that they read was moved.
        flushes: how often all graphs were dropped because there were more signatures than `max_signatures`.
        discarded_launches: early launches of graphs whose calls were then found to need another graph, or none. They
            do not count as replays.
        raised: first calls that raised an error, as they do without graphs; they count nowhere else.
        longest_stall: seconds of the longest call that captured a size, including its eager run and the proof.
        lengths: with `length_dims`, calls by (their length, the captured length).
    """

    name: str = "model"
    unit: str = "tokens"
    graphs: dict[Hashable, GraphCounters] = dataclasses.field(default_factory=dict)
    eager: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)
    slower: collections.Counter[Reason] = dataclasses.field(default_factory=collections.Counter)
    details: dict[Reason, str] = dataclasses.field(default_factory=dict)
    texts: dict[Reason, str] = dataclasses.field(default_factory=dict)
    capture_method: str = "capture_graphs"
    reset_method: str = "reset"
    captures: int = 0
    failures: dict[str, str] = dataclasses.field(default_factory=dict)
    recaptures: int = 0
    flushes: int = 0
    discarded_launches: int = 0
    raised: int = 0
    longest_stall: float = 0.0
    lengths: collections.Counter[tuple[int, int]] = dataclasses.field(default_factory=collections.Counter)
    _eager_sizes: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    _dropped: dict[tuple[str, int], GraphCounters] = dataclasses.field(default_factory=dict)  # totals by mode and size
    _logged: set[tuple[Reason, int, str]] = dataclasses.field(default_factory=set)
    _latest: tuple[Reason, int, str] | None = None
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__, init=False)

    def __repr__(self) -> str:
        """Return the wrapper's name and a summary of its calls; the report has the details."""
        return f"<{type(self).__name__} of {self.name}: {self.summary}>"

    @property
    def summary(self) -> str:
        """Return one line with the numbers of graphs, replays and eager calls."""
        counts = ((len(self.graphs), "graph"), (self.replays, "replay"), (self.eager.total(), "eager call"))
        return ", ".join(counted(number, noun) for number, noun in counts)

    @property
    def replays(self) -> int:
        """Replays of all graphs, dropped ones included."""
        return sum(graph.replays for graph in self._every_graph())

    def _every_graph(self) -> list[GraphCounters]:
        """List the counters of all graphs, and the totals of dropped graphs."""
        return [*list(self.graphs.values()), *list(self._dropped.values())]

    @property
    def batch_sizes(self) -> dict[int, int]:
        """Return the number of calls by batch size, before padding: the histogram for `plan_sizes`.

        Eager calls count if a graph of some size could have served them; calls in training mode do not.
        """
        sizes = self._eager_sizes.copy()
        for graph in self._every_graph():
            sizes.update(graph.batch_sizes())
        return {size: sizes[size] for size in sorted(sizes) if size > 0}

    @property
    def padded_tokens(self) -> int:
        """Padding rows in all replays together."""
        return sum(graph.padded_tokens for graph in self._every_graph())

    @property
    def replayed_tokens(self) -> int:
        """Real rows in all replays together."""
        return sum(size * count for graph in self._every_graph() for size, count in graph.batch_sizes().items())

    @property
    def graph_bytes(self) -> int:
        """Device memory that capturing the present graphs took."""
        return sum(graph.bytes for graph in list(self.graphs.values()))

    @property
    def capture_seconds(self) -> float:
        """Time that capturing the present graphs took."""
        return sum(graph.seconds for graph in list(self.graphs.values()))

    @property
    def proof_seconds(self) -> float:
        """Time that comparing the present graphs with eager took, the eager runs included."""
        return sum(graph.proof_seconds for graph in list(self.graphs.values()))

    def eager_by_cost(self) -> tuple[collections.Counter[Reason], collections.Counter[Reason]]:
        """Return the counts of eager calls that cost speed, and of expected eager calls, by reason."""
        counts = self.eager.copy()
        learns = {Reason.OUTPUT_SHAPE_UNKNOWN} - {*self.details}  # these calls show the shape
        costly = collections.Counter({why: count for why, count in counts.items() if why not in _NORMAL | learns})
        return costly, counts - costly

    @property
    def exact(self) -> bool:
        """True if each combination of shapes has its own graph, without batch sizes and padding."""
        return self.unit == "calls"

    def padded_lengths(self) -> str:
        """Describe the padding of calls to captured lengths."""
        counts = self.lengths.most_common()  # copied once: another thread may add one
        called, served = (sum(pair[at] * count for pair, count in counts) for at in (0, 1))
        shown = (f"{length} at {padded} x {count}" for (length, padded), count in counts[:_MAX_SHOWN])
        return f"  lengths x calls: {', '.join(shown)}; {1 - called / served:.0%} of what was served is padding"

    def ran_eagerly(self, reason: Reason, detail: str = "", size: int | None = None) -> None:
        """Count an eager call, and log the first call of each cause, as a warning if it costs speed.

        Args:
            reason: why no graph served it.
            detail: details of the call.
            size: the batch's size, if a graph of some size could serve it.
        """
        self.eager[reason] += 1
        if size is not None and (size in self._eager_sizes or len(self._eager_sizes) < _MAX_SIZES):
            self._eager_sizes[size] += 1
        for listener in (*_eager_listeners,):
            listener(self.name, reason, detail)
        smaller = reason is Reason.BATCH_TOO_LARGE and (size or 0) < max(self._eager_sizes, default=0)
        learns = reason in _NORMAL or (reason is Reason.OUTPUT_SHAPE_UNKNOWN and not detail)
        # Keep the detail of the largest batch: a size for it serves this batch, too.
        kept = self.details.get(reason, detail) if smaller else detail
        self._explain("runs eagerly", reason, kept, warn=not learns and reason not in _WARNED)

    def ran_slower(self, reason: Reason, detail: str) -> None:
        """Count a call that graphs served in a slower way than asked for, and log the first call of each cause."""
        self.slower[reason] += 1
        self._explain("runs slower", reason, detail, warn=True)

    def _explain(self, effect: str, reason: Reason, detail: str, *, warn: bool) -> None:
        if detail:
            self.details[reason] = detail
        level = logging.WARNING if warn else logging.DEBUG
        text = self.explained(reason)
        if (reason, level, text) == self._latest:
            return
        self._latest = reason, level, text
        cause = reason, level, text.translate(_NO_DIGITS)  # the same cause at another size is not logged again
        if cause not in self._logged and len(self._logged) < _MAX_LOGGED:
            self._logged.add(cause)
            logger.log(level, "simplegraph: %s %s: %s.\n  See: %s", self.name, effect, text, reason.command)

    def explained(self, reason: Reason) -> str:
        """Return a reason's text, with the detail of its latest call."""
        text, detail = self.texts.get(reason, reason.text), self.details.get(reason)
        return f"{text} ({detail})" if detail else text

    def dropped(self, keys: Iterable[Hashable]) -> None:
        """Add the counters of these graphs to the totals of dropped graphs."""
        for graph in [self.graphs.pop(key) for key in list(keys) if key in self.graphs]:
            total = self._dropped.setdefault(
                (graph.mode, graph.size), GraphCounters("", graph.mode, graph.size, 0.0, 0)
            )
            pairs = itertools.zip_longest(total.paddings, graph.paddings, fillvalue=0)
            total.paddings = [before + more for before, more in pairs]


_TOTALS = (
    *(
        "captures",
        "capture_seconds",
        "proof_seconds",
        "longest_stall",
        "graph_bytes",
        "replays",
        "padded_tokens",
        "recaptures",
        "raised",
        "flushes",
    ),
)
_COLUMNS = ("mode", "size", "segments", "breaks", "nodes", "capture ms", "MiB", "replays", "padded", "proven")
_OF_SIZES = {"size", "padded"}  # columns that are left out if shapes are exact
_MAX_SHOWN = 12  # the most batch sizes in one line
_MAX_VALUE_LENGTH = 60  # the most characters for the Python values of a graph


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GraphReport:
    """Captures, replays and eager calls with their reasons. ``print(report)`` shows a table.

    Args:
        stats: the counters.
        device: the device of the graphs.
        emulated: True if the graphs are emulated, which gives no speed.
        optimizations: the changes that `optimize` made to the module.
        touched: lines about the memory that the kernels of graphs touch, if requested.
        ahead: batch size -> the eager calls ("warmup", "proof") before the next replay, if there are any.
    """

    stats: GraphStats
    device: str
    emulated: bool = False
    optimizations: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()
    ahead: Mapping[int, Sequence[str]] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values, in seconds, bytes and rows."""
        stats = self.stats
        return {
            "name": stats.name,
            "device": self.device,
            "emulated": self.emulated,
            "unit": stats.unit,
            **{name: getattr(stats, name) for name in _TOTALS},
            "eager": {reason.value: count for reason, count in stats.eager.most_common()},
            "slower": {reason.value: count for reason, count in stats.slower.most_common()},
            "details": {reason.value: detail for reason, detail in stats.details.items()},
            "batch_sizes": [list(pair) for pair in stats.batch_sizes.items()],
            "lengths": [[*pair, count] for pair, count in sorted(stats.lengths.copy().items())],
            "ahead": [[size, list(calls)] for size, calls in self.ahead.items()],
            "failures": dict(stats.failures),
            "optimizations": list(self.optimizations),
            "graphs": [_as_dict(graph) for graph in self.graphs()],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the report as an HTML file: sizes and their use, padding, memory, times, reasons.

        Raises:
            ConfigError: the path has the suffix of another kind of file, such as ".json" or ".png".
        """
        if Path(path).suffix.lower() in (".json", ".txt", ".csv", ".pdf", ".png"):
            raise ConfigError(f"the report's path is {str(path)!r}; expected an HTML file. JSON is report.to_json().")
        Path(path).write_text(extras.installed.report_page(self), encoding="utf-8")

    def graphs(self) -> list[GraphCounters]:
        """Return the counters of each graph, by mode and size."""
        return sorted(self.stats.graphs.values(), key=lambda graph: (graph.mode, graph.size))

    def __str__(self) -> str:
        stats = self.stats
        lines = [
            f"{stats.name} ({self.device}{', emulated: no speed' * self.emulated}): "
            f"{counted(len(stats.graphs), 'graph')}{' for exact shapes' * stats.exact}, {stats.capture_seconds:.3f} s, "
            f"{_mib(stats.graph_bytes)} MiB; {counted(stats.replays, 'replay')}, "
            + f"{counted(stats.padded_tokens, 'padded ' + stats.unit.removesuffix('s'))}, " * (not stats.exact)
            + counted(stats.eager.total(), "eager call")
        ]
        graphs = self.graphs()
        rows = [_COLUMNS, *map(_row, graphs)]
        if stats.exact:
            kept = [name not in _OF_SIZES for name in _COLUMNS]
            rows = [tuple(itertools.compress(row, kept)) for row in rows]
        lines += _table(rows, inputs_column(graphs)) if graphs else []
        lines += [_shares(graph, stats) for graph in graphs if graph.breaks]
        lines += self.touched
        costly, normal = stats.eager_by_cost()
        for title, counts in (
            ("eager calls in the normal course", normal),
            ("eager calls that cost speed", costly),
            ("calls that graphs served in a slower way", stats.slower),
        ):
            why = [(count, reason.value, stats.explained(reason)) for reason, count in counts.most_common()]
            lines += [f"  {title}:"] * bool(why) + [f"  {count:>5} x {reason}: {text}" for count, reason, text in why]
        if not _LASTING.isdisjoint(costly):
            removed = f"call {stats.reset_method}() once the cause is removed"
            lines.append(f"  such calls are not tried again by themselves: {removed}")
        lines += [f"  eager calls explained: {explain_command('NAME')}"] * bool(stats.eager or stats.slower)
        if self.ahead and (graphs or not costly):  # calls that no graph can serve prove none
            lines.append(f"  still to run eagerly before replays: {self._shown_ahead()}")
        seconds = stats.proof_seconds
        lines += [f"  proofs took {seconds:.3f} s, including your own eager calls"] if seconds else []
        lines += [
            f"  the longest call that had to capture took {stats.longest_stall:.3f} s"
            + f"; {stats.capture_method} does that before the first call"
            * (not stats.exact and bool(stats.capture_method))  # a step has none
        ] * bool(stats.longest_stall)
        read = sum(graph.inventory.seconds for graph in graphs if graph.inventory is not None)
        lines += [f"  the driver was asked what graphs touch for {read:.3f} s, beside the captures"] if read else []
        sizes = collections.Counter(stats.batch_sizes).most_common(_MAX_SHOWN)
        if sizes and not stats.exact:
            shown = ", ".join(f"{size} x {count}" for size, count in sorted(sizes))
            more = f", and {more_sizes} other sizes" if (more_sizes := len(stats.batch_sizes) - len(sizes)) else ""
            lines.append(f"  batch sizes in {stats.unit} x calls: {shown}{more}")
        lines += [stats.padded_lengths()] if stats.lengths else []
        if stats.raised:
            lines.append(f"  calls that raised an error, as in eager, and are not counted above: {stats.raised}")
        if stats.flushes:
            lines.append(f"  flushed {stats.flushes} x: more call signatures than max_signatures")
        if stats.recaptures:
            lines.append(f"  graphs were dropped {stats.recaptures} x, since what they read had moved")
        lines += [f"  optimized: {line}" for line in self.optimizations]
        lines += [f"  failed: {headline(message)}" for _, message in merged_failures(stats.failures)]
        return "\n".join(lines)

    __repr__ = __str__

    def _shown_ahead(self) -> str:
        sizes = list(self.ahead.items())
        shown = [
            f"{counted(len(calls), 'call')} of {counted(size, self.stats.unit.removesuffix('s'))} ({', '.join(calls)})"
            for size, calls in sizes[:_MAX_SHOWN]
        ]
        more = [f"and {more_sizes} other sizes"] if (more_sizes := len(sizes) - _MAX_SHOWN) > 0 else []
        return "; ".join([*shown, *more])


def _row(graph: GraphCounters) -> tuple[str, ...]:
    counts = (graph.size, graph.segments, graph.breaks, "-" if graph.nodes is None else graph.nodes)
    costs = f"{graph.seconds * 1e3:.1f}", _mib(graph.bytes)
    return graph.mode, *map(str, counts), *costs, str(graph.replays), str(graph.padded_tokens), graph.proof or "-"


def _as_dict(graph: GraphCounters) -> dict[str, Any]:
    """Return a graph's counters as plain values; `steps` only if there are several."""
    fields = {field.name: getattr(graph, field.name) for field in dataclasses.fields(graph)}
    costs, inventory, *_ = (fields.pop(name) for name in ("costs", "inventory", "paddings", "values"))
    fields |= {"inventory": None if inventory is None else inventory.to_dict(), "inputs": dict(graph.inputs)}
    fields |= {"replays": graph.replays, "padded_tokens": graph.padded_tokens}
    return fields | ({"steps": [dataclasses.asdict(cost) for cost in costs()]} if graph.breaks else {})


def _shares(graph: GraphCounters, stats: GraphStats) -> str:
    """Divide the time of a piecewise replay among its segments together and each break function."""
    parts: dict[str, list[float | None]] = {}
    for cost in graph.costs():
        parts.setdefault(cost.name or "segments", []).append(cost.ms)
    times = {name: sum(ms) for name, part_times in parts.items() if (ms := [t for t in part_times if t is not None])}
    total = sum(times.values())
    shown = [
        f"{name} x {len(part_times)}" + (f" {times[name]:.3f} ms ({times[name] / total:.0%})" if total else "")
        for name, part_times in parts.items()
    ]
    name = graph.mode if stats.exact else f"{graph.mode} {graph.size}"
    return f"  {name}: {', '.join(shown)}{'' if times else ' (timed at the second replay)'}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def inputs_column(graphs: Sequence[GraphCounters]) -> list[str]:
    """Return another column of the table: inputs and Python values in which graphs differ; empty strings if none do."""
    described = {graph.values: graph.values.described() for graph in graphs if graph.values is not None}
    inputs = _differing([graph.inputs for graph in graphs])
    values = _differing([{} if graph.values is None else described[graph.values] for graph in graphs])
    values = [text if len(text) <= _MAX_VALUE_LENGTH else f"{text[: _MAX_VALUE_LENGTH - 3]}..." for text in values]
    title = " and ".join(name for name, column in (("inputs", inputs), ("values", values)) if any(column))
    return [title, *(", ".join(filter(None, texts)) for texts in zip(inputs, values, strict=True))]


def _differing(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Format the items of each row in which rows differ."""
    names = dict.fromkeys(name for row in rows for name in row)
    differing = [name for name in names if len({row.get(name) for row in rows}) > 1]
    return [", ".join(f"{name} {row[name]}" for name in differing if name in row) for row in rows]


def _table(rows: Sequence[tuple[str, ...]], last: Sequence[str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"  {line}  {text}".rstrip() for line, text in zip(lines, last, strict=True)]


@dataclasses.dataclass(frozen=True)
class CaptureSummary:
    """The result of capturing several sizes.

    Attributes:
        captured: how many graphs were captured.
        failed: label -> error of the captures that failed.
        seconds: wall time, warmup included, without ``inventory``.
        bytes: device memory taken, by the device's free memory.
        parts: seconds by part: ``communicators`` (their setup), ``meetings`` of ranks (including the wait for the
            slowest), ``warmup``, ``capture`` and ``instantiate`` (the wait for the driver at the end). ``inventory``,
            the time to ask the driver what graphs touch, is not part of ``seconds``.
        switched_off: True if nothing was captured because graphs are switched off.
    """

    captured: int = 0
    failed: dict[str, CaptureError] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0
    bytes: int = 0
    parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
    switched_off: bool = False

    def __str__(self) -> str:
        total = f"{self.captured} of {self.captured + len(self.failed)} graphs captured"
        failures = {label: str(error) for label, error in self.failed.items()}
        lines = [f"  failed: {headline(message)}" for _, message in merged_failures(failures)]
        read = f" (and {seconds:.3f} s to read what they touch)" if (seconds := self.parts.get("inventory")) else ""
        off = ": graphs are switched off" * self.switched_off
        return "\n".join([f"{total} in {self.seconds:.3f} s{read}, {self.bytes / 2**20:.1f} MiB{off}", *lines])


class GraphHolder(Protocol):
    """Holds graphs: an engine's manager, or the runner of a wrapped module.

    Attributes:
        stats: its counters.
    """

    stats: GraphStats

    def report(self) -> GraphReport:
        """Report captures, replays and eager calls with their reasons."""


# Weak references to the holders, by the number of their counters.
_holders: weakref.WeakValueDictionary[int, GraphHolder] = weakref.WeakValueDictionary()


def register(holder: GraphHolder) -> None:
    """Add a holder of graphs to `wrappers` for as long as it lives."""
    _holders[holder.stats.number] = holder


def wrappers() -> list[GraphHolder]:
    """List the holders of graphs in this process, oldest first: wrapped modules, functions, steps, managers.

        for wrapper in sg.wrappers():
            print(wrapper.report())

    Each has `stats` (counters) and a `report`. They are not kept alive for this list.
    """
    holders = [reference() for reference in _holders.valuerefs()]
    return sorted((holder for holder in holders if holder is not None), key=lambda holder: holder.stats.number)


def on_eager(callback: Callable[[str, Reason, str], object]) -> Callable[[], None]:
    """Call a function at every eager call of every wrapper, before the forward runs, for your own metrics.

    Args:
        callback: called with the wrapper's name, the reason, and its detail ("" if there is none). It should return
            quickly; an exception that it raises ends the call.

    Returns:
        A function that removes the callback.

    Raises:
        ConfigError: the callback cannot be called.
    """
    if not callable(callback):
        raise ConfigError(f"on_eager was given {callback!r}; expected a function of (name, reason, detail).")
    _eager_listeners.append(callback)
    return lambda: _eager_listeners.remove(callback)
