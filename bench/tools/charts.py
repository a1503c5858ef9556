"""Pictures of figures, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.tools.measure import say
from simplegraph.errors import install_command


def draw(path: Path, fill: Callable[[Any, Any], None], **layout: Any) -> None:
    """Save a picture, or say what is missing.

    Args:
        path: of the picture.
        fill: draws on the chart and its axes.
        layout: of the axes, as `pyplot.subplots` takes it.
    """
    try:
        import matplotlib
    except ImportError as error:
        say(f"no plot ({error}); to have one: {install_command('plot')}")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    chart, axes = pyplot.subplots(**layout)
    fill(chart, axes)
    chart.tight_layout()
    chart.savefig(path)
    pyplot.close(chart)
    say(f"plot: {path}")
