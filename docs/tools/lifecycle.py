"""Draws the lifecycle of calls as text, from the tables of `simplegraph.manager.lifecycle`."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from simplegraph.manager.lifecycle import EDGES, REFUSALS, RowVerdict, Stage

# (before, after) -> the event that leads from one to the other. tests/manager/test_lifecycle.py makes each change.
VERDICT_EDGES: dict[tuple[RowVerdict, RowVerdict], str] = {
    (RowVerdict.DUE, RowVerdict.PROVEN): "a replay equals eager",
    (RowVerdict.PROVEN, RowVerdict.DUE): "so many replays came that one is compared, or the size is captured again",
    (RowVerdict.DUE, RowVerdict.UNVERIFIED): "a call writes more memory than can be compared, or `verify` is 0",
    (RowVerdict.UNVERIFIED, RowVerdict.DUE): "the size is captured again",
    (RowVerdict.DUE, RowVerdict.REFUSED): "only this batch size was seen so far",
    (RowVerdict.REFUSED, RowVerdict.DUE): "another call runs eagerly, or the graph is gone",
}


def drawing() -> str:
    """Draw the stages of a size in a column, and list the other edges, the verdicts of row counts, and refusals."""
    lines = ["```text", "The next call of a size:", "", *_stages(), "", "Other ways:", *_columns(_other_edges())]
    lines += ["", "Row counts of a captured size:", *_columns((verdict.name, verdict.value) for verdict in RowVerdict)]
    lines += _columns((f"{one.name} -> {other.name}", why) for (one, other), why in VERDICT_EDGES.items())
    lines += ["", "Refused:"]
    for rule in REFUSALS:
        lines += [f"  {rule.scope.value}, until {rule.until}:", f"    {', '.join(map(str, rule.reasons))}"]
    return "\n".join([*lines, "```"])


def _stages() -> list[str]:
    """Draw each stage, and the event that leads to the next one."""
    width = max(len(stage.name) for stage in Stage)
    stages = list(Stage)
    lines = [f"{stages[0].name:{width}}  {stages[0].value}"]
    for before, after in itertools.pairwise(stages):
        (event,) = (event for (stage, event), then in EDGES.items() if (stage, then) == (before, after))
        lines += [f"  |{'':{width}}  {event.value}", "  v", f"{after.name:{width}}  {after.value}"]
    return lines


def _other_edges() -> list[tuple[str, str]]:
    """List what leads elsewhere than to the next stage, by event."""
    forward = set(itertools.pairwise(Stage))
    others = [(stage, event, then) for (stage, event), then in EDGES.items() if (stage, then) not in forward]
    found: dict[tuple[str, str], list[str]] = {}
    for stage, event, then in others:
        found.setdefault((then.name, event.value), []).append(stage.name)
    return [(f"{', '.join(names)} -> {then}", event) for (then, event), names in found.items()]


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    cells = list(rows)
    width = max(len(left) for left, _ in cells)
    return [f"  {left:{width}}  {right}" for left, right in cells]
