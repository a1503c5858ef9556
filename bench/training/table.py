"""Formats the figures of training steps."""

from __future__ import annotations

from bench.tools.measure import Figures
from bench.tools.tables import cell, grid, measured

EAGER, SAME = "eager", "eager-capturable"
ROUNDING = 0.05  # allowed for losses: kernels that add in any order, and what a few steps make of it


def describe(found: Figures) -> str:
    """Describe one run in a line, or why it has no figures."""
    if "failed" in found:
        return "failed: " + found["failed"].strip().splitlines()[-1]
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if isinstance(found.get("ms"), dict):
        return ", ".join(f"{arm} {ms:.3f} ms" for arm, ms in found["ms"].items())
    if "ms" not in found:
        return f"reserved {cell(found, 'reserved_mib', '.0f')} MiB"
    parts = [f"{found['ms']:.3f} ms a step", f"kernels {cell(found, 'kernel_ms', '.3f')} ms"]
    replayed = "" if found["first_replay"] is None else f"replayed at step {found['first_replay'] + 1}, "
    steady = f"{replayed}steady after {found['calls'][found['steady']]:.2f} s"
    return ", ".join([*parts, steady, f"reserved {cell(found, 'reserved_mib', '.0f')} MiB"])


def beyond_eager(found: Figures, eager: Figures, index: int | None) -> float | None:
    """Return the seconds until a step was done, less those of as many eager steps in a process of their own."""
    if index is None or "calls" not in eager:
        return None
    seconds: float = found["calls"][index] - eager["calls"][index]
    return seconds


def difference(found: Figures, same: Figures) -> float | None:
    """Return the largest relative difference of the first steps' losses from eager's with the same settings."""
    if "losses" not in same or "losses" not in found:
        return None
    both = zip(found["losses"], same["losses"], strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), 1e-9) for ours, theirs in both)


_HEADER = ("workload", "arm", "ms", "kernels ms", "busy", "x eager", "replay s", "steady s", "reserved", "loss")


def render(figures: Figures) -> str:
    """Format the timed steps, then a line each for eight shapes, arms that took turns, and what has no figures."""
    lines: list[list[str]] = [list(_HEADER)]
    notes = []
    for kind in ("workloads", "shapes"):
        for name, arms in figures[kind].items():
            for arm, found in arms.items():
                if kind == "workloads" and arm != "in turn" and "ms" in found:
                    lines.append([name, arm, *_cells(found, arms)])
                else:
                    notes.append(f"{name}, {arm}: {describe(found)}")
    return "\n\n".join(part for part in (grid(measured(lines)), "\n".join(notes)) if part)


def _cells(found: Figures, arms: Figures) -> list[str]:
    eager = arms.get(EAGER, {})
    more = found | {
        "x": found["ms"] / eager["ms"] if "ms" in eager else None,
        "replay": beyond_eager(found, eager, found["first_replay"]),
        "until": beyond_eager(found, eager, found["steady"]),
        "loss": difference(found, arms.get(SAME, {})),
    }
    forms = {"ms": ".3f", "kernel_ms": ".3f", "busy_share": ".0%", "x": ".3f", "replay": ".3f", "until": ".3f"}
    forms |= {"reserved_mib": ".0f", "loss": ".1g"}
    return [cell(more, name, form) for name, form in forms.items()]
