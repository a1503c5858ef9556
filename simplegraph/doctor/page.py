"""A report as one HTML file that needs nothing else: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import collections
import datetime
import html
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from simplegraph.base.reasons import Reason, explain_command
from simplegraph.base.version import VERSION
from simplegraph.batch.planner import plan_sizes
from simplegraph.manager.stats import GraphCounters, GraphReport, GraphStats, counted, inputs_column, merged_failures

_MAX_ROWS = 40  # of a table of batch sizes
_MAX_STEPS = 3  # graphs whose steps are shown
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --bar: #d9480f; --waste: #868e96; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; } p { margin: .3rem 0; }
.wide { overflow-x: auto; } .wide td:last-child { min-width: 20rem; } p, b { overflow-wrap: anywhere; }
table { border-collapse: collapse; width: 100%; }
th { font-weight: 600; text-align: left; white-space: nowrap; }
th, td { padding: .2rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td:first-child { white-space: nowrap; } .bar { width: 18%; }
@media (max-width: 36rem) { .bar { display: none; } td { overflow-wrap: anywhere; } td, th { padding: .2rem .4rem; } }
.bar i { display: block; height: .9rem; margin-top: .3rem; background: var(--bar); }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0; }
.tiles div { background: var(--soft); border-radius: .4rem; padding: .5rem .9rem; }
.tiles b { display: block; font-size: 1.3rem; } pre { white-space: pre-wrap; background: var(--soft); padding: .6rem; }
"""


class Bar(NamedTuple):
    """A cell of a table that shows a share, 0 to 1, of the column's largest value as a bar."""

    share: float


class Measure(str):
    """A number with its unit: one line in a cell of a table, aligned like a number."""

    __slots__ = ()


def page(report: GraphReport) -> str:
    """Return a report as a page of HTML."""
    return document(f"{report.stats.name}: CUDA graphs", "\n".join(_body(report)))


def document(title: str, body: str, style: str = "") -> str:
    """Return a page of HTML with more rules of style than the common ones."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{text(title)}</title><style>{_STYLE}{style}</style></head>
<body><h1>{text(title)}</h1>
{body}
</body></html>
"""


def _body(report: GraphReport) -> Iterator[str]:
    stats, graphs = report.stats, report.graphs()
    yield paragraph(
        f"{report.device}, emulated: times do not measure performance" if report.emulated else report.device
    )
    yield paragraph(
        f"simplegraph {VERSION}, torch {torch.__version__}, Python {platform.python_version()}; written "
        f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC"
    )
    yield _tiles(stats)
    yield from _sizes(graphs, stats)
    costly, normal = stats.eager_by_cost()
    yield from _reasons("Eager calls that cost speed", stats, costly)
    yield from _reasons("Eager calls in the normal course", stats, normal)
    yield from _reasons("Calls that graphs served in a slower way", stats, stats.slower)
    if stats.failures:
        yield heading("Captures that failed")
        yield from (f"<pre>{text(message)}</pre>" for _, message in merged_failures(stats.failures))
    if not stats.exact:
        yield from _padding(graphs, stats)
    if stats.lengths:
        yield paragraph(f"{stats.padded_lengths().strip()}.")
    yield from _steps([graph for graph in graphs if graph.breaks])
    if report.optimizations:
        yield heading("Optimized")
        yield from map(paragraph, report.optimizations)


def _tiles(stats: GraphStats) -> str:
    rows = stats.replayed_tokens + stats.padded_tokens
    costly, normal = stats.eager_by_cost()
    padding = f"of the {stats.unit} in replays are padding"
    shown = {
        "graphs": f"{len(stats.graphs):,}",
        "replays": f"{stats.replays:,}",
        "eager calls that cost speed": f"{costly.total():,}",
        "eager calls in the normal course": f"{normal.total():,}",
        **({} if stats.exact else {padding: f"{_ratio(stats.padded_tokens, rows):.1%}"}),
        "device memory": amount(stats.graph_bytes),
        "capturing": f"{stats.capture_seconds:.2f} s",
        "proofs": f"{stats.proof_seconds:.2f} s",
    }
    if stats.longest_stall:
        shown["the longest call that had to capture"] = f"{stats.longest_stall:.2f} s"
    return tiles(shown)


def tiles(shown: Mapping[str, str]) -> str:
    """Show figures, each with its meaning."""
    return (
        f'<div class="tiles">{"".join(f"<div><b>{value}</b>{text(name)}</div>" for name, value in shown.items())}</div>'
    )


def _sizes(graphs: Sequence[GraphCounters], stats: GraphStats) -> Iterator[str]:
    yield heading("Graphs and their use")
    if not graphs:
        yield paragraph("Nothing is captured.")
        return
    most, memory = max(graph.replays for graph in graphs), max(graph.bytes for graph in graphs)
    inputs, *differing = inputs_column(graphs)  # none if they do not differ
    rows = [
        (
            graph.mode if stats.exact else f"{graph.mode} {graph.size}",
            graph.replays,
            Bar(_ratio(graph.replays, most)),
            *[graph.padded_tokens] * (not stats.exact),
            amount(graph.bytes),
            Bar(_ratio(graph.bytes, memory)),
            Measure(f"{graph.seconds * 1e3:.1f} ms"),
            graph.proof or "no",
            *[differing[at]] * bool(inputs),
        )
        for at, graph in enumerate(graphs)
    ]
    last = "captured in", "compared with eager", *[inputs] * bool(inputs)
    padded = [f"padded {stats.unit}"] * (not stats.exact)
    yield table(("graph", "replays", "", *padded, "memory", "", *last), rows)


def _padding(graphs: Sequence[GraphCounters], stats: GraphStats) -> Iterator[str]:
    """Show the padding of each batch size, and the sizes that would waste the least."""
    calls: collections.Counter[tuple[int, int]] = collections.Counter()
    for graph in graphs:
        calls.update({(size, graph.size): count for size, count in graph.batch_sizes().items()})
    if not calls:
        return
    waste = {pair: (pair[1] - pair[0]) * count for pair, count in calls.items()}
    worst = sorted(sorted(calls, key=lambda pair: waste[pair], reverse=True)[:_MAX_ROWS])
    yield heading(f"Padding by batch size, in {stats.unit}")
    yield table(
        ("batch size", "served at", "calls", "padding", ""),
        [(*pair, calls[pair], waste[pair], Bar(_ratio(waste[pair], max(waste.values())))) for pair in worst],
    )
    if len(calls) > len(worst):
        yield paragraph(f"{len(calls) - len(worst)} more batch sizes waste less than these.")
    sizes = sorted({graph.size for graph in graphs})
    histogram = {size: count for size, count in stats.batch_sizes.items() if size <= sizes[-1]}  # proofs, too
    now = sum(
        count * (min(captured for captured in sizes if captured >= size) - size) for size, count in histogram.items()
    )
    plan = plan_sizes(histogram, len(sizes))
    if plan.waste_after < now:
        yield (
            f"<p>For all calls of up to {sizes[-1]} {text(stats.unit)} <code>plan_sizes</code> would choose "
            f"<code>capture_sizes={list(plan.sizes)}</code>: padding of {plan.waste_after:,.0f} {text(stats.unit)} "
            f"instead of {now:,}, with {counted(len(plan.sizes), 'size')}; now there are {len(sizes)}.</p>"
        )
    above = {size: count for size, count in stats.batch_sizes.items() if size > sizes[-1]}
    if above:
        larger, times = " to ".join(map(str, sorted({min(above), max(above)}))), counted(sum(above.values()), "call")
        yield paragraph(f"Not among these: {times} of {larger} {stats.unit}, which no graph here holds.")


def _steps(graphs: Iterable[GraphCounters]) -> Iterator[str]:
    """Show the time of each segment and break, as one replay took it, of the piecewise graphs that are used most."""
    timed = [(graph, costs) for graph in graphs for costs in [list(graph.costs())] if any(cost.ms for cost in costs)]
    timed.sort(key=lambda pair: pair[0].replays, reverse=True)
    for graph, costs in timed[:_MAX_STEPS]:
        longest = max(cost.ms or 0.0 for cost in costs)
        yield heading(f"Steps of {graph.mode} {graph.size}, in milliseconds")
        yield table(
            ("step", "time", ""),
            [
                (cost.name or f"segment, nodes: {cost.nodes or 0}", cost.ms or 0.0, Bar((cost.ms or 0.0) / longest))
                for cost in costs
            ],
        )


def _reasons(title: str, stats: GraphStats, counts: collections.Counter[Reason]) -> Iterator[str]:
    if not counts:
        return
    yield heading(title)
    most = max(counts.values())
    yield _scrolled(
        "".join(
            f"<tr><td>{text(why.value)}</td>{_cell(count)}{_cell(Bar(count / most))}"
            f"<td>{text(stats.explained(why))}</td></tr>"
            for why, count in counts.most_common()
        )
    )
    yield f"<p>A reason is explained by <code>{text(explain_command('NAME'))}</code>.</p>"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Show rows under a header; numbers are aligned, and a `Bar` is drawn."""
    rows = list(rows)
    kinds = ["bar" if isinstance(value, Bar) else "number" * isinstance(value, _NUMBERS) for value in rows[0]]
    head = "".join(f'<th class="{kind}">{text(name)}</th>' for kind, name in zip(kinds, header, strict=True))
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return _scrolled(f"<tr>{head}</tr>{body}")


def _scrolled(rows: str) -> str:
    """Make a table of rows that scrolls by itself where the page is narrower."""
    return f'<div class="wide"><table>{rows}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, Bar):
        return f'<td class="bar"><i style="width:{value.share:.1%}"></i></td>'
    if isinstance(value, Measure):
        return f'<td class="number">{text(value)}</td>'
    if isinstance(value, (int, float)):
        return f'<td class="number">{format(value, "," if isinstance(value, int) else ".3f")}</td>'
    return f"<td>{text(value)}</td>"


def heading(title: str) -> str:
    """Begin a part."""
    return f"<h2>{text(title)}</h2>"


def paragraph(line: str) -> str:
    """Show a line."""
    return f"<p>{text(line)}</p>"


def text(value: object) -> str:
    """Escape a value."""
    return html.escape(str(value))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def amount(count: int) -> Measure:
    """Show a count of bytes in the unit that suits it; a capture into memory that is there already takes none."""
    if count >= 2**20:
        return Measure(f"{count / 2**20:,.2f} MiB")
    return Measure(f"{count / 2**10:,.1f} KiB" if count >= 2**10 else f"{count} B")


_NUMBERS = (int, float, Measure)
