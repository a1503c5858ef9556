"""Formats figures as text: aligned columns, and a heading with the machine, versions and model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.tools.measure import Figures

MIB = 2**20
NOTHING = "-"


def heading(results: dict[str, Figures]) -> str:
    """Describe machine, versions and model, from the first run that has them."""
    for result in results.values():
        if result["status"] == "ok":
            where, gpu = result["environment"], result["environment"]["gpu"]
            machine = f"{gpu['name']}, driver {gpu['driver']}" if gpu else f"CPU, {where['cores']} cores"
            layers = f"{result['layers']} layers, " if "layers" in result else ""
            ranks = f" on each of {result['tp']} ranks" if result.get("tp", 1) > 1 else ""
            return (
                f"{machine}; torch {where['torch']}, Python {where['python']}, commit {where['commit'][:12]}\n"
                f"{result['model']} ({layers}{_count(result['parameters'])} parameters{ranks}, "
                f"{result['dtype']}), "
                f"{len(result['sizes'])} sizes to {max(result['sizes'])}, contexts of {result['context']} tokens, "
                f"{result['attention']}"
            )
    return "no arm has figures"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"


def measured(lines: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Keep the columns in which any run has a figure; the first line is the header."""
    kept = [i for i in range(len(lines[0])) if i == 0 or any(line[i] != NOTHING for line in lines[1:])]
    return [[line[i] for i in kept] for line in lines]


def cell(figures: Figures, name: str, form: str) -> str:
    """Format a figure, or a dash if there is none."""
    return format(figures[name], form) if figures.get(name) is not None else NOTHING


def ratio(one: Figures, other: Figures, name: str, form: str) -> str:
    """Format one's figure over the other's, or a dash if either has none."""
    return format(one[name] / other[name], form) if name in one and name in other else NOTHING


def in_line(figures: Mapping[str, float], form: str, unit: str) -> str:
    """Join named figures with their unit, for a line of progress."""
    return ", ".join(f"{name} {value:{form}} {unit}" for name, value in figures.items())


def grid(lines: Sequence[Sequence[Any]]) -> str:
    """Align columns, the first to the left, and underline the header."""
    widths = [max(len(str(line[column])) for line in lines) for column in range(len(lines[0]))]
    align: list[Callable[[str, int], str]] = [str.ljust, *[str.rjust] * (len(widths) - 1)]
    text = ["  ".join(a(str(c), w) for a, c, w in zip(align, line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])
