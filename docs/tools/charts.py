"""Plots figures if matplotlib is installed: bars from zero, dots on a log axis, this library in colour."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.tools.measure import say
from simplegraph.base.errors import install_command

OURS, OTHERS = "#d9480f", "#868e96"
LOG_SCALE = "less is better, on a logarithmic scale"
_DPI = 150
_WIDE = 400  # last over first number of an axis from which on only powers of ten have a tick


def draw(path: Path, fill: Callable[[Any, Any], None], **layout: Any) -> None:
    """Save a plot, or print which package is missing.

    Args:
        path: of the picture.
        fill: draws on the chart and its axes.
        layout: of the axes, as `pyplot.subplots` takes it.
    """
    try:
        import matplotlib
    except ImportError as error:
        say(f"no plot ({error}); to have one: {install_command('bench')}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(layout="constrained", **layout)
    chart.get_layout_engine().set(w_pad=0.1, h_pad=0.1)
    fill(chart, axes)
    chart.savefig(path, dpi=_DPI, metadata={"Software": None})
    pyplot.close(chart)
    say(f"plot: {path}")


def colour(name: str) -> str:
    """Return this library's colour for its own runs, grey for others."""
    return OURS if "simplegraph" in name else OTHERS


def bars(axis: Any, title: str, values: Mapping[str, float], form: str = "%.3g") -> None:
    """Draw one bar per run, from zero, with its value."""
    names = list(values)[::-1]
    drawn = axis.barh(names, [values[name] for name in names], color=[colour(name) for name in names], height=0.6)
    axis.bar_label(drawn, fmt=form, padding=3)
    axis.set_xlim(0, 1.25 * max(values.values()))  # room for the values
    axis.set_xlabel("less is better")
    _finish(axis, title)


def dots(axis: Any, title: str, values: Mapping[str, float], form: str = "%.3g") -> None:
    """Draw one dot per run, on a logarithmic axis, with its value."""
    names = list(values)[::-1]
    axis.scatter([values[name] for name in names], names, color=[colour(name) for name in names], s=45, zorder=3)
    for name in names:
        place = {"xytext": (7, 0), "textcoords": "offset points", "va": "center"}
        axis.annotate(form % values[name], (values[name], name), **place)
    log_axis(axis, min(values.values()) / 1.5, max(values.values()) * 3)
    axis.set_xlabel(LOG_SCALE)
    axis.set_ylim(-0.6, len(names) - 0.4)
    _finish(axis, title)


def log_axis(axis: Any, least: float, most: float) -> None:
    """Make the horizontal axis logarithmic, with few enough ticks that their plain numbers do not overlap."""
    from matplotlib import ticker

    axis.set_xscale("log")
    axis.set_xlim(least, most)
    steps = (1,) if most / least > _WIDE else (1, 2, 5) if most / least > 5 else (1, 1.5, 2, 3, 5, 7)
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=steps, numticks=12))
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())


def _finish(axis: Any, title: str) -> None:
    axis.set_title(title, fontsize="medium", loc="left")
    axis.grid(axis="x", color="#dee2e6", zorder=0)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def colours_legend(chart: Any) -> None:
    """Say below a chart which colour is whose."""
    from matplotlib.patches import Patch

    handles = [Patch(color=OURS, label="simplegraph"), Patch(color=OTHERS, label="others")]
    chart.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
