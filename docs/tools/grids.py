"""Lays out tables of pages, and cells that several of them have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

BATCHES = ("1", "8", "64", "256")


def grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table; the first column is text, the others figures."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def step_cells(result: Any, batches: Sequence[str] = BATCHES) -> list[str]:
    """Return the milliseconds of a step at each batch size."""
    return [f"{result['step_ms'][batch]:.2f}" for batch in batches]


def seconds_cell(result: Any, *path: str, digits: int = 2) -> str:
    """Return the seconds that lie under these names; "" if there are none."""
    for key in path:
        result = result.get(key, {})
    return f"{result:.{digits}f}" if isinstance(result, float) else ""
