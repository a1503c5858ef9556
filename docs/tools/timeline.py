"""Draws what torch's profiler sees of an eager call and of a replay: ``python -m docs.tools.timeline``.

With ``--record FILE`` it writes the ranges of this machine instead, a GPU's if it has one; the picture is drawn from
``bench/results/h200_trace.json``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import simplegraph as sg
from bench.tools.files import save_figures
from docs.tools.charts import OTHERS, OURS, draw
from docs.tools.raw import ROOT, load

PICTURE, RANGES = ROOT / "docs" / "_static" / "trace.png", "h200_trace"
_WIDTH, _BLOCKS, _ROWS, _TRIES = 256, 3, 6, 10  # the quickest call is shown
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_LAUNCHES = "cudaLaunch", "cudaMemcpy", "cudaGraph"
_KERNELS = "#364fc7"  # their colour


class Block(nn.Module):
    """A block of a small model."""

    def __init__(self) -> None:
        super().__init__()
        parts = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH)
        self.parts = nn.Sequential(*parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        return x + self.parts(x)


def record() -> dict[str, list[tuple[str, int, float, float]]]:
    """Profile an eager call and a replay: name, line, begin and length in µs of each range; line -1 is the GPU's."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # threads that wait for each other on a busy machine would fill the picture
    module = nn.Sequential(*(Block() for _ in range(_BLOCKS))).to(device).eval()
    model = sg.wrap(module, capture_sizes=[8], progress=False, verify=0)
    x = torch.randn(_ROWS, _WIDTH, device=device)
    with torch.inference_mode():
        model.capture_graphs(x)
        calls = {"module(x), eager": module, "model(x), a replay": model}
        return {title: min((_profile(call, x) for _ in range(_TRIES)), key=_end) for title, call in calls.items()}


def _profile(call: Any, x: torch.Tensor) -> list[tuple[str, int, float, float]]:
    for _ in range(3):
        call(x)
    with torch.profiler.profile(acc_events=True) as profile:
        call(x)
        if x.is_cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return list(_lines([event for event in events if event.get("ph") == "X" and "Synchronize" not in event["name"]]))


def _lines(events: list[dict[str, Any]]) -> Iterator[tuple[str, int, float, float]]:
    """Put the host's ranges on lines, the outer ones first, and the GPU's on one of their own."""
    found = sorted(
        (float(event["ts"]), -float(event["dur"]), event["name"], event["cat"] in _GPU)
        for event in events
        if event["cat"] in _GPU | _HOST
    )
    open_ends: list[float] = []
    for start, less, name, on_gpu in found:
        open_ends = [other for other in open_ends if other > start]
        yield name, -1 if on_gpu else len(open_ends), round(start - found[0][0], 2), round(-less, 2)
        if not on_gpu:
            open_ends.append(start - less)


def _end(ranges: list[tuple[str, int, float, float]]) -> float:
    return max(start + length for _, _, start, length in ranges)


def _settled(ranges: list[tuple[str, int, float, float]]) -> list[tuple[str, int, float, float]]:
    """Return what follows a call's first launch, in which the profiler prepares itself for milliseconds."""
    begin = min(start + length for name, _, start, length in ranges if name.startswith(_LAUNCHES))
    return [(name, line, start - begin, length) for name, line, start, length in ranges if start >= begin]


def store(path: Path = PICTURE) -> None:
    """Draw the ranges of both calls on one scale of time, one above the other."""
    calls = {title: _settled(ranges) for title, ranges in load(RANGES)["results"].items()}
    last = max(map(_end, calls.values()))

    def fill(chart: Any, axes: Any) -> None:
        for axis, (title, ranges) in zip(axes, calls.items(), strict=True):
            lowest = 1 + max(line for _, line, _, _ in ranges)
            for whole_name, line, start, length in ranges:
                name = whole_name.partition(" ")[0]
                color = _KERNELS if line < 0 else OURS if name.startswith("simplegraph") else OTHERS
                place = -lowest - 0.3 if line < 0 else -line
                axis.barh(place, length, left=start, height=0.9, color=color, edgecolor="white", lw=0.2)
                if line >= 0 and length > last * 0.012 * len(name):
                    axis.text(start + length / 2, place, name, ha="center", va="center", fontsize=7, color="white")
            axis.set_title(f"{title}: {_end(ranges):.0f} µs", loc="left", fontsize="medium")
            axis.set_yticks([0, -lowest - 0.3], ["host", "GPU"])
            for side in ("top", "right", "left"):
                axis.spines[side].set_visible(False)
        axes[-1].set_xlim(0)
        axes[-1].set_xlabel("µs")

    draw(path, fill, nrows=2, figsize=(10.5, 4.4), sharex=True)


def main() -> None:
    """Record the ranges, or draw them."""
    parser = argparse.ArgumentParser(prog="python -m docs.tools.timeline", description=__doc__)
    parser.add_argument("--record", type=Path, metavar="FILE", help="write this machine's ranges")
    path = parser.parse_args().record
    if path is None:
        store()
    else:
        save_figures(path, {"results": record()})


if __name__ == "__main__":
    main()
