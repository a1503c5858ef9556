"""Draws the figures of `how_it_works`: boxes, arrows and rows of memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from docs.tools.charts import OURS, draw
from docs.tools.raw import ROOT

FOLDER = ROOT / "docs" / "_static"
GRAPH, EAGER, MEMORY, PADDING, PLAIN = "#ffd8a8", "#e9ecef", "#d0ebff", "#f8f9fa", "#ffffff"
_LINE = "#495057"


def _box(axis: Any, x: float, y: float, width: float, height: float, text: str, colour: str, **style: Any) -> None:
    from matplotlib.patches import FancyBboxPatch

    look = {"facecolor": colour, "edgecolor": _LINE, "boxstyle": "round,pad=0,rounding_size=0.08"} | style
    axis.add_patch(FancyBboxPatch((x, y), width, height, **look))
    axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=9)


def _arrow(axis: Any, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    axis.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": _LINE, "shrinkA": 0, "shrinkB": 0} | style)


def _bent_arrow(axis: Any, *points: tuple[float, float]) -> None:
    """Draw a line through points, with a head at the last one only."""
    *bends, last = points
    axis.plot(*zip(*bends, strict=True), color=_LINE, linewidth=1)
    _arrow(axis, bends[-1], last)


def _say(axis: Any, x: float, y: float, text: str, **style: Any) -> None:
    axis.text(x, y, text, **({"ha": "center", "va": "center", "fontsize": 9, "color": _LINE} | style))


def _call(axis: Any) -> None:
    _box(axis, 0.1, 2.2, 1.5, 0.8, "model(x)\n5 rows", PLAIN)
    _box(axis, 2.2, 2.2, 2.1, 0.8, "find the batch size,\nask the dispatcher", PLAIN)
    _arrow(axis, (1.6, 2.6), (2.2, 2.6))
    rows = (
        (4.2, "no graph may serve it", [("run eagerly,\ncount the reason", EAGER)]),
        (2.2, "no graph yet", [("run eagerly\n(the warmup)", EAGER), ("next call: capture\n(runs nothing)", GRAPH)]),
        (0.2, "a graph", [("copy 5 rows,\npad to 8", MEMORY), ("replay", GRAPH), ("cut back\nto 5 rows", MEMORY)]),
    )
    for y, text, steps in rows:
        _say(axis, 5.65, y + 0.62, text, style="italic")
        bend = [(4.75, y + 0.4)] * (y != 2.2)
        _bent_arrow(axis, (4.3, 2.6), *bend, (6.9, y + 0.4))
        for number, (step, colour) in enumerate(steps):
            x = 6.9 + 2.35 * number
            _box(axis, x, y, 1.9, 0.8, step, colour)
            if number:
                _arrow(axis, (x - 0.45, y + 0.4), (x, y + 0.4), linestyle="--" if y == 2.2 else "-")
    _bent_arrow(axis, (10.2, 2.2), (10.2, 1.6), (7.85, 1.6), (7.85, 1.0))
    _say(axis, 10.3, 1.75, "served as by any graph", ha="left", style="italic")


def _padding(axis: Any) -> None:
    def column(x: float, count: int, title: str, real: int = 5) -> None:
        _say(axis, x + 0.6, 4.65, title)
        for row in range(count):
            text, colour = (f"row {row}", MEMORY) if row < real else ("padding", PADDING)
            _box(axis, x, 3.9 - 0.5 * row, 1.2, 0.42, text, colour, linestyle="-" if row < real else "--")

    column(0.3, 5, "the caller's x")
    column(3.0, 8, "static input of 8")
    _box(axis, 5.6, 1.2, 1.6, 2.0, "the graph\nof 8 rows", GRAPH)
    column(8.6, 8, "static output")
    column(11.3, 5, "the caller's y")
    _say(axis, 2.25, 3.5, "copy")
    _arrow(axis, (1.6, 3.2), (2.9, 3.2))
    _arrow(axis, (4.3, 2.2), (5.6, 2.2))
    _arrow(axis, (7.2, 2.2), (8.5, 2.2))
    _say(axis, 10.55, 3.5, "clone")
    _arrow(axis, (9.9, 3.2), (11.2, 3.2))


def _program(axis: Any) -> None:
    _say(axis, 0.1, 3.5, "FULL", ha="left", weight="bold")
    _box(axis, 1.9, 3.1, 9.7, 0.8, "one graph segment: everything, attention included", GRAPH)
    _say(axis, 0.1, 1.5, "PIECEWISE", ha="left", weight="bold")
    steps = [("segment", GRAPH), ("attention\n(eager)", EAGER)] * 2 + [("segment", GRAPH)]
    for number, (text, colour) in enumerate(steps):
        x = 1.9 + 2.0 * number
        _box(axis, x, 1.1, 1.7, 0.8, text, colour)
        if number:
            _arrow(axis, (x - 0.3, 1.5), (x, 1.5))
    _say(axis, 6.75, 2.2, "replay walks this list")
    _say(
        axis,
        6.75,
        0.55,
        "eager breaks run Python at every replay; what they return goes where the next segment reads it",
    )


def _pool(axis: Any) -> None:
    _say(axis, 6.0, 4.95, "one pool, as large as the largest size needs")
    for row, (size, width) in enumerate(((8, 9.4), (4, 4.9), (2, 2.7), (1, 1.6))):
        y = 3.9 - 0.85 * row
        _say(axis, 1.4, y + 0.3, f"graph of {size} row{'s' * (size > 1)}", ha="right")
        _box(axis, 1.6, y, 9.4, 0.6, "", PADDING, linestyle="--")
        _box(axis, 1.6, y, width, 0.6, "intermediates, outputs" if width > 2.5 else "the same", GRAPH)
    _box(axis, 1.6, 0.1, 4.5, 0.6, "static inputs, shared by all sizes", MEMORY)
    _box(axis, 6.5, 0.1, 4.5, 0.6, "weights and buffers of the module", MEMORY)
    _say(axis, 1.4, 0.4, "outside", ha="right")


def _proofs(axis: Any) -> None:
    calls = (
        ("call 1\n8 rows", "first_call", ["eager"]),
        ("call 2\n8 rows", "proof", ["capture", "eager", "replay", "compare"]),
        ("later calls\n8 rows", "", ["replay"]),
        ("call 1\n5 rows", "output_shape\n_unknown", ["eager"]),
        ("call 2\n5 rows", "proof", ["eager", "replay", "replay", "compare"]),
        ("later calls\n5 rows", "", ["replay"]),
    )
    colours = {"eager": EAGER, "capture": GRAPH, "replay": GRAPH, "compare": PLAIN}
    for number, (call, reason, steps) in enumerate(calls):
        x = 0.2 + 2.0 * number
        _say(axis, x + 0.8, 4.5, call)
        for row, step in enumerate(steps):
            _box(axis, x, 3.4 - 0.65 * row, 1.6, 0.55, step, colours[step])
        _say(axis, x + 0.8, 1.0, reason, color=OURS, family="monospace")
    _say(
        axis,
        0.2,
        0.3,
        "red: the reason that the report counts. Where there is an eager run, its answer is the caller's.\n"
        "If all calls of a model have 5 rows, two run eagerly (first_call, warmup); the third captures and is a proof",
        ha="left",
    )


DRAWINGS: dict[str, tuple[Callable[[Any], None], Sequence[float]]] = {
    "call": (_call, (13.7, 5.2)),
    "padding": (_padding, (12.8, 5.0)),
    "program": (_program, (11.9, 4.1)),
    "pool": (_pool, (11.2, 5.3)),
    "proofs": (_proofs, (12.2, 5.0)),
}
_INCH = 0.75  # of the page for one unit of a drawing


def _fill(drawing: Callable[[Any], None], size: Sequence[float], _: Any, axis: Any) -> None:
    axis.set_xlim(0, size[0])
    axis.set_ylim(0, size[1])
    axis.set_axis_off()
    drawing(axis)


def draw_one(name: str, path: Path) -> None:
    """Draw a figure."""
    drawing, size = DRAWINGS[name]
    draw(path, functools.partial(_fill, drawing, size), figsize=(size[0] * _INCH, size[1] * _INCH))


def draw_all() -> None:
    """Draw every figure again."""
    for name in DRAWINGS:
        draw_one(name, FOLDER / f"{name}.png")
