"""Measures every library in a fresh process whose compile caches are empty."""

from __future__ import annotations

import dataclasses

import torch

from bench.fused_operators.libraries import LIBRARIES, TINY, Call, Maker, Shapes, inputs
from bench.tools import command
from bench.tools.compiler import empty_caches
from bench.tools.measure import Figures, say, seconds, step_milliseconds
from bench.tools.options import Options, name_list, numbers
from bench.tools.side_by_side import answer
from bench.tools.tables import grid

CALLS = 50  # in one graph
TIMEOUT = 240.0


@dataclasses.dataclass(frozen=True)
class OperatorsPlan:
    """The libraries, of `LIBRARIES`, and the rows of the inputs."""

    libraries: tuple[str, ...] = tuple(LIBRARIES)
    rows: tuple[int, ...] = (1, 8, 64, 256)


def default_plan(device: torch.device) -> OperatorsPlan:
    """Return all libraries on a GPU, else torch."""
    return OperatorsPlan() if device.type == "cuda" else OperatorsPlan(("torch",))


def measure(plan: OperatorsPlan, device: torch.device) -> Figures:
    """Measure each library in a process of its own; one that fails has its error in place of figures."""
    results = []
    for library in plan.libraries:
        found = answer(measure_library, library, plan.rows, device, seconds=TIMEOUT)
        results.append({"library": library} | found)
        say(f"{library}: {found.get('failed', 'done')}")
    return {"results": results}


def measure_library(library: str, rows: tuple[int, ...], device: torch.device) -> Figures:
    """Measure a library in this process."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = Shapes() if device.type == "cuda" else TINY
    torch.zeros(1, device=device)
    figures: Figures = {"operators": {}, "ready_s": 0.0}
    with empty_caches():
        for name, given in inputs(shapes, max(rows), device, dtype).items():
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
            figures["operators"][name] = {"first_s": first, "us": times} | _error(make, name, shapes, device, dtype)
            figures["ready_s"] += first
    return figures


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


def render(figures: Figures) -> str:
    """Format a line for each library and operator: first use in s, us by rows, error; then the sum of first uses."""
    rows = next((list(each["us"]) for found in figures["results"] for each in _timed(found).values()), [])
    lines: list[tuple[str, ...]] = [
        ("library", "operator", "first s", *(f"us, {count} rows" for count in rows), "error")
    ]
    for found in figures["results"]:
        for name, each in _timed(found).items():
            error = f"{each['error']:.1e}" if "error" in each else ""
            times = (f"{us:.2f}" for us in each["us"].values())
            lines.append((found["library"], name, f"{each['first_s']:.2f}", *times, error))
        ready = f"{found['ready_s']:.2f}" if "ready_s" in found else ""
        lines.append((found["library"], found.get("reason", "all"), ready, *[""] * (len(rows) + 1)))
    return grid(lines)


def _timed(found: Figures) -> dict[str, Figures]:
    """Return the operators of a library that have figures."""
    return {name: each for name, each in found.get("operators", {}).items() if "us" in each}


def failures(figures: Figures) -> list[str]:
    """List the libraries' errors, if none has figures."""
    failed = [f"{found['library']}:\n{found['failed']}" for found in figures["results"] if "failed" in found]
    return failed if len(failed) == len(figures["results"]) else []


OPTIONS: Options = {
    "--libraries": name_list(LIBRARIES, "all by default; those that are not installed are left out"),
    "--rows": {"type": numbers, "help": "rows of the inputs, such as 1,8,64,256"},
}
main = command.of("bench.fused_operators", __doc__, OPTIONS, default_plan, measure, render, failures)
