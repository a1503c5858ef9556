"""Sentences of the page of figures: where we lose, and what a table says as a whole."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from docs.tools.raw import load, startup
from docs.tools.wording import between, bullets

# Starts of every arm with proofs, on one H200 each.
_STARTS = ("h200_startup_lean", "headline/startup", "h200_startup")


def _over(other: str, *path: str) -> list[float]:
    """Return how many times as long as another arm our start takes, by run."""
    found = []
    for file in _STARTS:
        ours, others = (_at(startup(file)[arm], path) for arm in ("simplegraph", other))
        found.append(ours / others)
    return found


def _at(run: Any, path: Sequence[str]) -> float:
    for key in path:
        run = run[key]
    return float(run)


def losses() -> str:
    """Say what takes longer than what it stands beside."""
    ready, again = ("seconds", "ready"), ("primed", "seconds", "ready")
    lazy = {arm: found["longest_ms"] for arm, found in load("headline/model_calls")["lazy"].items()}
    decode = [row for row in load("headline/engine")["decode"] if row["batch"] > 8]
    products = [row["ms"]["triton graph"] / row["ms"]["GEMMs alone"] for row in decode]
    memory = load("headline/training_memory")["workloads"]["vit-b 64"]
    reserved = memory["forward-backward"]["reserved_mib"] / memory["eager"]["reserved_mib"]
    return bullets(
        f"A first start takes {between(_over('eager', *ready))} times as long as eager needs to run all sizes once, "
        f"and {between(_over('lean-loop', *ready))} times as long as a lean loop, which checks nothing; a second start "
        f"in the process {between(_over('lean-loop', *again))} times the lean loop's time (three runs on H200s).",
        f"Captured lazily, a size is captured inside a request, which waits for up to {lazy['simplegraph']:.0f} ms: "
        f"{lazy['simplegraph'] / lazy['eager']:.1f} times eager's longest call. In [gaps between "
        f"requests](production.md#warm-up) no call took longer than {lazy['simplegraph-in-gaps']:.0f} ms, "
        f"{lazy['simplegraph-in-gaps'] / lazy['eager']:.2f} times eager's longest.",
        f"At 64 and 256 requests the engine's steps take {between(products)} times as long as their matrix products "
        "alone.",
        f"Forward and backward graphs of a ViT-B with 64 images reserve {reserved:.2f} times eager's memory.",
        "Most [compiled](#optimized) calls are shorter than graphs of plain models. Torch's [training "
        "graphs](#training-steps) replay sooner, unchecked.",
    )


def http_load() -> str:
    """Say what came of the requests."""
    found = load("emulator_http_load")
    results = found["results"]
    callers = results["callers"].values()
    after, before = results["after"], results["before"]
    kept = [name for name in ("tasks", "free_pages", "in_flight") if after[name] == before[name]]
    half = results["samples"][len(results["samples"]) // 2 :]
    grown = half[-1]["memory_mib"] - half[0]["memory_mib"]
    return (
        f"Of {sum(caller['requests'] for caller in callers):,} requests in {found['load']['minutes']:.0f} minutes on "
        f"the emulator, {sum(caller['failures'] for caller in callers)} failed. {results['statuses']['429']:,} were "
        f"refused since the engine was full; of the {after['accepted']:,.0f} that it took, {after['answered']:,.0f} "
        f"were answered and {after['cancelled']:,.0f} cancelled. {len(kept)} of 3 counts (tasks, free pages, requests "
        f"in flight) were the same before and after; resident memory grew by {grown:.0f} MiB in the second half."
    )


def optimized() -> str:
    """Sum up the table of optimized modules beside the compiler."""
    rows = [row["arms"] for row in load("h200_optimized")["rows"].values()]
    times = [row["optimized"]["ms"] / row["compiled"]["ms"] for row in rows]
    plain = [row["graph"]["ms"] / row["optimized"]["ms"] for row in rows]
    sooner = [row["compiled"]["ready_seconds"] / row["optimized"]["ready_seconds"] for row in rows]
    ours, theirs = (
        between(row[arm]["error"] / row["eager"]["error"] for row in rows) for arm in ("optimized", "compiled")
    )
    return (
        f"An optimized call takes {between(times)} times as long as the compiled one, "
        f"{statistics.geometric_mean(times):.2f} times in the geometric mean; in {sum(time > 1 for time in times)} "
        f"of the {len(times)}, at batch 1 and 8, the compiler has the shorter call. Without `optimize` a graph takes "
        f"{between(plain)} times as long as with it. The fourth call is done {between(sooner, '.1f')} times sooner "
        f"than the compiled one's. Against the module in float64, errors are {ours} times eager's, those of the "
        f"compiler {theirs} times. {_other_runs()}"
    )


def _other_runs() -> str:
    """Say how much longer optimized calls took in the README's run at batch 1, and their kernels."""
    here, calls, kernels = load("h200_optimized")["rows"], [], []
    for name, row in load("headline/models")["rows"].items():
        now, then = row["arms"]["optimized"], here[name]["arms"]["optimized"]
        calls.append(now["ms"] / then["ms"])
        kernels.append(_kernels_us(now) / _kernels_us(then))
    return (
        f"In the README's run, optimized calls at batch 1 took {between(calls)} times as long "
        f"as in this one. Their kernels took {between(kernels)} times as long: the rest is time between kernels and "
        "calls."
    )


def _kernels_us(arm: Any) -> float:
    return float(sum(us for _, _, us in arm["kernels"]))
