"""Formats the figures of training steps, and compares them with what graphs of training steps must reach."""

from __future__ import annotations

from bench.tools.measure import Figures
from bench.tools.tables import cell, grid, measured

OURS, EAGER, SAME, BY_HAND = "train-step", "eager", "eager-capturable", "hand-made"
TORCH, PAIRS, COMPILED = "make-graphed-callables", "forward-backward", "compiled-reduce-overhead"
GIB = 1024  # in MiB
ROUNDING = 0.05  # allowed for losses: kernels that add in any order, and what a few steps make of it


def describe(found: Figures) -> str:
    """Describe one run in a line, or why it has no figures."""
    if "failed" in found:
        return "failed: " + found["failed"].strip().splitlines()[-1]
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if isinstance(found.get("ms"), dict):
        return "in turn " + ", ".join(f"{ms:.3f} ms" for ms in found["ms"].values())
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
    """Format all figures, then the requirements."""
    lines: list[list[str]] = [list(_HEADER)]
    notes = []
    for name, arms in figures["workloads"].items():
        for arm, found in arms.items():
            if arm == "in turn":
                continue
            if "ms" in found:
                lines.append([name, arm, *_cells(found, arms)])
            else:
                notes.append(f"{name}, {arm}: {describe(found)}")
    parts = [grid(measured(lines)), "\n".join(notes), grid(_requirements(figures))]
    return "\n\n".join(part for part in parts if part)


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


def _requirements(figures: Figures) -> list[list[str]]:
    """List every requirement with its figure, its limit and whether it holds."""
    lines = [["workload", "requirement", "found", "limit", ""]]
    for name, arms in figures["workloads"].items():
        timed = {arm: found for arm, found in arms.items() if arm != "in turn" and "ms" in found}
        lines += [[name, *line] for line in _of_steps(timed) + _of_pairs(arms.get("in turn", {}).get("ms", {}))]
    for name, arms in figures["shapes"].items():
        lines += [[name, *line] for line in _of_shapes(arms)]
    return lines


def _of_steps(arms: Figures) -> list[list[str]]:
    if OURS not in arms:
        return []
    ours, eager, lines = arms[OURS], arms.get(EAGER, {}), []
    if BY_HAND in arms:
        by_hand = arms[BY_HAND]["ms"]
        lines.append(_line("ms, beside a hand-made graph", ours["ms"], max(1.03 * by_hand, by_hand + 0.010)))
    if "kernel_ms" in eager:
        lines.append(_line("ms, beside eager's kernels", ours["ms"], 1.1 * eager["kernel_ms"] + 0.020))
    if eager:
        lines.append(_line("ms, beside ordinary eager", ours["ms"], 1.02 * eager["ms"]))
    if eager and COMPILED in arms:
        compiled = beyond_eager(arms[COMPILED], eager, arms[COMPILED]["steady"])
        replayed = beyond_eager(ours, eager, ours["first_replay"])
        if replayed is not None and compiled is not None:
            lines.append(_line("s to the first replay, beside compiling", replayed, 0.1 * compiled))
    return lines


def _of_pairs(arms: Figures) -> list[list[str]]:
    if PAIRS not in arms or TORCH not in arms:
        return []
    return [_line("ms, forward-backward beside torch's", arms[PAIRS], arms[TORCH])]


def _of_shapes(arms: Figures) -> list[list[str]]:
    ours, eager = (arms.get(arm, {}).get("reserved_mib") for arm in (OURS, EAGER))
    if ours is None or eager is None:
        return []
    return [_line("MiB reserved with eight shapes", ours, 1.35 * eager if eager >= GIB else eager + 256)]


def _line(requirement: str, found: float, limit: float) -> list[str]:
    return [requirement, format(found, ".4g"), format(limit, ".4g"), "holds" if found <= limit else "OVER"]
