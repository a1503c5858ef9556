"""The counters of `stats` as text and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from simplegraph.manager.jobs import headline, merged_failures
from simplegraph.manager.stats import GraphCounters, GraphStats

_TOTALS = ("captures", "capture_seconds", "graph_bytes", "replays", "padded_tokens", "recaptures", "flushes")
_COLUMNS = ("mode", "size", "segments", "breaks", "nodes", "capture ms", "MiB", "replays", "padded", "proven")


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GraphReport:
    """Captures, replays and eager calls with their reasons. ``print(report)`` shows a table.

    Args:
        stats: the counters.
        device: where the graphs are.
        emulated: True if these are imitated graphs, without speed.
    """

    stats: GraphStats
    device: str
    emulated: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return everything in the report as plain values; seconds, bytes, rows."""
        stats = self.stats
        return {
            "name": stats.name,
            "device": self.device,
            "emulated": self.emulated,
            **{name: getattr(stats, name) for name in _TOTALS},
            "eager": {reason.value: count for reason, count in stats.eager.most_common()},
            "details": {reason.value: detail for reason, detail in stats.details.items()},
            "failures": dict(stats.failures),
            "graphs": [_as_dict(graph) for graph in self._graphs()],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def _graphs(self) -> list[Any]:
        return sorted(self.stats.graphs.values(), key=lambda graph: (graph.mode, graph.size))

    def __str__(self) -> str:
        stats = self.stats
        where = f"{self.device}, emulated: no speed" if self.emulated else self.device
        lines = [
            f"{stats.name} ({where}): {len(stats.graphs)} graphs, {stats.capture_seconds:.3f} s, "
            f"{_mib(stats.graph_bytes)} MiB; {stats.replays} replays, {stats.padded_tokens} padded tokens, "
            f"{sum(stats.eager.values())} eager calls"
        ]
        graphs = self._graphs()
        lines += _table([_COLUMNS, *map(_row, graphs)]) if graphs else []
        lines += [_shares(graph) for graph in graphs if graph.breaks]
        eager = stats.eager.most_common()
        lines += [f"  eager {count:>6} x {reason.value}: {stats.explained(reason)}" for reason, count in eager]
        seconds = sum(graph.proof_seconds for graph in graphs)
        lines += [f"  proofs took {seconds:.3f} s, the eager runs that were calls included"] if seconds else []
        if stats.flushes:
            lines.append(f"  flushed {stats.flushes} x: more call signatures than max_signatures")
        lines += [f"  failed: {headline(message)}" for _, message in merged_failures(stats.failures)]
        return "\n".join(lines)

    __repr__ = __str__


def _row(graph: GraphCounters) -> tuple[str, ...]:
    what = (graph.size, graph.segments, graph.breaks, "-" if graph.nodes is None else graph.nodes)
    costs = f"{graph.seconds * 1e3:.1f}", _mib(graph.bytes)
    return graph.mode, *map(str, what), *costs, str(graph.replays), str(graph.padded_tokens), graph.proof or "-"


def _as_dict(graph: GraphCounters) -> dict[str, Any]:
    """Return a graph's counters as plain values; `steps` only where there are several."""
    fields = {field.name: getattr(graph, field.name) for field in dataclasses.fields(graph)}
    costs = fields.pop("costs")
    return fields | ({"steps": [dataclasses.asdict(cost) for cost in costs()]} if graph.breaks else {})


def _shares(graph: GraphCounters) -> str:
    """Share out a piecewise replay's time: to the segments together, and to every break function."""
    parts: dict[str, list[float | None]] = {}
    for cost in graph.costs():
        parts.setdefault(cost.name or "segments", []).append(cost.ms)
    times = {name: sum(ms) for name, known in parts.items() if (ms := [t for t in known if t is not None])}
    total = sum(times.values())
    shown = [
        f"{name} x {len(known)}" + (f" {times[name]:.3f} ms ({times[name] / total:.0%})" if total else "")
        for name, known in parts.items()
    ]
    untimed = "" if times else " (timed at the second replay)"
    return f"  {graph.mode} {graph.size}: {', '.join(shown)}{untimed}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
