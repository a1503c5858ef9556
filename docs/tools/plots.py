"""Draws the plots of pages from the raw figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from docs.tools.charts import LOG_SCALE, OURS, bars, colours_legend, dots, draw, log_axis
from docs.tools.raw import ROOT, extra, load, startup
from docs.tools.tables import FAMILIES, readme_rows

FOLDER = ROOT / "docs" / "_static"
_MARKERS = "osD^v"
_ARMS = {
    "graph": "simplegraph",
    "eager": "eager",
    "optimized": "sg.optimize",
    "compiled": "torch.compile, reduce-overhead",
    "make-graphed-callables": "make_graphed_callables",
}
_READY = [arm for arm in _ARMS if arm != "eager"]  # eager's first call waits for no graph
_HOLLOW = "s^v"
_GREYS = ("#343a40", "#868e96", "#1c7ed6", "#2b8a3e")

Rows = Mapping[str, Mapping[str, float]]


def _startup(path: Path) -> None:
    names = {
        "eager": "eager",
        "plain-loop": "plain loop of torch.cuda.graph",
        "lean-loop": "lean loop: one warmup, no checks",
        "simplegraph": "simplegraph",
        "simplegraph-fused": "simplegraph, fused layers",
    }
    runs = {text: startup()[name] for name, text in names.items()}

    def fill(chart: Any, axes: Any) -> None:
        ready = {name: run["seconds"]["ready"] for name, run in runs.items()}
        dots(axes[0], "all 51 batch sizes ready, s", ready, "%.2f")
        for axis, batch in zip(axes[1:], ("1", "64"), strict=True):
            steps = {name: run["step_ms"][batch] for name, run in runs.items()}
            bars(axis, f"a step at batch {batch}, ms", steps, "%.2f")
            axis.set_yticklabels([])
        colours_legend(chart)

    draw(path, fill, ncols=3, figsize=(10.5, 3.3), width_ratios=(1.35, 1, 1))


def _decode(path: Path) -> None:
    names = {
        "eager": "eager, no fused layers",
        "fa3 eager": "eager",
        "fa3 graph": "simplegraph, same kernels",
        "triton graph": "simplegraph, Triton decode",
        "compiled-piecewise": "compiled piecewise",
        "compiled-full": "compiled full",
        "GEMMs alone": "the matrix products alone",
    }
    steps = {str(row["batch"]): row["ms"] for row in extra("h200_engine_steps")["decode"]}

    def fill(chart: Any, axes: Any) -> None:
        for axis, (batch, ms) in zip(axes, steps.items(), strict=True):
            bars(axis, f"batch {batch}, ms", {text: ms[key] for key, text in names.items()}, "%.2f")
        for axis in axes[1:]:
            axis.set_yticklabels([])
        colours_legend(chart)

    draw(path, fill, ncols=4, figsize=(11, 3.5), width_ratios=(1, 1, 1, 1))


def _serving(path: Path) -> None:
    def fill(chart: Any, axis: Any) -> None:
        colours = iter(_GREYS)
        for name, run in load("h200_serve")["results"].items():
            label = name.removesuffix(", triton")
            ours = label.startswith("full")
            style = {
                "color": OURS if ours else next(colours),
                "linestyle": "--" if label.endswith("piecewise") else "-",
            }
            axis.plot(run["itl_percentiles_ms"], range(101), label=f"simplegraph, {label}" if ours else label, **style)
        log_axis(axis, 3, 30)
        axis.set_xlabel("from token to token, ms, on a logarithmic scale")
        axis.set_ylabel("share of tokens that\ncame within this time, %")
        axis.set_ylim(0, 101)
        axis.grid(color="#dee2e6")
        axis.legend(loc="lower right", frameon=False)

    draw(path, fill, figsize=(7.5, 3.6))


def _dot_rows(axis: Any, title: str, rows: Rows, arms: Mapping[str, str]) -> None:
    """Draw a dot for each arm of each row, on a logarithmic axis."""
    names = list(rows)[::-1]
    greys = iter(_GREYS)
    for marker, (arm, text) in zip(_MARKERS, arms.items(), strict=False):
        ours = arm in ("simplegraph", "graph")
        shade = OURS if ours else next(greys)
        look = {"s": 80, "zorder": 2, "linewidths": 2} if ours else {"s": 34, "zorder": 3, "linewidths": 1.2}
        look["edgecolors"] = shade
        look["facecolors"] = "none" if marker in _HOLLOW else shade  # points that lie on each other stay visible
        there = [name for name in names if arm in rows[name]]
        axis.scatter([rows[name][arm] for name in there], there, marker=marker, label=text, **look)
    every = [value for row in rows.values() for value in row.values()]
    log_axis(axis, min(every) / 1.4, max(every) * 1.4)
    axis.set_xlabel(LOG_SCALE)
    axis.set_title(title, fontsize="medium", loc="left")
    axis.grid(color="#dee2e6")
    axis.set_axisbelow(True)


def _two_panels(path: Path, panels: Mapping[str, Rows], arms: Mapping[str, str]) -> None:
    def fill(chart: Any, axes: Any) -> None:
        for axis, (title, rows) in zip(axes, panels.items(), strict=True):
            _dot_rows(axis, title, rows, arms)
        axes[1].set_yticklabels([])
        chart.legend(*axes[1].get_legend_handles_labels(), loc="outside lower center", ncols=len(arms), frameon=False)

    draw(path, fill, ncols=2, figsize=(10.5, 4.2))


def _models(path: Path) -> None:
    rows = readme_rows()
    panels = {
        "until the fourth call is done, a replay, s": {
            name: {arm: arms[arm]["ready_seconds"] for arm in _READY} for name, arms in rows.items()
        },
        "a call, ms": {name: {arm: arms[arm]["ms"] for arm in _ARMS} for name, arms in rows.items()},
    }
    _two_panels(path, panels, _ARMS)


def _families(path: Path) -> None:
    arms = {"simplegraph": "graph_generation", "static-compiled": "static cache, compiled"}
    found = load("h200_generate")["models"]
    keys = {"first generation, s": "first_seconds", "a token, ms": "ms_per_token"}
    panels = {
        title: {text: {arm: found[key]["arms"][arm][value] for arm in arms} for key, text in FAMILIES.items()}
        for title, value in keys.items()
    }
    _two_panels(path, panels, arms)


PLOTS: dict[str, Callable[[Path], None]] = {
    "startup": _startup,
    "decode": _decode,
    "serving": _serving,
    "models": _models,
    "families": _families,
}


def draw_all() -> None:
    """Draw every plot again."""
    for name, plot in PLOTS.items():
        plot(FOLDER / f"{name}.png")
