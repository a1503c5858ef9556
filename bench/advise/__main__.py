"""``python -m bench.advise``: gains that `simplegraph advise` tells of programs, beside those of following it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench.advise.programs import PROGRAMS, follow
from bench.tools import command, fresh
from bench.tools.measure import Figures
from bench.tools.options import Options, count, name_list
from bench.tools.tables import grid

ENGINE = "engine"  # bench.generate, which has graphs
_SECONDS = 120  # that measuring one program may take
TOLERANCE = 0.15  # of a gain that is told, by the one that is measured


@dataclasses.dataclass(frozen=True)
class AdvicePlan:
    """Programs to advise, and rounds of calls whose results are waited for."""

    programs: tuple[str, ...]
    rounds: int


def default_plan(device: torch.device) -> AdvicePlan:
    """Return all programs, with 200 rounds on a GPU, else 2."""
    return AdvicePlan((*PROGRAMS, ENGINE), 200 if device.type == "cuda" else 2)


def advise(name: str) -> dict[str, Any]:
    """Run a program in a process of its own, under the command, and return its report."""
    program = ["bench.advise.programs", name]
    if name == ENGINE:
        program = ["bench.generate", "--model", "tiny", "--max-tokens", "64", "--prompt", "5 17 3"]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "advice.html")
        told = [sys.executable, "-m", "simplegraph", "advise", "--report", str(report), "--", "python", "-m", *program]
        done = subprocess.run(told, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed under advise:\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(report.with_suffix(".json").read_text())
        return found


def measure(plan: AdvicePlan, device: torch.device) -> Figures:
    """Advise each program, follow the advice that is worth most, and measure that."""
    figures: Figures = {"tolerance": TOLERANCE, "programs": {}}
    for name in plan.programs:
        report = advise(name)
        row: dict[str, Any] = {"first": report["lines"][0], "lines": report["lines"]}
        first = next((one for one in report["watched"] if one["trial"] is not None), None)
        if name != ENGINE and first is not None:
            # In a process of its own, as the program ran that was advised: imports of others make eager calls slower.
            row |= fresh.call(follow, name, first["name"], device, plan.rounds, seconds=_SECONDS)
            row |= {"called": first["name"], "told": first["trial"]["gain"]}
            row["measured"] = row["plain_ms"] / row["followed_ms"]
            row["off"] = None if row["told"] is None else row["told"] / row["measured"] - 1
        figures["programs"][name] = row
    return figures


def render(figures: Figures) -> str:
    """Format a line for each program."""
    rows = [
        (
            name,
            row["first"].splitlines()[0][:90],
            _shown(row.get("told")),
            _shown(row.get("measured")),
            _shown(row.get("off")),
        )
        for name, row in figures["programs"].items()
    ]
    return grid([("program", "the first line", "told", "measured", "off by"), *rows])


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def failures(figures: Figures) -> list[str]:
    """Name the programs whose gain was told wrong by more than the tolerance."""
    rows = figures["programs"].items()
    return [f"{name}: off by {row['off']:.0%}" for name, row in rows if abs(row.get("off") or 0.0) > TOLERANCE]


OPTIONS: Options = {
    "--programs": name_list((*PROGRAMS, ENGINE), "the programs"),
    "--rounds": {"type": count, "help": "calls that a median is taken over; 200 on a GPU, else 2"},
}
main = command.of("bench.advise", __doc__, OPTIONS, default_plan, measure, render, failures)


if __name__ == "__main__":
    main()
