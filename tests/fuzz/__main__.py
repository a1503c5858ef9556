"""Run random programs: ``python -m tests.fuzz --calls 20000 --seed 0 --device cuda``.

Each program is a module, its settings, and calls and changes of it; a module with graphs and its eager twin must do the
same at every call. A program that differs is made smaller and printed as text that runs by itself.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import time
from collections.abc import Sequence

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

import torch

from tests.fuzz.grammar import PENDING
from tests.fuzz.program import random_program, shrunk


def main(argv: Sequence[str] | None = None) -> int:
    """Run programs until there were so many calls; 1 if any differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--without", default=",".join(sorted(PENDING)), help="promises left out, by comma (%(default)s)"
    )
    parser.add_argument("--most", type=int, default=10, help="stop after so many programs that differ")
    parser.add_argument("--whole", action="store_true", help="print programs as they are, not made smaller")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    without = set(filter(None, options.without.split(",")))
    calls, seed, different, started = 0, options.seed, collections.Counter[str](), time.perf_counter()
    while calls < options.calls and sum(different.values()) < options.most:
        program = random_program(seed, without)
        found = program.difference(options.device)
        if found is not None:
            small = program
            if not options.whole:
                small = shrunk(program, lambda tried: tried.difference(options.device) is not None)
            different[", ".join((*small.pieces, small.output))] += 1
            again = small.difference(options.device)
            print(f"# seed {seed}: {found}\n# made smaller: {again}\n{small.text(options.device)}", flush=True)
        calls, seed = calls + program.calls, seed + 1
    seconds = time.perf_counter() - started
    print(f"{seed - options.seed} programs, {calls} calls, {seconds:.0f} s: {sum(different.values())} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
