"""Writes what the table of other people's models says: on a GPU if it was measured there, else on the emulator."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Sequence
from typing import Any

from bench.model_table.entries import CATEGORIES
from bench.model_table.row import EAGER, FULL, MISSING, PARTS, PIECEWISE
from bench.model_table.table import AT_MOST_EAGER, limits
from bench.model_table.times import AT_MOST_KERNELS
from docs.tools.grids import grid
from docs.tools.raw import RESULTS, commit, load

Row = dict[str, Any]
TOLD = 90  # characters of a reason
_FILES = ("h200_model_table", "emulator_model_table")


def _file() -> str:
    return next(name for name in _FILES if (RESULTS / f"{name}.json").is_file())


@functools.cache
def rows() -> dict[str, Row]:
    """Return the rows by the name of their model."""
    found: dict[str, Row] = load(_file())["rows"]
    return found


def summary() -> str:
    """Say where it was measured, how many rows run how, and which limits are not kept."""
    name, measured = _file(), _measured(rows().values())
    where = "one NVIDIA H200, real shapes" if name.startswith("h200") else "the emulator, tiny shapes: no times"
    full, served = (_count(measured, *columns) for columns in ([FULL], [FULL, PIECEWISE, PARTS]))
    equal = sum(row.get("answers") == "equal" for row in measured)
    compared = sum("answers" in row for row in measured)
    total = len(measured)
    said = [
        f"`{name}.json`, commit {commit(name)}, on {where}. Of {len(rows())} models {total} could be measured: {full} "
        f"({full / total:.0%}) run as full graphs, {served} ({served / total:.0%}) with those that run in parts. "
        f"Of {compared} that could be compared {equal} have eager's answers."
    ]
    timed = [row for row in measured if "ms" in row]
    if timed:
        factor, more = AT_MOST_KERNELS
        kept = sum(not limits(row) for row in timed)
        said.append(
            f"Of {len(timed)} with times, {kept} keep the limits: no slower than {AT_MOST_EAGER:g} times eager, and a "
            f"replay at most {factor:g} times its kernels' own time and {more * 1e3:.0f} us. "
            "Rows that failed or broke a limit were measured once more, beside fewer others."
        )
    return "\n\n".join(said)


def all_rows() -> str:
    """List every model: how it runs, its times, and why it is not full or keeps no limit."""
    return grid(
        [
            "model",
            "served by",
            "runs",
            "eager, ms",
            "graphs, ms",
            "their kernels, ms",
            "times faster",
            "because",
            "commit",
        ],
        [_cells(name, row) for name, row in rows().items()],
    )


def names() -> str:
    """List the models by what serves them, each with how many times faster than eager it runs, or why not."""
    served: dict[tuple[str, str], list[str]] = {}
    for category in CATEGORIES:
        for name, row in rows().items():
            if row["category"] == category:
                models = served.setdefault((category, _served(row)), [])
                models.append(f"{name.removeprefix(f'{category}/')} ({_said(row)})")
    lines = [[*way, ", ".join(models)] for way, models in served.items()]
    return grid(["from", "served by", "models"], lines).replace("---:", "---")  # words, not numbers


def _said(row: Row) -> str:
    runs = "" if row["column"] == FULL else row["column"]
    return ", ".join(filter(None, [_faster(row), runs, _because(row)]))


def _cells(name: str, row: Row) -> list[str]:
    times = [f"{row[figure]:.3f}" if "ms" in row else "" for figure in ("eager_ms", "ms", "kernel_ms")]
    runs = row["column"] + (f", {row['in_parts']:.0%} of its layers" if "in_parts" in row else "")
    return [name, _served(row), runs, *times, _faster(row), _because(row), row["commit"]]


def _served(row: Row) -> str:
    served = f"`{row['integration']}`" + (f" of `{row['part']}`" if "part" in row else "")
    if row["category"] == "sentence-transformers":
        served = "`graph_encoder`"
    return served + (f", `tokens_per_launch={row['tokens_per_launch']}`" if "tokens_per_launch" in row else "")


def _faster(row: Row) -> str:
    return f"{row['eager_ms'] / row['ms']:.1f}" if "ms" in row and row["column"] != EAGER else ""


def _because(row: Row) -> str:
    said = [] if row["column"] == FULL else [row.get("reason", "").splitlines()[0]] if row.get("reason") else []
    return textwrap.shorten("; ".join([*said, *_broken(row)]), TOLD, placeholder=" ...").replace("|", "/")


def _broken(row: Row) -> list[str]:
    return limits(row) if "answers" in row else []


def _measured(found: Any) -> list[Row]:
    return [row for row in found if row["column"] != MISSING]


def _count(found: Sequence[Row], *columns: str) -> int:
    return sum(row["column"] in columns for row in found)
