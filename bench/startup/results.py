"""Combines the rounds of a run, and computes the ratios that judge the library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]

_READY = ("seconds", "ready")
# Figures of a second start in the same process, which exclude loading the libraries.
_AGAIN, _KEPT = ("primed", "seconds", "ready"), ("primed", "device_bytes")
# Of ours, without the warmup and what is looked up about the graphs.
_ALONE, _ALONE_AGAIN = ("details", "captures_alone_s"), ("primed", "details", "captures_alone_s")
# Numerator and denominator of each ratio: a run, and a figure of it, seconds until all sizes are ready or bytes kept.
RATIOS = {
    "ready_plain_loop_over_ours": (("plain-loop", _READY), ("simplegraph", _READY)),
    "ready_lean_loop_over_ours": (("lean-loop", _READY), ("simplegraph", _READY)),
    "ready_ours_over_eager": (("simplegraph", _READY), ("eager", _READY)),
    "ready_our_captures_alone_over_eager": (("simplegraph", _ALONE), ("eager", _READY)),
    "again_plain_loop_over_ours": (("plain-loop", _AGAIN), ("simplegraph", _AGAIN)),
    "again_lean_loop_over_ours": (("lean-loop", _AGAIN), ("simplegraph", _AGAIN)),
    "again_our_captures_alone_over_plain_loop": (("simplegraph", _ALONE_AGAIN), ("plain-loop", _AGAIN)),
    "memory_ours_over_plain_loop": (("simplegraph", _KEPT), ("plain-loop", _KEPT)),
    "memory_ours_over_lean_loop": (("simplegraph", _KEPT), ("lean-loop", _KEPT)),
    "ready_piecewise_cold_over_ours": (("compiled-piecewise (cold)", _READY), ("simplegraph", _READY)),
    "ready_piecewise_warm_over_ours": (("compiled-piecewise (warm)", _READY), ("simplegraph", _READY)),
}


def combine(results: Sequence[Result]) -> Result:
    """Combine the rounds of one run: medians of the times, the rest from the first; a failure if one failed."""
    bad = next((result for result in results if result["status"] != "ok"), None)
    if bad is not None:
        return bad
    combined = medians(results)
    return combined | {"rounds": [result["seconds"] for result in results]}


def medians(values: Sequence[Any]) -> Any:
    """Return medians of floats, recursively in dicts; of everything else the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: medians([value[key] for value in values if key in value]) for key in first}
    return statistics.median(values) if isinstance(first, float) else first


def comparison(results: dict[str, Result]) -> dict[str, float]:
    """Compute `RATIOS`, and steps on DTensors over those on plain tensors, for all runs that have figures.

    Runs on the emulator, whose times are not speed, have the latter alone.
    """
    ratios = {} if any(result.get("device") == "cpu" for result in results.values()) else dict(RATIOS)
    for batch in results.get("simplegraph-dtensor", {}).get("step_ms", {}):
        step = ("step_ms", batch)
        ratios[f"step_dtensor_over_plain_at_{batch}"] = (("simplegraph-dtensor", step), ("simplegraph", step))
    pairs = {name: [figure(results.get(label), *path) for label, path in pair] for name, pair in ratios.items()}
    return {name: one / other for name, (one, other) in pairs.items() if one is not None and other}


def figure(result: Result | None, *path: str) -> float | None:
    """Return a nested figure of a result; None if it has none."""
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
