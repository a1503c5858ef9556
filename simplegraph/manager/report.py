"""The counters of `stats` as text and JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from simplegraph.manager.stats import GraphCounters, GraphStats


class GraphReport:
    """What was captured, replayed and run eagerly, and why. ``print(report)`` shows a table.

    Args:
        stats: the counters.
        device: where the graphs are.
        emulated: whether these are imitated graphs, without speed.
    """

    def __init__(self, stats: GraphStats, device: str, *, emulated: bool = False) -> None:
        self._stats = stats
        self._device = device
        self._emulated = emulated

    def to_dict(self) -> dict[str, Any]:
        """Everything in the report as plain values; seconds, bytes, rows."""
        stats = self._stats
        return {
            "name": stats.name,
            "device": self._device,
            "emulated": self._emulated,
            "captures": stats.captures,
            "capture_seconds": stats.capture_seconds,
            "graph_bytes": stats.graph_bytes,
            "replays": stats.replays,
            "padded_tokens": stats.padded_tokens,
            "recaptures": stats.recaptures,
            "flushes": stats.flushes,
            "eager": {reason.value: count for reason, count in stats.eager.most_common()},
            "failures": dict(stats.failures),
            "graphs": [_as_dict(graph) for graph in self._graphs()],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def _graphs(self) -> list[Any]:
        return sorted(self._stats.graphs.values(), key=lambda graph: (graph.mode, graph.size))

    def __str__(self) -> str:
        stats = self._stats
        where = f"{self._device}, emulated: no speed" if self._emulated else self._device
        lines = [
            f"{stats.name} ({where}): {len(stats.graphs)} graphs, {stats.capture_seconds:.3f} s, "
            f"{_mib(stats.graph_bytes)} MiB; {stats.replays} replays, {stats.padded_tokens} padded tokens, "
            f"{sum(stats.eager.values())} eager calls"
        ]
        rows = [("mode", "size", "segments", "breaks", "nodes", "capture ms", "MiB", "replays", "padded")]
        for graph in self._graphs():
            nodes = "-" if graph.nodes is None else str(graph.nodes)
            costs = (f"{graph.seconds * 1e3:.1f}", _mib(graph.bytes))
            counts = (str(graph.replays), str(graph.padded_tokens))
            rows.append((graph.mode, str(graph.size), str(graph.segments), str(graph.breaks), nodes, *costs, *counts))
        if len(rows) > 1:
            lines += _table(rows)
        lines += [_shares(graph) for graph in self._graphs() if graph.breaks]
        lines += [f"  eager {count:>6} x {reason.value}: {reason.text}" for reason, count in stats.eager.most_common()]
        if stats.flushes:
            lines.append(f"  flushed {stats.flushes} x: more call signatures than max_signatures")
        lines += [f"  failed: {_cause(message)}" for message in stats.failures.values()]
        return "\n".join(lines)

    __repr__ = __str__


def _as_dict(graph: GraphCounters) -> dict[str, Any]:
    """A graph's counters as plain values; `steps` only where there are several."""
    fields = {field.name: getattr(graph, field.name) for field in dataclasses.fields(graph)}
    costs = fields.pop("costs")
    return fields | ({"steps": [dataclasses.asdict(cost) for cost in costs()]} if graph.breaks else {})


def _shares(graph: GraphCounters) -> str:
    """Where a piecewise replay's time goes: the segments together, and every break function."""
    costs = graph.costs()
    parts: dict[str, list[float | None]] = {}
    for cost in costs:
        parts.setdefault(cost.name or "segments", []).append(cost.ms)
    times = {name: sum(ms) for name, known in parts.items() if (ms := [t for t in known if t is not None])}
    total = sum(times.values())
    shown = [
        f"{name} x {len(known)}" + (f" {times[name]:.3f} ms ({times[name] / total:.0%})" if total else "")
        for name, known in parts.items()
    ]
    untimed = "" if times else " (timed at the second replay)"
    return f"  {graph.mode} {graph.size}: {', '.join(shown)}{untimed}"


def _cause(message: str) -> str:
    """What failed, where and why: the first two lines of an error, without the advice after them."""
    return ": ".join(line.strip() for line in message.splitlines()[:2])


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
