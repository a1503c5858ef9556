"""Reads the raw figures that benchmarks wrote, `bench/results`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from bench.startup.starts import SECOND

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


@functools.cache
def load(name: str) -> Any:
    """Return a file of `bench/results`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def extra(name: str, benchmark: str = "") -> Any:
    """Return a command's figures; older files are pytest-benchmark's, whose first benchmark of a suite holds them."""
    found = load(name)
    if "benchmarks" not in found:
        return found
    suite = (one for one in found["benchmarks"] if not benchmark or one["name"].partition("[")[0] == benchmark)
    return next(suite)["extra_info"]


def startup(file: str = "headline/startup") -> dict[str, Any]:
    """Return the figures of every arm of the startup benchmark on one GPU, from its file or pytest-benchmark's."""
    found = load(file)
    if "results" in found:
        return {name: run for name, run in found["results"].items() if run["status"] == "ok"}
    first = (one for one in found["benchmarks"] if one["params"].get("start") != SECOND)  # has the second start's, too
    return {one["extra_info"].get("label", one["param"]): one["extra_info"] for one in first}


def commit(name: str) -> str:
    """Return the commit that a file was measured at."""
    found = load(name)
    machine = found.get("machine_info") or found["environment"]
    return str(machine["commit"])[:7]


def device_name(name: str) -> str:
    """Return the GPU that a file was measured on, as in ``H200``."""
    return str(load(name)["machine_info"]["gpu"]["name"]).removeprefix("NVIDIA ").partition(" ")[0]
