"""Tables of models that several GPUs run together."""

from __future__ import annotations

from collections.abc import Sequence

from docs.tools.grids import grid, seconds_cell, step_cells
from docs.tools.raw import load


def _parallel(*files: str, order: Sequence[str], first: bool = False) -> str:
    """Return the arms of these files in an order."""
    runs = {name: run for file in files for name, run in load(file)["results"].items()}
    rows = []
    for name in order:
        run = runs[name]
        times = [seconds_cell(run, "seconds", "first_output")] if first else []
        times += [seconds_cell(run, "seconds", "ready"), seconds_cell(run, "primed", "seconds", "ready")]
        rows.append([name, *times, *step_cells(run)])
    head = ["arm", *(["first output, s"] if first else []), "every size ready, s", "the same again in the process, s"]
    return grid([*head, "step, ms, at batch 1", "8", "64", "256"], rows)


def two_gpus() -> str:
    """Return seconds and steps of a model on two GPUs, by arm."""
    compiled = ("compiled-piecewise (cold)", "compiled-piecewise (warm)")
    order = ("eager", "plain-loop", "simplegraph", "simplegraph-piecewise", *compiled)
    return _parallel("h200x2_tp2", "h200x2_tp2_compiled", order=order)


def four_gpus() -> str:
    """Return those of a 70 B shape on four GPUs."""
    order = ("eager", "simplegraph", "compiled-piecewise (cold)", "compiled-piecewise (warm)")
    return _parallel("h200x4_tp4_70b", "h200x4_tp4_70b_compiled", order=order, first=True)


def eight_gpus() -> str:
    """Return those of a 70 B shape on eight GPUs."""
    order = ("plain-loop", "simplegraph", "compiled-piecewise (cold)")
    return _parallel("h200x8_tp8_70b", "h200x8_tp8_70b_compiled", order=order, first=True)


def eight_gpus_parts() -> str:
    """Return where the seconds go until all sizes are ready on eight GPUs."""
    runs = load("h200x8_tp8_70b")["results"]
    columns = [one for name in ("plain-loop", "simplegraph") for one in (runs[name], runs[name]["primed"])]
    found = [(run["seconds"]["ready"], run["details"]["parts_s"]) for run in columns]
    names = {
        "NCCL's communicators": ("communicators",),
        "the first warmup; of the plain loop with NCCL's communicators": ("first warmup", "warmup"),
        "the other 50 warmups": ("warmups",),
        "51 captures": ("capture", "captures"),
        "waiting for the driver to instantiate the last graphs": ("instantiate",),
        "meetings of the ranks, waiting for the slowest included": ("meetings",),
    }
    rows = []
    for text, keys in names.items():
        cells = [[parts[key] for key in keys if key in parts] for _, parts in found]
        rows.append([text, *(f"{sum(cell):.2f}" if cell else "" for cell in cells)])
    rows.append(["everything else", *(f"{ready - sum(parts.values()):.2f}" for ready, parts in found)])
    rows.append(["every size ready", *(f"{ready:.2f}" for ready, _ in found)])
    return grid(["seconds on rank 0", "plain loop", "again", "simplegraph", "again"], rows)


def dtensor() -> str:
    """Return steps on plain tensors and on DTensors."""
    runs = load("h200x2_dtensor")["results"]
    names = {"simplegraph": "plain tensors", "simplegraph-dtensor": "DTensors"}
    rows = [[text, *step_cells(runs[key])] for key, text in names.items()]
    pairs = zip(*(runs[key]["step_ms"].values() for key in reversed(names)), strict=True)
    rows.append(["ratio", *(f"{one / other:.2f}" for one, other in pairs)])
    return grid(["step in a graph, ms", "batch 1", "8", "64", "256"], rows)


def consensus() -> str:
    """Return the microseconds that ranks take to agree on a step."""
    rows = [
        [ranks, f"{us['median_us']:.1f}", f"{us['p99_us']:.1f}"]
        for ranks, us in load("h200x4_consensus")["results"].items()
    ]
    return grid(["ranks", "median, us", "99th percentile, us"], rows)


def two_batch() -> str:
    """Return milliseconds of steps as a whole and as two micro-batches."""
    found = load("h100x2_two_batch")["results"]
    rows = []
    for each in found["steps"]:
        times = [f"{each['ms'][arm]:.2f}" for arm in ("whole", "halves")]
        rows.append([str(each["requests"]), str(each["tokens"]), *times, f"{each['gain']:+.1%}"])
    return grid(["requests", "tokens", "whole, ms", "in halves, ms", "gain"], rows)
