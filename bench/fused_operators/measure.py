"""Measures every library in a fresh process whose compile caches are empty."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.fused_operators.libraries import LIBRARIES, TINY, Call, Maker, Shapes, inputs
from bench.startup.processes import cache_environment, run_worker
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, Figures, device_of, say, seconds, step_milliseconds
from bench.tools.options import add_json, add_names, numbers
from bench.tools.tables import grid
from simplegraph.fused.choice import operators_for

ROWS = (1, 8, 64, 256)
CALLS = 50  # in one graph
TIMEOUT = 240.0
THREADED = "simplegraph-threads"


def measure(libraries: Sequence[str], rows: Sequence[int], *, cold_flashinfer: bool) -> list[Figures]:
    """Measure each library in a process of its own; one that fails has its error in place of figures."""
    found = []
    for library in libraries:
        with tempfile.TemporaryDirectory() as folder:
            variables = cache_environment(Path(folder))
            if cold_flashinfer:
                variables["FLASHINFER_WORKSPACE_BASE"] = folder
            line = [sys.executable, "-m", "bench.fused_operators", "--library", library]
            line += ["--rows", ",".join(map(str, rows))]
            try:
                found.append(run_worker(line, variables, TIMEOUT))
            except RuntimeError as error:
                found.append({"library": library, "failed": str(error)})
        say(f"{library}: {json.dumps(found[-1])}")
    return found


def measure_here(library: str, rows: Sequence[int], device: torch.device) -> Figures:
    """Measure a library in this process."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = Shapes() if device.type == "cuda" else TINY
    torch.zeros(1, device=device)
    if library == THREADED:
        return {"library": library, "ready_s": _in_threads(shapes, device, dtype)}
    figures: Figures = {"library": library, "operators": {}, "ready_s": 0.0}
    largest = inputs(shapes, max(rows), device, dtype)
    for name, given in largest.items():
        make = LIBRARIES[library].get(name)
        if make is None:
            figures["operators"][name] = {"missing": f"{library} has no such operator"}
            continue
        try:
            first = seconds(lambda make=make, given=given: make(given, shapes)(), device)
            given = {count: inputs(shapes, count, device, dtype)[name] for count in rows}
            times = {count: _microseconds(make(each, shapes), device) for count, each in given.items()}
        except Exception as error:
            figures["operators"][name] = {"missing": f"{type(error).__name__}: {error}"}
            continue
        error = _error(make, name, shapes, device, dtype)
        figures["operators"][name] = {"first_s": first, "us": times} | error
        figures["ready_s"] += first
        shown = {count: round(taken, 2) for count, taken in times.items()}
        say(f"{library} {name}: first {first:.3f} s, us {shown} {error}")
    return figures


def _in_threads(shapes: Shapes, device: torch.device, dtype: torch.dtype) -> float:
    """Return the seconds until all kernels are ready if they are tried at once, Triton's start included."""
    started = time.perf_counter()
    ready = operators_for(device, dtype, list(shapes.trials().values())).triton
    taken = time.perf_counter() - started
    if not ready and device.type == "cuda":
        raise RuntimeError("a kernel did not pass its trial")
    return taken


def _microseconds(call: Call, device: torch.device) -> float:
    """Return the time of a call among others in one graph; on a CPU, of a call."""
    if device.type != "cuda":
        return step_milliseconds(call, device) * 1e3
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    return step_milliseconds(graph.replay, device) * 1e3 / CALLS


def _error(make: Maker, name: str, shapes: Shapes, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """Return the relative error against float64 of operators that return what they compute."""
    given = inputs(shapes, 8, device, dtype)[name]
    found = make(given, shapes)()
    if found is None:
        return {}
    found = found[0] if isinstance(found, tuple) else found
    wide = {key: value.double() if torch.is_tensor(value) else value for key, value in given.items()}
    exact = LIBRARIES["torch"][name](wide, shapes)()
    exact = exact[0] if isinstance(exact, tuple) else exact
    if not torch.is_tensor(found) or found.shape != exact.shape:
        return {}
    return {"error": float((found.double() - exact).norm() / exact.norm())}


def render(figures: Sequence[Figures]) -> str:
    """Format the first uses, and a line for each library and operator: first use in s, us by rows, error."""
    lines = [("library", "operator", "first s", *(f"us, {count} rows" for count in _rows(figures)), "error")]
    empty = [""] * (len(_rows(figures)) + 1)
    for found in figures:
        if "operators" not in found:
            lines.append(
                (found["library"], found.get("failed", "all"), *_ready(found), *[""] * len(_rows(figures)), "")
            )
            continue
        for name, each in found["operators"].items():
            if "missing" in each:
                continue
            times = [f"{each['us'][key]:.2f}" for key in each["us"]]
            error = f"{each['error']:.1e}" if "error" in each else ""
            lines.append((found["library"], name, f"{each['first_s']:.2f}", *times, error))
        lines.append((found["library"], "all", *_ready(found), *empty))
    return grid(lines)


def _ready(found: Figures) -> tuple[str]:
    return (f"{found['ready_s']:.2f}" if "ready_s" in found else "",)


def _rows(figures: Sequence[Figures]) -> list[str]:
    each = [one for found in figures for one in found.get("operators", {}).values() if "us" in one]
    return list(map(str, each[0]["us"])) if each else []


def main(arguments: list[str] | None = None) -> int:
    """Measure one library in this process if --library is given; otherwise all, each in its own process."""
    parser = argparse.ArgumentParser(prog="python -m bench.fused_operators", description=__doc__)
    known = (*LIBRARIES, THREADED)
    add_names(parser, "--libraries", known, "all by default; those that are not installed are left out")
    parser.add_argument("--rows", type=numbers, default=ROWS, help="rows of the inputs, such as 1,8,64,256")
    parser.add_argument("--cold-flashinfer", action="store_true", help="empty FlashInfer's cache too: over a minute")
    add_json(parser, OUT / "fused_operators.json")
    parser.add_argument("--library", choices=known, help="measure this process, as the command does in its own")
    options = parser.parse_args(arguments)
    device = device_of()
    if options.library is not None:
        Path(options.json).write_text(json.dumps(measure_here(options.library, options.rows, device)))
        return 0
    libraries = options.libraries or [name for name in known if device.type == "cuda" or name == "torch"]
    figures = measure(libraries, options.rows, cold_flashinfer=options.cold_flashinfer)
    print(render(figures))
    if device.type == "cpu":
        print(NOT_SPEED)
    save_figures(options.json, {"results": figures})
    return int(all("failed" in found for found in figures))
