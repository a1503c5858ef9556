"""Words sentences whose numbers come from raw figures."""

from __future__ import annotations

from collections.abc import Iterable

NUMBERS = {1: "one", 2: "two", 3: "three", 4: "four", 5: "five", 6: "six", 7: "seven", 8: "eight"}


def between(values: Iterable[float], form: str = ".2f") -> str:
    """Return "least to most", or one number where both are written alike."""
    found = list(values)
    return " to ".join(dict.fromkeys(f"{value:{form}}" for value in (min(found), max(found))))


def bullets(*points: str) -> str:
    """Make a list."""
    return "\n".join(f"- {text}" for text in points)
