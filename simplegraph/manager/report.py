"""The counters of `stats` as text and JSON, and the list of all that have such reports."""

from __future__ import annotations

import collections
import dataclasses
import json
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from simplegraph.base.extras import eager_listeners, report_pages
from simplegraph.base.reasons import DOCUMENTATION, Reason
from simplegraph.manager.jobs import headline, merged_failures
from simplegraph.manager.stats import GraphCounters, GraphStats, counted

_TOTALS = ("captures", "capture_seconds", "graph_bytes", "replays", "padded_tokens", "recaptures", "flushes")
_COLUMNS = ("mode", "size", "segments", "breaks", "nodes", "capture ms", "MiB", "replays", "padded", "proven")
_MOST_SIZES = 12  # of batches, in one line


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class GraphReport:
    """Captures, replays and eager calls with their reasons. ``print(report)`` shows a table.

    Args:
        stats: the counters.
        device: where the graphs are.
        emulated: True if these are imitated graphs, without speed.
        optimizations: what `optimize` did to the module.
        touched: what the kernels of graphs touch, line by line, where that was asked for.
    """

    stats: GraphStats
    device: str
    emulated: bool = False
    optimizations: tuple[str, ...] = ()
    touched: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return everything in the report as plain values; seconds, bytes, rows."""
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
            "failures": dict(stats.failures),
            "optimizations": list(self.optimizations),
            "graphs": [_as_dict(graph) for graph in self.graphs()],
        }

    def to_json(self) -> str:
        """Return `to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | Path) -> None:
        """Write the report as one HTML file: sizes and their use, padding, memory, times, reasons with links."""
        Path(path).write_text(report_pages[-1](self), encoding="utf-8")

    def graphs(self) -> list[GraphCounters]:
        """Return the counters of each graph, by mode and size."""
        return sorted(self.stats.graphs.values(), key=lambda graph: (graph.mode, graph.size))

    def __str__(self) -> str:
        stats = self.stats
        where = f"{self.device}, emulated: no speed" if self.emulated else self.device
        lines = [
            f"{stats.name} ({where}): {counted(len(stats.graphs), 'graph')}, {stats.capture_seconds:.3f} s, "
            f"{_mib(stats.graph_bytes)} MiB; {counted(stats.replays, 'replay')}, "
            f"{counted(stats.padded_tokens, 'padded ' + stats.unit.removesuffix('s'))}, "
            f"{counted(stats.eager.total(), 'eager call')}"
        ]
        graphs = self.graphs()
        lines += _table([_COLUMNS, *map(_row, graphs)], _told_apart(graphs)) if graphs else []
        lines += [f"  {list_steps(graph)}" for graph in graphs if graph.breaks]
        lines += self.touched
        eager = stats.eager.most_common()
        lines += [f"  eager {count:>6} x {reason.value}: {stats.explained(reason)}" for reason, count in eager]
        slower = stats.slower.most_common()
        lines += [f"  slower {count:>5} x {reason.value}: {stats.explained(reason)}" for reason, count in slower]
        lines += [f"  eager calls explained: {DOCUMENTATION}troubleshooting.html"] if eager or slower else []
        seconds = sum(graph.proof_seconds for graph in graphs)
        lines += [f"  proofs took {seconds:.3f} s, the eager runs that were calls included"] if seconds else []
        read = sum(graph.inventory.seconds for graph in graphs if graph.inventory is not None)
        lines += [f"  the driver was asked what graphs touch for {read:.3f} s, beside the captures"] if read else []
        sizes = collections.Counter(stats.batch_sizes).most_common(_MOST_SIZES)
        if sizes and stats.unit != "calls":
            shown = ", ".join(f"{size} x {count}" for size, count in sorted(sizes))
            more = f", and {left} other sizes" if (left := len(stats.batch_sizes) - len(sizes)) else ""
            lines.append(f"  batch sizes in {stats.unit} x calls: {shown}{more}")
        if stats.flushes:
            lines.append(f"  flushed {stats.flushes} x: more call signatures than max_signatures")
        lines += [f"  optimized: {line}" for line in self.optimizations]
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
    steps, _, inventory = fields.pop("steps"), fields.pop("paddings"), fields.pop("inventory")
    fields["inventory"] = None if inventory is None else inventory.to_dict()
    fields |= {"inputs": dict(graph.inputs), "replays": graph.replays, "padded_tokens": graph.padded_tokens}
    return fields | ({"steps": steps()} if graph.breaks else {})


def list_steps(graph: GraphCounters) -> str:
    """List the steps of a piecewise graph: the segments together, and every break function."""
    counts = collections.Counter(step["name"] or "segments" for step in graph.steps())
    return f"{graph.mode} {graph.size}: {', '.join(f'{name} x {count}' for name, count in counts.items())}"


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"


def _told_apart(graphs: Sequence[GraphCounters]) -> list[str]:
    """Return a last column with the inputs in which graphs differ; empty if there are none."""
    names = dict.fromkeys(name for graph in graphs for name in graph.inputs)
    differing = [name for name in names if len({graph.inputs.get(name) for graph in graphs}) > 1]
    told = [", ".join(f"{name} {graph.inputs[name]}" for name in differing if name in graph.inputs) for graph in graphs]
    return ["inputs", *told] if differing else [""] * (len(graphs) + 1)


def _table(rows: Sequence[tuple[str, ...]], last: Sequence[str]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return [f"  {line}  {text}".rstrip() for line, text in zip(lines, last, strict=True)]


class GraphHolder(Protocol):
    """Holds graphs, as a manager of an engine does, or the part of a wrapped module that serves its calls.

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
