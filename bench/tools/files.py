"""Paths of the benchmarks' files, and writing of figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench.tools import environment
from bench.tools.measure import say

BENCH = Path(__file__).parents[1]
DATA, OUT = BENCH / "data", BENCH / "out"


def save_figures(path: Path | str | None, figures: dict[str, Any], machine: dict[str, Any] | None = None) -> None:
    """Write figures and what they were measured with as JSON; the folder is created if it is missing.

    Args:
        path: of the file; None to write nothing.
        figures: ready for JSON.
        machine: from `environment.describe` in a process that measured; by default this process describes it.
    """
    if path is None:
        return
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    described = {"machine_info": machine or environment.describe()}
    path.write_text(json.dumps(described | figures, indent=2))
    if path not in _said:  # once, however often a benchmark writes what it has
        _said.add(path)
        say(f"figures: {path}")


_said: set[Path] = set()


def known_rows(path: Path | None) -> dict[str, Any]:
    """Return the rows of a file of figures, with which a benchmark goes on; none if there is no file."""
    return json.loads(path.read_text())["rows"] if path is not None and path.is_file() else {}
