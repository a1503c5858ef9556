"""``python -m bench.advise``: gains that `simplegraph advise` tells of programs, beside those of following it."""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from bench.advise.programs import PROGRAMS, follow
from bench.tools import command, fresh
from bench.tools.measure import Figures, say
from bench.tools.options import Options, count, name_list
from bench.tools.tables import grid

ENGINE = "engine"  # bench.generate, which has graphs
_SECONDS = 120  # that measuring one program may take
_REPEATING = 210  # seconds after which nothing is repeated, as far as can be foreseen
TOLERANCE = 0.15  # of a gain that is told, by the one that is measured


@dataclasses.dataclass(frozen=True)
class AdvicePlan:
    """Programs to advise, rounds of calls whose results are waited for, and how often all that is repeated."""

    programs: tuple[str, ...]
    rounds: int
    repeats: int = 1


def default_plan(device: torch.device) -> AdvicePlan:
    """Return all programs, with 1000 rounds and 3 repeats on a GPU, else 2 and 1."""
    return AdvicePlan((*PROGRAMS, ENGINE), *((1000, 3) if device.type == "cuda" else (2, 1)))


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
    """Advise each program, follow the advice that is worth most, and measure that; then all again, as time allows."""
    rows: dict[str, dict[str, Any]] = {}
    began, longest = time.perf_counter(), dict.fromkeys(plan.programs, 0.0)
    for repeat in range(plan.repeats):
        for name in plan.programs:
            started = time.perf_counter()
            if repeat and ("called" not in rows[name] or started + longest[name] > began + _REPEATING):
                continue
            report = advise(name)
            row = rows.setdefault(name, {"first": report["lines"][0], "lines": report["lines"], "runs": []})
            tried = [one for one in report["watched"] if one["trial"] is not None]
            if name != ENGINE and tried:
                called = row.setdefault("called", tried[0]["name"])
                trials = [one["trial"] for one in tried if one["name"] == called]
                row["runs"] += [_run(name, called, trial, plan, device) for trial in trials[:1]]
                row |= _medians(row["runs"])
            took = time.perf_counter() - started
            longest[name] = max(longest[name], took)
            say(f"{name}, {took:.0f} s: {json.dumps(row['runs'][-1]) if row['runs'] else row['first']}")
    return {"tolerance": TOLERANCE, "programs": rows}


def _run(name: str, called: str, trial: dict[str, Any], plan: AdvicePlan, device: torch.device) -> dict[str, Any]:
    """Follow an advice in a process of its own, as the program ran: imports of others make eager calls slower."""
    followed = fresh.call(follow, name, called, device, plan.rounds, seconds=_SECONDS)
    told = {"told": trial["gain"], "eager_ms": trial["eager_ms"], "graph_ms": trial["graph_ms"]}
    return told | followed | {"measured": followed["plain_ms"] / followed["followed_ms"]}


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure, None if no run has it, and by how much the gain was told wrong."""
    found = {key: [run[key] for run in runs if run[key] is not None] for key in runs[0]}
    row: dict[str, Any] = {key: statistics.median(values) if values else None for key, values in found.items()}
    return row | {"off": None if row["told"] is None else row["told"] / row["measured"] - 1}


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
    "--rounds": {"type": count, "help": "timed calls of each, as far as they fit into seconds; 1000 on a GPU, else 2"},
    "--repeats": {"type": count, "help": f"of all that, at most, within {_REPEATING} s; 3 on a GPU, else 1"},
}
main = command.of("bench.advise", __doc__, OPTIONS, default_plan, measure, render, failures)


if __name__ == "__main__":
    main()
