"""Other people's models, one row each: do graphs serve them, are the answers eager's, and what does a call cost?

``python -m bench.model_table``: every entry in a fresh process. A row runs its model eagerly over ragged batches, then
served as the entry says, and compares every answer. Columns: ``full``, every call or decode step is one graph;
``piecewise``, graphs with eager breaks; ``parts``, graphs of submodules that have a quarter of its layers at least;
``eager``, with the reason. On a GPU also the time of a call, eager and served, and that of its kernels alone, with the
limits that a row has to keep. Rows run side by side, ``--workers`` of them; while one measures times, all others are
halted.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch

from bench.model_table.entries import CATEGORIES, ENTRIES, TableEntry
from bench.model_table.row import EAGER, FAILED, FULL, MISSING, PARTS, PIECEWISE, measure_row
from bench.tools import command, fresh
from bench.tools.files import save_figures
from bench.tools.measure import NOT_SPEED, Figures, say
from bench.tools.options import add_names, count
from bench.tools.side_by_side import SideBySide
from bench.tools.tables import NOTHING, cell

AT_MOST_EAGER = 1.02  # times eager's time
AT_MOST_KERNELS = (1.15, 0.030)  # times the kernels' own time, plus so many ms
NAMES = tuple(entry.name for entry in ENTRIES)


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """The rows of a measurement.

    Attributes:
        only: names of entries or categories.
        tiny: the tiny shapes.
        seconds: that a row may take.
        workers: processes at once, beside those that wait to measure; they are dealt to the GPUs in turn.
        total: seconds after which the rows that are not done are left out.
        more: True to keep the rows that the file has, and measure the others.
        json: the file, written after every row.
    """

    only: tuple[str, ...] = CATEGORIES
    tiny: bool = False
    seconds: int = 240
    workers: int = 1
    total: int = 480
    more: bool = False
    json: Path | None = None

    def entries(self) -> list[TableEntry]:
        """List the entries that are meant, in the table's order."""
        return [entry for entry in ENTRIES if {entry.name, entry.category} & {*self.only}]


def default_plan(device: torch.device) -> TablePlan:
    """Return all entries: on a GPU at real shapes, in a few minutes; on a CPU tiny ones, however long they take."""
    return TablePlan() if device.type == "cuda" else TablePlan(tiny=True, total=24 * 3600)


def measure(plan: TablePlan, device: torch.device) -> Figures:
    """Measure every entry in a fresh process."""
    fresh.preload("bench.model_table.preloaded", device.type)
    settings = dataclasses.asdict(plan) | {"json": None}
    known = _known(plan)
    figures: Figures = {"plan": settings, "device": device.type, "rows": known}
    todo = {entry.name: entry for entry in plan.entries() if entry.name not in known}
    tasks = {name: (measure_row, (name, device.type, plan.tiny)) for name in todo}
    gpus = torch.cuda.device_count() if device.type == "cuda" else 1
    processes = SideBySide(workers=plan.workers, gpus=gpus, seconds=plan.seconds, total=plan.total)
    began = time.monotonic()
    for name, found in processes.run(tasks):
        row = _failed(found) if isinstance(found, Exception) else found
        say(f"{time.monotonic() - began:.0f} s, {name}: {row['column']}{_because(row)}{_told(row)}")
        entry = todo.pop(name)
        known[name] = {"category": entry.category, "integration": entry.integration} | row
        figures["rows"] = {name: known[name] for name in NAMES if name in known}
        if plan.json is not None:
            save_figures(plan.json, figures)
    if todo:
        say(f"{plan.total} s are over; left out: {', '.join(todo)}. The same command with --more measures them.")
    return figures


def _failed(error: Exception) -> Figures:
    if isinstance(error, fresh.ProcessFailed):
        return {"column": FAILED, "reason": error.reason, "traceback": str(error)[-2000:]}
    return {"column": FAILED, "reason": str(error)}


def _told(row: Figures) -> str:
    return f", {row['ms']:.3f} ms, {row['ms'] / row['eager_ms']:.2f} times eager" if "ms" in row else ""


def _known(plan: TablePlan) -> dict[str, Figures]:
    if not plan.more or plan.json is None or not plan.json.is_file():
        return {}
    found: dict[str, Figures] = json.loads(plan.json.read_text())["rows"]
    return found


def limits(row: Figures) -> list[str]:
    """List the limits that a row does not keep."""
    broken = []
    if row.get("answers") == "differ":
        broken.append("answers differ")
    if row.get("ms") is None:
        return broken + ([f"untimed: {row['untimed'].splitlines()[0]}"] if row.get("untimed") else [])
    if row["column"] in (FULL, PIECEWISE) and row.get("timed_eagerly"):
        broken.append("timed eagerly")
    if row["ms"] > AT_MOST_EAGER * row["eager_ms"]:
        broken.append(f"{row['ms'] / row['eager_ms']:.2f} times eager")
    factor, more = AT_MOST_KERNELS
    if row["column"] == FULL and row["ms"] > factor * row["kernel_ms"] + more:
        broken.append(f"kernels * {factor} + {(row['ms'] - factor * row['kernel_ms']) * 1e3:.0f} us")
    return broken


def failures(figures: Figures) -> list[str]:
    """List rows whose answers differ from eager's, or that crashed."""
    rows = figures["rows"].items()
    wrong = [f"{name}: {row['wrong']}" for name, row in rows if "wrong" in row]
    return wrong + [f"{name}: {row['reason']}" for name, row in rows if row["column"] == FAILED]


_TITLES = (
    "model",
    "served by",
    "runs",
    "replayed",
    "answers",
    "eager ms",
    "ms",
    "kernels ms",
    "x eager",
    "limits",
    "reason",
)


def render(figures: Figures) -> str:
    """Format the rows as a Markdown table, with shares of columns and reasons below it."""
    rows: dict[str, Figures] = figures["rows"]
    lines = [] if figures["device"] == "cuda" else [NOT_SPEED, ""]
    lines += [_line(_TITLES), _line(["---"] * len(_TITLES))]
    lines += [_line(_cells(name, row)) for name, row in rows.items()]
    return "\n".join([*lines, "", *summary(rows)])


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(name: str, row: Figures) -> list[str]:
    served = row["integration"] + (f" of {row['part']}" if "part" in row else "")
    eager = f"{row['ms'] / row['eager_ms']:.2f}" if "ms" in row else NOTHING
    kept = ("; ".join(limits(row)) or "kept") if "answers" in row else NOTHING
    replayed = f"{row['replayed']:.0%}" if "replayed" in row else NOTHING
    replayed += f" of {row['in_parts']:.0%}" if "in_parts" in row else ""
    times = [cell(row, figure, ".3f") for figure in ("eager_ms", "ms", "kernel_ms")]
    answers = row.get("answers", NOTHING)
    return [name, served, row["column"], replayed, answers, *times, eager, kept, _because(row).strip(" :")]


def _because(row: Figures) -> str:
    if "reason" not in row:
        return ""
    detail = " ".join(row.get("detail", "").split())[:120].replace("|", "/")
    return f": {row['reason']}" + (f" ({detail})" if detail else "")


def summary(rows: dict[str, Figures]) -> list[str]:
    """Count the columns among the rows that could be measured, and the reasons of those that stay eager."""
    measured = {name: row for name, row in rows.items() if row["column"] != MISSING}
    columns = collections.Counter(row["column"] for row in measured.values())
    shares = [f"{columns[column]} {column}" for column in (FULL, PIECEWISE, PARTS, EAGER, FAILED) if columns[column]]
    total = max(1, len(measured))
    served = sum(columns[column] for column in (FULL, PIECEWISE, PARTS))
    lines = [
        f"{len(measured)} of {len(rows)} rows measured: {', '.join(shares) or 'none'}.",
        f"Full {columns[FULL] / total:.0%}; with piecewise or parts {served / total:.0%}.",
        f"{sum(row.get('answers') == 'equal' for row in measured.values())} rows have eager's answers.",
    ]
    reasons = collections.Counter(row["reason"] for row in measured.values() if row["column"] == EAGER)
    for reason, number in reasons.most_common():
        names = ", ".join(name for name, row in measured.items() if row["column"] == EAGER and row["reason"] == reason)
        lines.append(f"- {number} eager, {reason}: {names}")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.model_table", description=__doc__)
    add_names(parser, "--only", (*CATEGORIES, *NAMES), "all by default; a category is all of its models")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, as on a CPU")
    parser.add_argument("--more", action="store_true", help="keep the rows that the file has, and measure the others")
    parser.add_argument("--seconds", type=count, help="that a row may take")
    parser.add_argument("--workers", type=count, help="processes at once")
    parser.add_argument("--total", type=count, help="seconds after which the rest is left out")
    command.run(parser, argv, default_plan, measure, render, failures)
