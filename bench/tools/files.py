"""Paths of the benchmarks' files, and writing of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.tools.measure import say

BENCH = Path(__file__).parents[1]
DATA, OUT = BENCH / "data", BENCH / "out"


def save_figures(path: Path | str, figures: dict[str, Any]) -> None:
    """Write figures as JSON; the folder is created if it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2))
    say(f"figures: {path}")
