"""Run random eager breaks in padded batches: ``python -m tests.fuzz.break_rows --calls 5000 --device cuda``.

Breaks are row-wise, mix rows, count them, change shapes or write; each runs in a mode with breaks and with several
sizes. Every answer must equal eager's, and padded batches of breaks whose rows can be cut must be served by graphs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
from collections.abc import Sequence

import torch

import simplegraph as sg
from tests.graph.breaks.test_rows import EXACT, SERVED, WIDTH, Calling

MODES = ("PIECEWISE", "FULL_AND_PIECEWISE")
SIZES = ([4, 8], [8], [2, 4, 6, 8], [3, 7])
CALLS = 50  # of one model


def wrong_answers(seed: int, device: torch.device) -> tuple[int, str]:
    """Call a random model; return how many answers differ, and what is wrong with it ("" if nothing is)."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kinds = SERVED | EXACT
    names = rng.choices(sorted(kinds), k=rng.choice([1, 1, 2, 3]))
    mode, sizes = rng.choice(MODES), rng.choice(SIZES)
    module = torch.nn.Sequential(*(Calling(*kinds[name]) for name in names)).to(device).eval()
    model = sg.wrap(module, mode=mode, capture_sizes=sizes, progress=False)
    wrong = 0
    with rng.choice([torch.no_grad, torch.inference_mode])():
        for _ in range(CALLS):
            x = torch.randn(rng.randint(1, 8), WIDTH, device=device)
            with sg.eager():
                expected = model(x)
            wrong += not torch.allclose(model(x), expected, rtol=1e-3, atol=1e-4)
    padded = sum(sum(graph.paddings[1:]) for graph in model.graph_stats.graphs.values())
    what = f"seed {seed}: {names}, {mode}, {sizes}: {wrong} wrong, {padded} padded replays"
    served = padded > 0 or not SERVED.keys() >= set(names)
    return wrong, "" if served and not wrong else what


def main(argv: Sequence[str] | None = None) -> int:
    """Make so many calls; 1 if an answer differs or padded batches of row-wise breaks run eagerly."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.break_rows", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first model")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(argv)
    models, wrong, failed = -(-options.calls // CALLS), 0, 0
    for seed in itertools.islice(itertools.count(options.seed), models):
        differ, what = wrong_answers(seed, torch.device(options.device))
        wrong, failed = wrong + differ, failed + bool(what)
        if what:
            print(what, flush=True)
    print(f"{models * CALLS} calls of {models} models: {wrong} wrong, {failed} models at fault", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
