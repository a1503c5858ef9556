"""Measures optimized modules with graphs beside the compiler: a call, the first call, the error, the kernels.

``python -m bench.optimized``: every model and batch in a fresh process, all arms in it. ``eager``; ``graph``, the
module as it is in a graph; ``optimized``, after ``simplegraph.optimize``; ``optimized-static``, which does not copy
its answers, as the arms of others do not; graphs of ``make_graphed_callables`` and of tensordict; ``compiled``,
``torch.compile(mode="reduce-overhead")``; ``compiled-default``, only if ``--arms`` names it. Weights are random, in
bfloat16 on a GPU. Processes prepare side by side, ``--at-once`` of them. One at a time makes the first calls of an arm,
and they are timed one after the other when all of those are ready.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from pathlib import Path

import torch

from bench.optimized.one_row import ARMS, COMPILED, DEFAULT, EAGER, GRAPH, OPTIMIZED, run_row
from bench.optimized.shapes import available
from bench.tools import command, environment, fresh
from bench.tools.files import known_rows, save_figures
from bench.tools.measure import Figures, say
from bench.tools.options import add_names, count, numbers
from bench.tools.tables import cell, grid, in_line, ratio
from bench.tools.turns import side_by_side

LONGER = 1.2  # times the compiler's; above it, a row's kernels are printed
EXACT = 1.5  # times eager's error against float64
_SHOWN = 12  # kernels of an arm


@dataclasses.dataclass(frozen=True)
class OptimizedPlan:
    """The rows of a measurement.

    Attributes:
        models: of `MODELS`; batches: rows of their calls; arms: of `ARMS`.
        tiny: the models' tiny shapes.
        at_once: processes that prepare side by side.
        timeout: seconds that a process may take.
        total: seconds after which no other process starts.
        more: True to keep the rows that the file has, and measure the others.
        json: the file, written whenever rows are done.
    """

    models: tuple[str, ...]
    batches: tuple[int, ...] = (1, 8)
    arms: tuple[str, ...] = tuple(arm for arm in ARMS if arm != DEFAULT)
    tiny: bool = False
    at_once: int = 4
    timeout: int = 300
    total: int = 420
    more: bool = False
    json: Path | None = None


def default_plan(device: torch.device) -> OptimizedPlan:
    """Return the installed models, at real shapes on a GPU, tiny ones on a CPU."""
    return OptimizedPlan(tuple(available()), tiny=device.type != "cuda")


def row_name(model: str, batch: int) -> str:
    """Return the name of a row."""
    return f"{model} {batch}"


def measure(plan: OptimizedPlan, device: torch.device) -> Figures:
    """Measure every model and batch in a fresh process."""
    fresh.preload("bench.optimized.preloaded", device.type)
    rows: dict[str, Figures] = known_rows(plan.json) if plan.more else {}
    figures: Figures = {"plan": dataclasses.asdict(plan) | {"json": None}, "device": device.type, "rows": rows}
    described, began = environment.describe(), time.monotonic()
    todo = [pair for pair in itertools.product(plan.models, plan.batches) if row_name(*pair) not in rows]
    while todo and time.monotonic() - began < plan.total:
        some, todo = todo[: plan.at_once], todo[plan.at_once :]
        tasks = {pair: (run_row, (*pair, plan.arms, device, plan.tiny)) for pair in some}
        for pair, found in side_by_side(tasks, plan.timeout).items():
            say(f"{row_name(*pair)}: {_in_a_line(found)}")
            if "failed" not in found:  # such a row is measured again by --more
                rows[row_name(*pair)] = found
            else:
                figures.setdefault("failed", {})[row_name(*pair)] = found["failed"]
        say(f"{time.monotonic() - began:.0f} s; {len(todo)} rows are left")
        if plan.json is not None:
            save_figures(plan.json, figures, described)
    if todo:
        names = ", ".join(row_name(*pair) for pair in todo)
        say(f"{plan.total} s are over; left out: {names}. The same command with --more measures them.")
    return figures


def _in_a_line(found: Figures) -> str:
    if "failed" in found:
        return "failed: " + found["failed"].strip().splitlines()[-1]
    arms = found["arms"].items()
    ms = in_line({arm: each["ms"] for arm, each in arms if "ms" in each}, ".3f", "ms")
    return ms + "; first " + in_line({arm: each["first_seconds"] for arm, each in arms if "ms" in each}, ".2f", "s")


def failures(figures: Figures) -> list[str]:
    """List rows that failed, and those of ours that are not exact enough."""
    failed = {name: why for name, why in figures.get("failed", {}).items() if name not in figures["rows"]}
    return [f"{name}:\n{why}" for name, why in failed.items()] + [
        f"{name}: {arm}'s error against float64 is {each['error']:.2e}, eager's {row['arms'][EAGER]['error']:.2e}"
        for name, row in figures["rows"].items()
        for arm, each in row["arms"].items()
        if ARMS[arm].ours and EAGER in row["arms"] and each["error"] > EXACT * row["arms"][EAGER]["error"] + _steps(row)
    ]


def _steps(row: Figures) -> float:
    """Return what a few outputs may differ by: two steps of their dtype, as `optimize` allows itself."""
    return float(2 * torch.finfo(getattr(torch, row["dtype"])).eps)


def render(figures: Figures) -> str:
    """Format the rows, a summary, and the kernels of rows above `LONGER`."""
    lines: list[str] = []
    rows: dict[str, Figures] = figures["rows"]
    used = [arm for arm in ARMS if any(arm in row["arms"] for row in rows.values())]
    titles = ["ms a call", *used, "x compiled", "x graph", "first s", "compiled's", "sooner", "error", "eager's"]
    table = [titles, *([name, *_cells(row["arms"], used)] for name, row in rows.items())]
    lines += [grid(table), "", *summary(rows)]
    for name, row in rows.items():
        if (_ratio(row) or 0.0) > LONGER:
            lines += ["", f"{name}: kernels, how often, us", *_kernels(row["arms"], OPTIMIZED, COMPILED)]
    return "\n".join(lines)


def _cells(arms: dict[str, Figures], used: list[str]) -> list[str]:
    ours, theirs = arms.get(OPTIMIZED, {}), arms.get(COMPILED, {})
    return [
        *(cell(arms.get(arm, {}), "ms", ".3f") for arm in used),
        ratio(ours, theirs, "ms", ".2f"),
        ratio(ours, arms.get(GRAPH, {}), "ms", ".2f"),
        cell(ours, "first_seconds", ".2f"),
        cell(theirs, "first_seconds", ".1f"),
        ratio(theirs, ours, "first_seconds", ".1f"),
        cell(ours, "error", ".1e"),
        cell(arms.get(EAGER, {}), "error", ".1e"),
    ]


def _ratio(row: Figures) -> float | None:
    ours, theirs = row["arms"].get(OPTIMIZED, {}), row["arms"].get(COMPILED, {})
    return ours["ms"] / theirs["ms"] if "ms" in ours and "ms" in theirs else None


def _kernels(arms: dict[str, Figures], *names: str) -> list[str]:
    found = []
    for arm in names:
        listed = arms[arm].get("kernels", [])
        total, often = sum(us for _, _, us in listed), sum(count for _, count, _ in listed)
        found.append(f"  {arm}: {often:.0f} kernels, {total:.0f} us")
        found += [f"    {us:9.1f}  x {count:<6g} {name[:100]}" for name, count, us in listed[:_SHOWN]]
    return found


def summary(rows: dict[str, Figures]) -> list[str]:
    """Compare all rows with the compiler's."""
    ratios = {name: found for name, row in rows.items() if (found := _ratio(row)) is not None}
    if not ratios:
        return ["nothing was compiled, so there is nothing to compare with"]
    arms = [rows[name]["arms"] for name in ratios]
    first = min(each[COMPILED]["first_seconds"] / each[OPTIMIZED]["first_seconds"] for each in arms)
    mean = statistics.geometric_mean(ratios.values())
    return [
        f"geometric mean of {len(ratios)} rows {mean:.3f} times the compiler's",
        f"first call sooner: {first:.1f} times at least",
    ]


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.optimized", description=__doc__)
    add_names(parser, "--models", available(), "all that are installed by default")
    parser.add_argument("--batches", type=numbers, help="rows of the calls; 1,8 by default")
    add_names(parser, "--arms", ARMS, f"all but {DEFAULT} by default")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, as on a CPU")
    parser.add_argument("--more", action="store_true", help="keep the rows that the file has, and measure the others")
    parser.add_argument("--at-once", type=count, help="processes that prepare side by side")
    parser.add_argument("--timeout", type=count, help="seconds that a process may take")
    parser.add_argument("--total", type=count, help="seconds after which no other process starts")
    command.run(parser, argv, default_plan, measure, render, failures)
