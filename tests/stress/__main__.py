"""Run the stress test: ``python -m tests.stress --device cuda --replays 50000 --modules 200 --seconds 480``.

Random modules are served beside their eager twins while memory is churned and released, weights move, graphs are
dropped, and threads and streams change. Progress is printed as it goes, so that a run that is cut off tells as well.
"""

from __future__ import annotations

import argparse
import functools
import pathlib
import sys
from collections.abc import Sequence

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

import torch

from tests.stress.stress import Stress


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; 1 if anything differs, 2 if the time was over before there were enough replays."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--replays", type=int, default=2000)
    parser.add_argument("--modules", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=480)
    parser.add_argument("--seed", type=int, default=0, help="of the first module")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    tell = functools.partial(print, flush=True)
    counts = {"replays": options.replays, "modules": options.modules, "seconds": options.seconds}
    outcome = Stress(options.device, **counts, seed=options.seed, tell=tell).run()
    enough = outcome.replays >= options.replays and outcome.modules >= options.modules
    tell(f"{'done' if enough else 'CUT OFF'}: {outcome}")
    return 1 if outcome.differences else 0 if enough else 2


if __name__ == "__main__":
    sys.exit(main())
