"""``python -m bench.layer_kinds``: sliding windows and hybrids: equal tokens in every mode, and decode steps by arm.

On a GPU it compares 64 requests of 128 tokens in float32, and measures bfloat16 shapes of 6 to 10 billion weights.
"""

from __future__ import annotations

import argparse
import sys
import time

from bench.layer_kinds import equality, steps
from bench.layer_kinds.shapes import KINDS
from bench.tools.command import limited
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, Figures, device_of, few_threads, say
from bench.tools.options import add_json, add_names, count, numbers, positive
from bench.tools.tables import grid


def main(arguments: list[str] | None = None) -> int:
    """Compare and measure every kind; figures are written as they come.

    Return 1 if a request's tokens differ from those of the same kernels without graphs.
    """
    options = _parser().parse_args(arguments)
    device = device_of()
    on_gpu = device.type == "cuda"
    requests, tokens = options.requests or (64 if on_gpu else 6), options.tokens or (128 if on_gpu else 6)
    batches = options.batches or ((1, 8, 64) if on_gpu else (1, 4))
    results: Figures = {"results": {}}
    with few_threads(device), limited(options.limit):
        for name in options.kinds:
            figures = results["results"][name] = {}
            for part, run in (
                ("equality", lambda kind: equality.compare(kind, device, requests=requests, tokens=tokens)),
                ("steps", lambda kind: steps.measure(kind, device, batches, small=not on_gpu)),
            ):
                if part not in options.parts:
                    continue
                say(f"{name}: {part}")
                started = time.perf_counter()
                figures[part] = run(KINDS[name])
                figures[part]["seconds"] = time.perf_counter() - started
                save_figures(options.json, results)
    print(render(results["results"]))
    if not on_gpu:
        print(NOT_SPEED)
    return int(any(_different(figures) for figures in results["results"].values()))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.layer_kinds", description=__doc__)
    add_names(parser, "--kinds", KINDS, "all by default", default=tuple(KINDS))
    parts = ("equality", "steps")
    add_names(parser, "--parts", parts, "both by default", default=parts)
    parser.add_argument("--requests", type=count, help="that are compared; 64 on a GPU, else 6")
    parser.add_argument("--tokens", type=count, help="of each of them; 128 on a GPU, else 6")
    parser.add_argument("--batches", type=numbers, help="requests of a measured step; 1,8,64 on a GPU, else 1,4")
    parser.add_argument("--limit", type=positive, default=570.0, help="seconds after which it stops; 570 by default")
    add_json(parser, OUT / "layer_kinds.json")
    return parser


def _different(figures: Figures) -> bool:
    found = figures.get("equality", {"equal": {}})
    same_kernels = [equal for arm, equal in found["equal"].items() if arm not in equality.OTHER_KERNELS]
    return any(equal != found["requests"] for equal in same_kernels)


def render(results: dict[str, Figures]) -> str:
    """Format equality and steps of every kind."""
    lines = []
    for name, figures in results.items():
        if "equality" in figures:
            found = figures["equality"]
            shares = ", ".join(f"{arm} {equal}" for arm, equal in found["equal"].items())
            lines.append(f"{name}: of {found['requests']} requests x {found['tokens']} tokens equal eager's: {shares}")
        if "steps" in figures:
            rows = figures["steps"]["decode"]
            arms = list(rows[0]["ms"])
            table = [("requests", *arms)]
            table += [(str(row["batch"]), *(f"{row['ms'][arm]:.3f}" for arm in arms)) for row in rows]
            lines += [f"{name}: ms of a decode step, context {figures['steps']['context']}", grid(table)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
