"""A report as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import collections
import html
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from simplegraph.base.reasons import DOCUMENTATION, Reason
from simplegraph.batch.sizes import plan_sizes
from simplegraph.manager.jobs import merged_failures
from simplegraph.manager.report import GraphReport
from simplegraph.manager.stats import GraphCounters, GraphStats

_MOST_ROWS = 40  # of a table of batch sizes
_MOST_STEPS = 3  # graphs whose steps are shown
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bar: #d9480f; --waste: #868e96; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; } p { margin: .3rem 0; }
table { border-collapse: collapse; width: 100%; } th { font-weight: 600; text-align: left; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td:first-child { white-space: nowrap; } .bar { width: 22%; }
.bar i { display: block; height: .9rem; margin-top: .3rem; background: var(--bar); }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.tiles div { background: var(--soft); border-radius: .4rem; padding: .5rem .9rem; }
.tiles b { display: block; font-size: 1.3rem; } pre { white-space: pre-wrap; background: var(--soft); padding: .6rem; }
"""


class Bar(NamedTuple):
    """A cell of a table that shows a share, 0 to 1, of the column's largest value as a bar."""

    share: float


def page(report: GraphReport) -> str:
    """Return a report as a page of HTML."""
    title = f"{_text(report.stats.name)}: CUDA graphs"
    body = "\n".join(_body(report))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title><style>{_STYLE}</style></head>
<body><h1>{title}</h1>
{body}
</body></html>
"""


def _body(report: GraphReport) -> Iterator[str]:
    stats, graphs = report.stats, report.graphs()
    yield _paragraph(
        f"{report.device}, emulated: times do not measure performance" if report.emulated else report.device
    )
    yield _tiles(stats)
    yield from _sizes(graphs, stats.unit)
    yield from _reasons("Eager calls", stats, stats.eager)
    yield from _reasons("Calls that graphs served in a slower way", stats, stats.slower)
    if stats.failures:
        yield _heading("Captures that failed")
        yield from (f"<pre>{_text(message)}</pre>" for _, message in merged_failures(stats.failures))
    if stats.unit != "calls":
        yield from _padding(graphs, stats)
    yield from _steps([graph for graph in graphs if graph.breaks])
    if report.optimizations:
        yield _heading("Optimized")
        yield from map(_paragraph, report.optimizations)


def _tiles(stats: GraphStats) -> str:
    eager, rows = stats.eager.total(), stats.replayed_tokens + stats.padded_tokens
    shown = {
        "graphs": f"{len(stats.graphs):,}",
        "replays": f"{stats.replays:,}",
        "eager calls": f"{eager:,}",
        f"of the {stats.unit} in replays are padding": _percent(stats.padded_tokens, rows),
        "device memory": _mib(stats.graph_bytes),
        "capturing": f"{stats.capture_seconds:.2f} s",
    }
    tiles = "".join(f"<div><b>{value}</b>{_text(name)}</div>" for name, value in shown.items())
    return f'<div class="tiles">{tiles}</div>'


def _sizes(graphs: Sequence[GraphCounters], unit: str) -> Iterator[str]:
    yield _heading("Graphs and their use")
    if not graphs:
        yield _paragraph("Nothing is captured.")
        return
    most, memory = max(graph.replays for graph in graphs), max(graph.bytes for graph in graphs)
    header = ("graph", "replays", "", f"padded {unit}", "memory", "", "captured in", "compared with eager")
    rows = [
        (
            f"{graph.mode} {graph.size}",
            graph.replays,
            Bar(_ratio(graph.replays, most)),
            graph.padded_tokens,
            _mib(graph.bytes),
            Bar(_ratio(graph.bytes, memory)),
            f"{graph.seconds * 1e3:.1f} ms",
            graph.proof or "not yet",
        )
        for graph in graphs
    ]
    yield _table(header, rows)


def _padding(graphs: Sequence[GraphCounters], stats: GraphStats) -> Iterator[str]:
    """Show the padding of each batch size, and the sizes that would waste least."""
    calls: collections.Counter[tuple[int, int]] = collections.Counter()
    for graph in graphs:
        calls.update({(size, graph.size): count for size, count in graph.batch_sizes().items()})
    if not calls:
        return
    waste = {pair: (pair[1] - pair[0]) * count for pair, count in calls.items()}
    worst = sorted(sorted(calls, key=lambda pair: waste[pair], reverse=True)[:_MOST_ROWS])
    most = max(waste.values())
    yield _heading(f"Padding by batch size, in {stats.unit}")
    rows = [(*pair, calls[pair], waste[pair], Bar(_ratio(waste[pair], most))) for pair in worst]
    yield _table(("batch size", "served at", "calls", "padding", ""), rows)
    if len(calls) > len(worst):
        yield _paragraph(f"{len(calls) - len(worst)} more batch sizes waste less than these.")
    histogram: collections.Counter[int] = collections.Counter()
    for (size, _), count in calls.items():
        histogram[size] += count
    plan = plan_sizes(histogram, len({padded for _, padded in calls}))
    chosen = f"capture_sizes={list(plan.sizes)}"
    yield (
        f"<p>For these calls <code>plan_sizes</code> would choose <code>{_text(chosen)}</code>: padding of "
        f"{plan.waste_after:,.0f} {_text(stats.unit)} instead of {sum(waste.values()):,}, with as many sizes.</p>"
    )


def _steps(graphs: Iterable[GraphCounters]) -> Iterator[str]:
    """Show the time of each segment and break, as one replay took it, of the piecewise graphs that are used most."""
    timed = [(graph, costs) for graph in graphs for costs in [list(graph.costs())] if any(cost.ms for cost in costs)]
    timed.sort(key=lambda pair: pair[0].replays, reverse=True)
    for graph, costs in timed[:_MOST_STEPS]:
        longest = max(cost.ms or 0.0 for cost in costs)
        yield _heading(f"Steps of {graph.mode} {graph.size}, in milliseconds")
        rows = [
            (cost.name or f"segment, nodes: {cost.nodes or 0}", cost.ms or 0.0, Bar((cost.ms or 0.0) / longest))
            for cost in costs
        ]
        yield _table(("step", "time", ""), rows)


def _reasons(title: str, stats: GraphStats, counts: collections.Counter[Reason]) -> Iterator[str]:
    if not counts:
        return
    yield _heading(title)
    most = max(counts.values())
    rows = "".join(
        f'<tr><td><a href="{_text(reason.link)}">{_text(reason.value)}</a></td>{_cell(count)}{_cell(Bar(count / most))}'
        f"<td>{_text(stats.explained(reason))}</td></tr>"
        for reason, count in counts.most_common()
    )
    yield f"<table>{rows}</table>"
    yield f'<p>All reasons are in <a href="{DOCUMENTATION}troubleshooting.html">troubleshooting</a>.</p>'


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    rows = list(rows)
    kinds = ["number" if isinstance(value, (int, float)) else "" for value in rows[0]]
    head = "".join(f'<th class="{kind}">{_text(name)}</th>' for kind, name in zip(kinds, header, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, Bar):
        return f'<td class="bar"><i style="width:{value.share:.1%}"></i></td>'
    if isinstance(value, (int, float)):
        return (
            f'<td class="number">{value:,}</td>' if isinstance(value, int) else f'<td class="number">{value:.3f}</td>'
        )
    return f"<td>{_text(value)}</td>"


def _heading(text: str) -> str:
    return f"<h2>{_text(text)}</h2>"


def _paragraph(text: str) -> str:
    return f"<p>{_text(text)}</p>"


def _text(value: object) -> str:
    return html.escape(str(value))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _percent(part: int, whole: int) -> str:
    return f"{_ratio(part, whole):.1%}"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"
