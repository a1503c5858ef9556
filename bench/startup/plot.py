"""Plots the comparison; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.startup.results import Result, figure
from bench.startup.table import EMULATED
from bench.tools.charts import bars, dots, draw
from bench.tools.tables import MIB, heading

INCHES_PER_RUN = 0.45
SIZE = (10.0, 2.0)


def save(results: dict[str, Result], path: Path) -> None:
    """Draw the seconds until every size is ready, and the memory kept if it was measured."""
    drawn = {label: result for label, result in results.items() if result["status"] == "ok"}
    panels = {"seconds until every size is ready": {k: figure(r, "seconds", "ready") for k, r in drawn.items()}}
    memory = {label: figure(result, "device_bytes") for label, result in drawn.items()}
    if any(value is not None for value in memory.values()):
        panels["MiB kept after the start"] = {k: v / MIB for k, v in memory.items() if v is not None}
    emulated = any(result.get("device") == "cpu" for result in results.values())

    def fill(chart: Any, axes: Any) -> None:
        for axis, (title, values) in zip(axes[0], panels.items(), strict=True):
            if "seconds" in title:
                dots(axis, title, values)
            else:
                bars(axis, title, values, "%.0f")
        chart.suptitle(heading(results) + (f"\n{EMULATED}" if emulated else ""), fontsize="small")

    size = (SIZE[0], SIZE[1] + INCHES_PER_RUN * len(drawn))
    draw(path, fill, ncols=len(panels), figsize=size, squeeze=False)
