"""The report of `advise` as one HTML file, without scripts, and as JSON beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from simplegraph.doctor.page import Bar, document, heading, paragraph, table, text, tiles
from simplegraph.manager.stats import counted

_HEADER = (
    "called",
    "at",
    "calls",
    "in a second",
    "eager, ms",
    "the GPU's",
    "a graph, ms",
    "times as fast",
    "saved",
    "",
)


def write_advice(report: Mapping[str, Any], path: Path) -> Path:
    """Write a report, as `Advisor.to_dict` returns it, to a path and, as JSON, beside it; return the path."""
    path.with_suffix(".json").write_text(json.dumps(report), encoding="utf-8")
    path.write_text(document("Advice on CUDA graphs", "\n".join(_body(report))), encoding="utf-8")
    return path


def _body(report: Mapping[str, Any]) -> Iterator[str]:
    emulated = ", emulated: no times" if report["device"] == "emulated" else ""
    yield paragraph(f"{report['device'] if not emulated else 'CPU'}{emulated}, torch {report['torch']}")
    watched = report["watched"]
    tried = [one for one in watched if one["trial"] is not None]
    figures = {"watched": len(watched), "tried": len(tried), "calls": sum(one["calls"] for one in watched)}
    yield tiles(
        {name: f"{value:,}" for name, value in figures.items()} | {"trying": f"{report['trial_seconds']:.1f} s"}
    )
    yield heading("What to change, the most worth first")
    for number, line in enumerate(report["lines"], 1):
        first, *rest = line.splitlines()
        yield paragraph(f"{number}. {first}")
        yield from (f"<pre>{text(change.strip())}</pre>" for change in rest)
    if tried:
        yield heading("What was tried")
        most = max(one["saved"] for one in tried) or 1.0
        yield table(_HEADER, (_row(one, most) for one in tried))
    for one in tried:
        shapes = (f"{' and '.join(map(str, shapes)) or 'no tensor'} x {count}" for shapes, count in one["shapes"])
        if one["shapes"]:
            yield paragraph(f"Shapes passed to {one['name']} ({one['where']}): {', '.join(shapes)}")


def _row(one: Mapping[str, Any], most: float) -> tuple[Any, ...]:
    trial, timed = one["trial"], one["trial"]["eager_ms"] is not None
    times = [f"{trial[name]:.3g}" if trial[name] else "-" for name in ("eager_ms", "gpu_ms", "graph_ms", "gain")]
    saved = f"{one['saved']:.2f} s" if timed else counted(round(one["saved"]), "operator")
    rate = f"{one['rate']:.3g}" if timed else "-"
    return (one["name"], one["where"], one["calls"], rate, *times, saved, Bar(one["saved"] / most))
