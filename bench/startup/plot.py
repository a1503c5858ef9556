"""The comparison as a picture; needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from bench.startup.report import EMULATED, MIB, heading
from bench.startup.runs import Result, figure

INCHES_PER_RUN = 0.45
SIZE = (10.0, 2.0)


def save(results: dict[str, Result], path: Path) -> None:
    """Draw seconds until every size is ready, and the memory kept where it was measured.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {label: result for label, result in results.items() if result["status"] == "ok"}
    panels = {"seconds until every size is ready": {k: figure(r, "seconds", "ready") for k, r in drawn.items()}}
    memory = {label: figure(result, "device_bytes") for label, result in drawn.items()}
    if any(value is not None for value in memory.values()):
        panels["MiB kept after the start"] = {k: v / MIB for k, v in memory.items() if v is not None}
    size = (SIZE[0], SIZE[1] + INCHES_PER_RUN * len(drawn))
    chart, axes = pyplot.subplots(1, len(panels), figsize=size, squeeze=False)
    for axis, (title, values) in zip(axes[0], panels.items(), strict=True):
        _bars(axis, title, values)
    emulated = any(result.get("device") == "cpu" for result in results.values())
    chart.suptitle(heading(results) + (f"\n{EMULATED}" if emulated else ""), fontsize="small")
    chart.tight_layout()
    chart.savefig(path)
    pyplot.close(chart)


def _bars(axis: object, title: str, values: dict[str, float]) -> None:
    """One bar per run, on a logarithmic scale, its value beside it."""
    labels = list(values)[::-1]
    bars = axis.barh(labels, [values[label] for label in labels])  # type: ignore[attr-defined]
    axis.bar_label(bars, fmt="%.3g", padding=3)  # type: ignore[attr-defined]
    axis.set_xscale("log")  # type: ignore[attr-defined]
    axis.margins(x=0.15)  # type: ignore[attr-defined]
    axis.set_title(title)  # type: ignore[attr-defined]
