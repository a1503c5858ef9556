"""Tables of single calls whose answers are waited for."""

from __future__ import annotations

from typing import Any

from bench.latency import guards, tail
from bench.latency.rows import ROW, WAITED
from docs.tools import optimized
from docs.tools.grids import grid
from docs.tools.raw import load

FILE, EARLIER = "h200_latency", ("h200_latency_84c6bcf", "h200_latency_6e56cc7")
TAIL = "h200_tail"
MODELS = {"ten layers": "ten linear layers"} | optimized.MODELS
MODELS |= {"llama 24": "Llama, 24 layers", "decoder 2": "a decoder of 2 layers", "8b step": "a decode step of 8 B"}
ARMS = {
    "eager": "eager",
    "simplegraph": "**simplegraph**",
    "static": '**`outputs="static"`**',
    "no-guards": "the same without guards",
    "bare-graph": "a bare graph",
    "make-graphed-callables": "`make_graphed_callables`",
    "tensordict-cudagraph": "tensordict",
    "optimized-static": "**`sg.optimize`**, static",
    "compiled": "compiled, reduce-overhead",
}


def rows(file: str | None = None) -> dict[str, dict[str, Any]]:
    """Return the figures of every model that was measured, by its name in tables. Raises FileNotFoundError."""
    found = load(file or FILE)["rows"]
    return {text: found[key] for key, text in MODELS.items() if key in found}


def all_runs() -> list[tuple[str, dict[str, Any]]]:
    """List the figures of every model in every run, the earlier ones too, whose hosts had other Pythons."""
    return [pair for file in (FILE, *EARLIER) for pair in rows(file).items()]


def waited() -> str:
    """Return the table of calls that are waited for."""
    return _by_arm("waited for, us", WAITED, rows())


def back_to_back() -> str:
    """Return a table of calls back to back, and one of guards."""
    found = rows()
    return _by_arm("back to back, us a call", ROW, found) + "\n\n" + _guards(found)


def slowest() -> str:
    """Return the table of the slowest of many waited calls."""
    arms = {"eager": "eager", "simplegraph": "**simplegraph**", tail.UNPROVEN: "the same, `verify=0`"}
    titles = {"p50_us": "median", "p99_us": "99th percentile", "max_us": "slowest", "proofs": "proofs"}
    found = load(TAIL)["rows"]
    lines = [
        [MODELS[name], shown, *(f"{row['arms'][arm].get(figure, 0):,.0f}" for figure in titles)]
        for name, row in found.items()
        for arm, shown in arms.items()
    ]
    return grid(["model", "waited for, us", *titles.values()], lines)


def _by_arm(title: str, figure: str, found: dict[str, Any]) -> str:
    shown = {
        key: text for key, text in ARMS.items() if any(figure in row["arms"].get(key, {}) for row in found.values())
    }
    lines = [
        [name, *(f"{row['arms'][arm][figure]:,.0f}" if figure in row["arms"].get(arm, {}) else "" for arm in shown)]
        for name, row in found.items()
    ]
    return grid([title, *shown.values()], lines)


def _guards(found: dict[str, Any]) -> str:
    lines = []
    for name, row in found.items():
        static, without = (row["arms"][arm][WAITED] for arm in ("static", "no-guards"))
        goal = guards.DICT_US * row["dicts"] + guards.TENSOR_US * row["tensors"]
        parts = (f"{row['guards'][part]:.1f}" if part in row.get("guards", {}) else "" for part in _PARTS)
        lines.append([name, str(row["dicts"]), str(row["tensors"]), f"{static - without:.0f}", f"{goal:.0f}", *parts])
    return grid(["guards, us", "dicts", "tensors", "of a waited call", "goal", *_PARTS.values()], lines)


_PARTS = {"moved_us": "what is read of the module, alone", "settings_us": "settings of torch, alone"}
