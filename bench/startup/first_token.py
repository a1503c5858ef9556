"""``python -m bench.startup.first_token``: time from a process's start to its first token and to all graphs captured.

Every arm is an engine in two fresh processes. Compile caches (Inductor's, Triton's, FlashInfer's) are empty in the
first and filled in the second. Weights are random: reading them from disk would add the same time to all arms.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from bench.startup.first_token_process import ARMS, STAGES
from bench.startup.processes import CompileCaches, cache_environment, run_worker
from bench.startup.results import medians
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, Figures, device_of, say
from bench.tools.options import add_json, add_model, add_names, count
from bench.tools.tables import NOTHING, grid, in_line

NEEDS_GPU = ("simplegraph-fused", "compiled-piecewise")
CACHES = ("cold", "warm")
TIMEOUT = 400.0


def default_arms(device: torch.device) -> list[str]:
    """Return the arms that run on this device."""
    return [arm for arm in ARMS if device.type == "cuda" or arm not in NEEDS_GPU]


def measure(
    arms: Sequence[str],
    model: str,
    caches: CompileCaches,
    *,
    rounds: int = 1,
    preload: bool = True,
    keep: Callable[[list[Figures]], object] = bool,
) -> list[Figures]:
    """Measure every arm with cold and warm caches: seconds since its process began, by stage.

    Args:
        arms: names in `ARMS`.
        model: as `python -m bench` takes it.
        caches: where the processes compile to.
        rounds: processes of each; the figures are their medians.
        preload: load what CUDA loads at its first use in a thread, in every arm.
        keep: called with all figures so far after each process.

    Raises:
        RuntimeError: a process failed.
    """
    found: dict[tuple[str, str], list[Figures]] = {}
    figures: list[Figures] = []
    for _, arm, cache in itertools.product(range(rounds), arms, CACHES):
        taken = _one(arm, cache, model, caches, preload=preload)
        found.setdefault((arm, cache), []).append(taken)
        figures = [medians(each) | {"rounds": [one["seconds"] for one in each]} for each in found.values()]
        for line in _lines(taken):
            say(f"first token: {arm}, {cache} caches: {line}")
        keep(figures)
    return figures


def _one(arm: str, cache: str, model: str, caches: CompileCaches, *, preload: bool) -> Figures:
    say(f"first token: {arm}, {cache} caches ...")
    folder = caches.folder(arm, cache)
    environment = cache_environment(folder) | {"FLASHINFER_WORKSPACE_BASE": str(folder)}
    line = [sys.executable, "-m", "bench.startup.first_token_process", "--arm", arm, "--model", model]
    line += [] if preload else ["--no-preload"]
    return {"arm": arm, "cache": cache} | run_worker([*line, "--began", repr(time.time())], environment, TIMEOUT)


def _lines(found: Figures) -> Iterator[str]:
    """Format a process's stages, and what it loaded in a thread."""
    yield in_line(found["seconds"], ".2f", "s")
    if found["preload"]:
        yield f"in the thread: {in_line(found['preload'], '.2f', 's')}"
    yield f"{found['modules']} modules, of heavy packages: {', '.join(found['heavy']) or 'none'}"


def render(figures: Sequence[Figures]) -> str:
    """Format a line for every process: seconds since it began, and since its weights were loaded; then the ratios."""
    lines = [("arm", "caches", *(f"{stage.replace('_', ' ')} s" for stage in STAGES), "token after weights s")]
    for found in figures:
        seconds = found["seconds"]
        stages = [f"{seconds[name]:.2f}" if name in seconds else NOTHING for name in STAGES]
        lines.append((found["arm"], found["cache"], *stages, f"{after_weights(found):.2f}"))
    return "\n".join([grid(lines), *_ratios(figures)])


def after_weights(found: Figures) -> float:
    """Return the seconds from the loaded weights to the first token."""
    return float(found["seconds"]["first_token"] - found["seconds"]["weights"])


def _ratios(figures: Sequence[Figures]) -> Iterator[str]:
    tokens = {(one["arm"], one["cache"]): one["seconds"]["first_token"] for one in figures}
    for (arm, cache), seconds in tokens.items():
        compiled = tokens.get(("compiled-piecewise", cache))
        if compiled and arm.startswith("simplegraph"):
            yield f"first token of {arm} over compiled-piecewise, {cache} caches: {seconds / compiled:.2f}"


def main(arguments: list[str] | None = None) -> int:
    """Measure all arms, each in its own process."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup.first_token", description=__doc__)
    add_model(parser)
    add_names(parser, "--arms", ARMS, "those that run on this device by default")
    parser.add_argument("--rounds", type=count, default=1, help="processes of each arm; 1 by default")
    parser.add_argument("--no-preload", action="store_true", help="load everything where it is used first")
    add_json(parser, OUT / "first_token.json")
    options = parser.parse_args(arguments)
    device = device_of()
    model = options.model or ("8b" if device.type == "cuda" else "tiny")
    arms = options.arms or default_arms(device)

    def keep(figures: list[Figures]) -> None:
        # Described by a process that measured: this one asks the GPU nothing while they do.
        described = {"preload": not options.no_preload, "results": figures}
        save_figures(options.json, described, figures[0]["environment"])

    with tempfile.TemporaryDirectory() as folder:
        caches = CompileCaches(Path(folder))
        figures = measure(arms, model, caches, rounds=options.rounds, preload=not options.no_preload, keep=keep)
    print(render(figures))
    if device.type == "cpu":
        print(NOT_SPEED)
    return 0


if __name__ == "__main__":
    sys.exit(main())
