"""Writes the lifecycle of calls as text, from the tables of `simplegraph.manager.lifecycle`."""

from __future__ import annotations

from collections.abc import Iterable

from simplegraph.manager.lifecycle import EDGES, REFUSALS, VERDICT_EDGES, RowVerdict, Stage


def drawing() -> str:
    """List the stages of a size and what leads from one to another, the verdicts of row counts, and refusals."""
    lines = ["```text", "The next call of a size:", *_columns((stage.name, stage.value) for stage in Stage)]
    lines += _columns(_edges())
    lines += ["", "Row counts of a captured size:", *_columns((verdict.name, verdict.value) for verdict in RowVerdict)]
    lines += _columns((f"{one.name} -> {other.name}", why) for (one, other), why in VERDICT_EDGES.items())
    lines += ["", "Refused:"]
    for rule in REFUSALS:
        lines += [f"  {rule.scope.value}, until {rule.until}:", f"    {', '.join(map(str, rule.reasons))}"]
    return "\n".join([*lines, "```"])


def _edges() -> list[tuple[str, str]]:
    """List what leads from a stage to another, by event."""
    found: dict[tuple[str, str], list[str]] = {}
    for (stage, event), then in EDGES.items():
        found.setdefault((then.name, event.value), []).append(stage.name)
    return [(f"{', '.join(names)} -> {then}", event) for (then, event), names in found.items()]


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    cells = list(rows)
    width = max(len(left) for left, _ in cells)
    return [f"  {left:{width}}  {right}" for left, right in cells]
