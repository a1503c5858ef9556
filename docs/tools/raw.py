"""Reads the raw figures that benchmarks wrote, `bench/results`."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from bench.startup.starts import SECOND

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"


# Names of files in the order in which they were read; a table's are shown below it.
read: list[str] = []


def load(name: str) -> Any:
    """Return a file of `bench/results`."""
    read.append(name)
    return _parsed(name)


@functools.cache
def _parsed(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def names() -> list[str]:
    """Return the names of all files."""
    return [str(path.relative_to(RESULTS).with_suffix("")) for path in sorted(RESULTS.rglob("*.json"))]


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


def machine(name: str) -> dict[str, Any]:
    """Return the machine, versions and commit that a file was measured with."""
    found = load(name)
    described: dict[str, Any] = found.get("machine_info") or found["environment"]
    return described


def commit(name: str) -> str:
    """Return the commit that a file was measured at."""
    return str(machine(name)["commit"])[:7]


def is_dirty(name: str) -> bool:
    """Return True if a file was measured with changes that its commit does not have."""
    return "modified" in str(machine(name)["commit"])


def device_name(name: str) -> str:
    """Return the GPU that a file was measured on, as in ``H200``; "emulator" where there was none."""
    gpu = machine(name).get("gpu")
    return "emulator" if not gpu else str(gpu["name"]).removeprefix("NVIDIA ").partition(" ")[0]
