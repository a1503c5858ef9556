"""Draws what torch's profiler sees of an eager call and of a replay: ``python -m docs.tools.timeline``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

import simplegraph as sg
from docs.tools.charts import OTHERS, OURS, draw
from docs.tools.raw import ROOT

PICTURE = ROOT / "docs" / "_static" / "trace.png"
_LAYERS, _TRIES = 6, 30  # the quickest call is shown


def profiled() -> dict[str, list[tuple[str, int, float, float]]]:
    """Profile an eager call and a replay of one model: name, depth, begin and length in µs of each range."""
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(64, 64), nn.GELU())]
    module = nn.Sequential(*layers).eval()
    model, x = sg.wrap(module, capture_sizes=[8], progress=False, verify=0), torch.randn(8, 64)
    found = {}
    with torch.inference_mode():
        model.capture_graphs(x)
        for title, call in (("module(x), eager", module), ("model(x), a replay on the emulator", model)):
            found[title] = min((_profile(call, x) for _ in range(_TRIES)), key=lambda ranges: sum(ranges[-1][2:]))
    return found


def _profile(call: Any, x: torch.Tensor) -> list[tuple[str, int, float, float]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call(x)
    return _ranges(profile.events())


def _ranges(events: Any) -> list[tuple[str, int, float, float]]:
    spans = sorted(
        ((each.time_range.start, each.time_range.end, each.name) for each in events), key=lambda one: one[:2]
    )
    begin, open_ends, ranges = spans[0][0], [], []
    for start, end, name in spans:
        open_ends = [other for other in open_ends if other > start]
        ranges.append((name, len(open_ends), start - begin, end - start))
        open_ends.append(end)
    return ranges


def store(path: Path = PICTURE) -> None:
    """Draw the ranges of both calls, one above the other, the outer ones at the top."""
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would fill the picture
    found = profiled()

    def fill(chart: Any, axes: Any) -> None:
        for axis, (title, ranges) in zip(axes, found.items(), strict=True):
            last = max(start + length for _, _, start, length in ranges)
            for name, depth, start, length in ranges:
                ours = name.startswith("simplegraph")
                axis.barh(
                    -depth, length, left=start, height=0.9, color=OURS if ours else OTHERS, edgecolor="white", lw=0.3
                )
                if length > last / 9 and depth < 3:
                    axis.text(start + length / 2, -depth, name, ha="center", va="center", fontsize=7, color="white")
            axis.set_title(f"{title}: {len(ranges)} ranges", loc="left", fontsize="medium")
            axis.set_yticks([])
            axis.set_xlabel("µs")
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)

    draw(path, fill, nrows=2, figsize=(10.5, 4.4))


if __name__ == "__main__":
    store()
