"""Combines the rounds of a run, and computes the ratios that judge the library."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Result = dict[str, Any]

_READY = ("seconds", "ready")
# Figures of a second start in the same process, which exclude loading the libraries.
_AGAIN, _KEPT = ("primed", "seconds", "ready"), ("primed", "device_bytes")
# Numerator and denominator of each ratio. Times: until all sizes are ready. Memory: bytes kept.
RATIOS = {
    "ready_plain_loop_over_ours": (_READY, "plain-loop", "simplegraph"),
    "again_plain_loop_over_ours": (_AGAIN, "plain-loop", "simplegraph"),
    "memory_ours_over_plain_loop": (_KEPT, "simplegraph", "plain-loop"),
    "again_breakable_over_our_piecewise": (_AGAIN, "breakable", "simplegraph-piecewise"),
    "memory_our_piecewise_over_breakable": (_KEPT, "simplegraph-piecewise", "breakable"),
    "ready_piecewise_cold_over_ours": (_READY, "compiled-piecewise (cold)", "simplegraph"),
    "ready_piecewise_warm_over_ours": (_READY, "compiled-piecewise (warm)", "simplegraph"),
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
    """Compute `RATIOS`, and steps on DTensors over those on plain tensors, for all runs that have figures."""
    ratios = dict(RATIOS)
    for batch in results.get("simplegraph-dtensor", {}).get("step_ms", {}):
        ratios[f"step_dtensor_over_plain_at_{batch}"] = (("step_ms", batch), "simplegraph-dtensor", "simplegraph")
    pairs = {name: [figure(results.get(label), *path) for label in labels] for name, (path, *labels) in ratios.items()}
    return {name: one / other for name, (one, other) in pairs.items() if one is not None and other}


def figure(result: Result | None, *path: str) -> float | None:
    """Return a nested figure of a result; None if it has none."""
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
