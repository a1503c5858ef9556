"""The report of an audit as one HTML file, without scripts, and as JSON beside it."""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from simplegraph.device.kernel_names import readable
from simplegraph.doctor.page import amount, document, heading, paragraph, table, text, tiles
from simplegraph.manager.stats import counted

_HEADER = ("graph", "captured in", "reading", "replays", "captured at", "pools", "memory of", "not read")
_FINDING = ("kind", "address", "then", "now", "kernel", "allocated at", "graphs")
_STYLE = """
summary { cursor: pointer; padding: .2rem 0; } details { border-bottom: 1px solid var(--line); }
details { content-visibility: auto; contain-intrinsic-size: auto 2rem; }
.strip { display: flex; height: 1.1rem; margin: .4rem 0; gap: 1px; } .strip i { background: var(--bar); }
.strip i:nth-child(even) { opacity: .55; } ol { padding-left: 1.5rem; } li { overflow-wrap: anywhere; }
.bad { color: #c92a2a; font-weight: 600; } td { overflow-wrap: anywhere; } td:first-child { white-space: normal; }
@media (max-width: 36rem) { td { min-width: 7rem; } }
.wide td:last-child { min-width: 7rem; } h2 + div td:nth-child(n+3):nth-child(-n+5) { min-width: 9rem; }
h2 + div td:nth-child(-n+2) { min-width: 0; white-space: nowrap; overflow-wrap: normal; }
"""


def write_report(report: dict[str, Any], path: Path) -> Path:
    """Write a report, as `Audit.to_dict` returns it, to a path and, as JSON, beside it; return the path."""
    path.with_suffix(".json").write_text(json.dumps(report), encoding="utf-8")
    path.write_text(page(report), encoding="utf-8")
    return path


def page(report: dict[str, Any]) -> str:
    """Return the report as HTML: findings first, then graphs, those alike together, each with its timeline."""
    return document("Audit of CUDA graphs", "\n".join(_body(report)), _STYLE)


def _body(report: dict[str, Any]) -> Iterator[str]:
    graphs, findings = report["graphs"], report["findings"]
    yield paragraph(f"{report['device']}, torch {report['torch']}, process {report['process']}")
    yield tiles(
        {
            "graphs": f"{len(graphs):,}",
            "nodes": f"{sum(len(graph['nodes']) for graph in graphs):,}",
            "findings": f"{len(findings):,}",
            "checks of a graph": f"{report['checks']:,}",
            "in pools of graphs": amount(sum(report["pools"].values())),
            "inside captures": f"{sum(graph['seconds'] for graph in graphs):.2f} s",
            "of it reading": f"{sum(graph['reading_seconds'] for graph in graphs):.2f} s",
        }
    )
    yield heading("Findings")
    if findings:
        yield table(_FINDING, map(_finding, findings))
    else:
        yield paragraph("None: at every check each graph's memory was still what it was at the capture.")
    yield heading("Graphs")
    names = report["names"]
    shown = [readable(name) for name in names]
    guilty = {number for finding in findings for number in finding["graphs"]}
    alike: dict[Any, list[dict[str, Any]]] = {}
    for graph in graphs:
        alike.setdefault(tuple((name, module) for name, _, module in graph["nodes"]), []).append(graph)
    # Those with findings first.
    for members in sorted(alike.values(), key=lambda members: guilty.isdisjoint(graph["number"] for graph in members)):
        yield from _group(members, names, shown, guilty)


def _finding(finding: dict[str, Any]) -> Sequence[object]:
    graphs = _listed(finding["graphs"])
    where = finding["allocated"] or "unknown: torch's memory history was off"
    first = finding["kind"], hex(finding["address"]), finding["then"], finding["now"], finding["kernel"]
    return (*first, where, graphs)


def _group(
    graphs: Sequence[dict[str, Any]], names: Sequence[str], shown: Sequence[str], guilty: set[int]
) -> Iterator[str]:
    bad = guilty.intersection(graph["number"] for graph in graphs)
    count = f"{len(graphs)} graphs alike" if graphs[1:] else f"graph {graphs[0]['number']}"
    mark = f' <b class="bad">findings in graph {_listed(sorted(bad))}</b>' if bad else ""
    nodes = graphs[0]["nodes"]
    modules = [names[module] for *_, module in nodes if names[module]]
    extent = f": {modules[0]}" + (f" to {modules[-1]}" if modules[-1] != modules[0] else "") if modules else ""
    length = counted(len(nodes), "node") + " each" * bool(graphs[1:])
    yield f"<details><summary>{count}, {length}{text(extent)}{mark}</summary>"
    yield _timeline(nodes, names, shown)
    yield table(_HEADER, map(_row, graphs))
    yield "</details>"


def _row(graph: dict[str, Any]) -> Sequence[object]:
    memory = ", ".join(f"{count} {state}" for state, count in graph["memory"].items())
    notes = ", ".join(f"{count} x {note}" for note, count in graph["notes"].items())
    number = f"{graph['number']}{' (dropped)' if graph['dropped'] else ''}"
    times = (f"{graph[name] * 1e3:.1f} ms" for name in ("seconds", "reading_seconds"))
    return (number, *times, graph["replays"], graph["captured_at"], ", ".join(graph["pools"]), memory, notes)


def _timeline(nodes: Sequence[Sequence[int]], names: Sequence[str], shown: Sequence[str]) -> str:
    """Show nodes in order, those of a module together; a node without a module's tensor is the one's before it."""
    modules, strip, lines = [""], [], []
    for *_, module in nodes:
        modules.append(names[module] or modules[-1])
    for module, run in itertools.groupby(zip(modules[1:], nodes, strict=True), operator.itemgetter(0)):
        kernels = [(shown[name], names[shape]) for _, (name, shape, _) in run]
        title = text(module or "before any module")
        strip.append(f'<i style="flex:{len(kernels)}" title="{title}"></i>')
        launches = (_launches(kernel, len(list(same))) for kernel, same in itertools.groupby(kernels))
        lines.append(f"<li><b>{title}</b>: {', '.join(launches)}</li>")
    return f'<div class="strip">{"".join(strip)}</div><ol>{"".join(lines)}</ol>'


def _launches(kernel: tuple[str, str], count: int) -> str:
    name, shape = kernel
    return text(name + (f" [{shape}]" if shape else "") + (f" x {count}" if count > 1 else ""))


def _listed(numbers: Sequence[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if numbers[most:] else "")
