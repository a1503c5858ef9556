"""Other people's models, one row each: what graphs serve, whether the answers are eager's, and what a call costs.

``python -m bench.model_table``: every entry in a fresh process. A row runs its model eagerly over ragged batches, then
served as the entry says, and compares every answer. Columns: ``full``, every call or decode step is one graph;
``piecewise``, graphs with eager breaks; ``parts``, graphs of submodules that have a quarter of its layers at least;
``eager``, with the reason. On a GPU also the time of a call, eager and served, and that of its kernels alone, with the
limits that a row has to keep. Rows run side by side, ``--workers`` of them; while one measures times, all others are
halted. Rows that failed or broke a limit, as they may for want of memory, are tried once more at the end, beside fewer
others.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from bench.model_table.entries import CATEGORIES, ENTRIES, TableEntry
from bench.model_table.row import BY_NAME, EAGER, FAILED, FULL, MISSING, PARTS, PIECEWISE, measure_row
from bench.model_table.times import AT_MOST_KERNELS, within_kernels
from bench.tools import command, fresh
from bench.tools.environment import commit
from bench.tools.files import known_rows, save_figures
from bench.tools.measure import Figures, say
from bench.tools.options import Options, count, name_list
from bench.tools.side_by_side import SideBySide
from bench.tools.tables import NOTHING, cell

# Imported before processes are forked, as far as they are installed.
PRELOADED = (
    "bench.model_table.row",
    "bench.model_table.builders.sequences",
    "simplegraph.integrations.transformers.generate.generation",
    "simplegraph.integrations.transformers.encoding",
    "timm",
)
AT_MOST_EAGER = 1.02  # times eager's time
AGAIN = 4  # times fewer processes at once when rows are tried again
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
        more: True to keep the rows that the file has, and measure the others, and again what failed or broke a limit.
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
    fresh.preload(device.type, *PRELOADED)
    return _Measurement(plan, device).run()


class _Measurement:
    """Measures the rows of a plan, and keeps the file up to date."""

    def __init__(self, plan: TablePlan, device: torch.device) -> None:
        self._plan, self._device, self._began = plan, device, time.monotonic()
        self._known = known_rows(plan.json) if plan.more else {}
        self._todo = {each.name: each for each in plan.entries() if _shortcomings(self._known.get(each.name))}
        settings = dataclasses.asdict(plan) | {"json": None}
        self.figures: Figures = {"plan": settings, "device": device.type, "rows": self._known}

    def run(self) -> Figures:
        todo = self._todo
        self._measure(self._plan.workers)
        if self._device.type == "cuda" and not self._todo:
            self._todo = {name: entry for name, entry in todo.items() if _shortcomings(self._known[name])}
            self._measure(max(1, self._plan.workers // AGAIN))
        if self._todo:
            left_out = ", ".join(self._todo)
            say(f"{self._plan.total} s are over; left out: {left_out}. The same command with --more measures them.")
        return self.figures

    def _measure(self, workers: int) -> None:
        """Measure what is to do, so many at once, until the time is over."""
        tasks = {name: (measure_row, (name, self._device.type, self._plan.tiny)) for name in self._todo}
        gpus = torch.cuda.device_count() if self._device.type == "cuda" else 1
        left = self._plan.total - self._seconds()
        for name, found in SideBySide(workers=workers, gpus=gpus, seconds=self._plan.seconds, total=left).run(tasks):
            row = _failed(found) if isinstance(found, Exception) else found
            say(f"{self._seconds():.0f} s, {name}: {row['column']}{_because(row)}{_times(row)}")
            self._todo = {other: entry for other, entry in self._todo.items() if other != name}
            entry = BY_NAME[name]
            self._keep(
                name, {"category": entry.category, "integration": entry.integration, "commit": commit()[:7]} | row
            )

    def _keep(self, name: str, row: Figures) -> None:
        """Keep the row, unless an earlier try was a better one."""
        self._known[name] = min(row, self._known.get(name, row), key=_shortcomings)
        self.figures["rows"] = {each: self._known[each] for each in NAMES if each in self._known}
        save_figures(self._plan.json, self.figures)

    def _seconds(self) -> float:
        return time.monotonic() - self._began


def _shortcomings(row: Figures | None) -> int:
    """Return how far a row is from what it has to show: none kept, failed, untimed or starved, limits not kept."""
    if row is None:
        return 1000
    if row["column"] == FAILED:
        return 100
    if "out of memory" in f"{row.get('untimed')} {row.get('detail')}":
        return 10
    return len(limits(row))


def _failed(error: Exception) -> Figures:
    if isinstance(error, fresh.ProcessFailed):
        return {"column": FAILED, "reason": error.reason, "traceback": str(error)[-2000:]}
    return {"column": FAILED, "reason": str(error)}


def _times(row: Figures) -> str:
    return f", {row['ms']:.3f} ms, {row['ms'] / row['eager_ms']:.2f} times eager" if "ms" in row else ""


def limits(row: Figures) -> list[str]:
    """List the limits that a row does not keep."""
    broken = []
    if row.get("answers") == "differ":
        broken.append("answers differ")
    if row.get("ms") is None:
        return broken + ([f"untimed: {row['untimed'].splitlines()[0]}"] if row.get("untimed") else [])
    if row["ms"] > AT_MOST_EAGER * row["eager_ms"]:
        broken.append(f"{row['ms'] / row['eager_ms']:.2f} times eager")
    factor, _ = AT_MOST_KERNELS
    replayed = row.get("encoder", row)  # of a sentence encoder, the call below its own Python
    if row["column"] == FULL and not within_kernels(replayed):
        broken.append(f"kernels * {factor} + {(replayed['ms'] - factor * replayed['kernel_ms']) * 1e3:.0f} us")
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
    lines = [_line(_TITLES), _line(["---"] * len(_TITLES))]
    lines += [_line(_cells(name, row)) for name, row in rows.items()]
    return "\n".join([*lines, "", *summary(rows)])


def _line(cells: Any) -> str:
    return "| " + " | ".join(cells) + " |"


def _cells(name: str, row: Figures) -> list[str]:
    served = row["integration"] + (f" of {row['part']}" if "part" in row else "")
    served += f", {row['tokens_per_launch']} tokens a launch" if "tokens_per_launch" in row else ""
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


OPTIONS: Options = {
    "--only": name_list((*CATEGORIES, *NAMES), "all by default; a category is all of its models"),
    "--tiny": {"action": "store_true", "help": "tiny shapes, as on a CPU"},
    "--more": {"action": "store_true", "help": "keep the file's good rows, measure all others"},
    "--seconds": {"type": count, "help": "that a row may take"},
    "--workers": {"type": count, "help": "processes at once"},
    "--total": {"type": count, "help": "seconds after which the rest is left out"},
}
main = command.of("bench.model_table", __doc__, OPTIONS, default_plan, measure, render, failures)
