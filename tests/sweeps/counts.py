"""Counts of a sweep: of each verdict, of several processes together, as JSON and as a table."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable
from typing import Any

from tests.sweeps.sweep import Verdict

COUNTED = ("entries", "samples", "eager")
KINDS = ("replayed", "eager", "raised", "unstable", "no sample", "defect", "not reached")
_NUMBERS = [field.name for field in dataclasses.fields(Verdict) if field.type == "int"]


def add(results: list[dict[str, Any]], more: dict[str, Any]) -> None:
    """Add counts of one kind of entries in one mode to those that there are."""
    same = [result for result in results if (result["kind"], result["mode"]) == (more["kind"], more["mode"])]
    if not same:
        results.append(more)
        return
    for name in COUNTED:
        same[0][name] = dict(collections.Counter(same[0][name]) + collections.Counter(more[name]))
    same[0]["defects"] |= more["defects"]


def counted(kind: str, mode: str, verdict: Verdict) -> dict[str, Any]:
    """Return the counts of one entry: of its samples, and the first three of its defects."""
    return {
        "kind": kind,
        "mode": mode,
        "entries": {verdict.kind: 1},
        "samples": {name: getattr(verdict, name) for name in _NUMBERS},
        "eager": dict(verdict.eager),
        "defects": {verdict.name: dict(list(verdict.defects.items())[:3])} if verdict.defects else {},
    }


def not_reached(kind: str, mode: str) -> dict[str, Any]:
    """Return the counts of an entry that there was no time for."""
    return {"kind": kind, "mode": mode, "entries": {"not reached": 1}, "samples": {}, "eager": {}, "defects": {}}


def merged(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Put the counts of several chunks together; seconds are those of all processes."""
    parts = list(parts)
    results: list[dict[str, Any]] = []
    for result in (result for part in parts for result in part["results"]):
        add(results, json.loads(json.dumps(result)))
    return (
        parts[0]
        | {name: sum(part[name] for part in parts) for name in ("seconds", "done", "of")}
        | {"results": results}
    )


def write(counts: dict[str, Any], path: pathlib.Path) -> None:
    """Replace the file at once, so that whoever reads it, whenever the writer ends, reads all of one state."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(counts, indent=1) + "\n", encoding="utf-8")
    os.replace(beside, path)


def table(counts: dict[str, Any]) -> str:
    """Return the counts as a table in Markdown: entries, then samples that ran eagerly by their reasons."""
    lines = [f"torch {counts['torch']}, {counts['device']}, {counts['seconds']} s", ""]
    lines += [f"| entries | mode | {' | '.join(KINDS)} | samples replayed | to the bit | eager samples by reason |"]
    lines += ["|" + "---|" * (len(KINDS) + 5)]
    for result in counts["results"]:
        entries_of, samples = result["entries"], result["samples"]
        reasons = sorted(result["eager"].items(), key=lambda item: -item[1])
        cells = [result["kind"], result["mode"], *(entries_of.get(kind, 0) for kind in KINDS)]
        replayed = samples.get("replayed", 0)
        cells += [replayed, replayed - samples.get("rounded", 0)]
        cells += [", ".join(f"{reason} {count}" for reason, count in reasons)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    causes = collections.Counter(
        _cause(text) for result in counts["results"] for found in result["defects"].values() for text in found.values()
    )
    lines += ["", *(f"- {count} samples: {cause}" for cause, count in causes.most_common())]
    return "\n".join(lines) + "\n"


def _cause(defect: str) -> str:
    """A defect without its numbers, names and shapes."""
    text = re.sub(r"^call \d+: ", "", defect)
    text = re.sub(r" as \{.*", "", text)
    return re.sub(r"\([^)]*\)|\[[^\]]*\]|\d[\d.e+-]*", "..", text)[:90]
