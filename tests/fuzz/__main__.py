"""Run random programs: ``python -m tests.fuzz --calls 20000 --seed 0 --device cuda --workers 8``.

Each program is a module, its settings, and calls and changes of it; a module with graphs and its eager twin must do the
same at every call. A program that differs is made smaller and printed as text that runs by itself.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import multiprocessing
import pathlib
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TypeVar

sys.path.append(str(pathlib.Path(__file__).parent.parent / "support"))

from tests.fuzz.grammar import PENDING
from tests.fuzz.program import random_program, report

SAY_EVERY = 10.0  # seconds
T = TypeVar("T")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--without", default=",".join(sorted(PENDING)), help="promises left out, by comma (%(default)s)"
    )
    parser.add_argument("--workers", type=int, default=1, help="processes that run programs at the same time")
    parser.add_argument("--most", type=int, default=10, help="stop after so many programs that differ")
    parser.add_argument("--whole", action="store_true", help="print programs as they are, not made smaller")
    return parser.parse_args(argv)


def seeds_of(first: int, calls: int, without: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield the seeds of programs that together make so many calls, each with its number of calls."""
    seed = first
    while calls > 0:
        count = random_program(seed, without).calls
        yield seed, count
        seed, calls = seed + 1, calls - count


def reports(run: Callable[[int], T], seeds: Iterable[int], workers: int) -> Iterator[T]:
    """Yield what each program's run says, those of several processes in the order of the seeds."""
    if workers == 1:
        yield from map(run, seeds)
        return
    processes = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=processes) as pool:
        try:
            yield from pool.map(run, seeds)
        finally:
            pool.shutdown(cancel_futures=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run programs until there were so many calls; 1 if any differs."""
    options = parsed(argv)
    without = set(filter(None, options.without.split(",")))
    programs = list(seeds_of(options.seed, options.calls, without))
    run = functools.partial(report, device=options.device, without=without, whole=options.whole)
    started = said = time.perf_counter()
    done = calls = different = 0
    for (_, count), found in zip(programs, reports(run, [seed for seed, _ in programs], options.workers), strict=False):
        done, calls, now = done + 1, calls + count, time.perf_counter()
        if found is not None:
            different += 1
            print(found, flush=True)
        if now - said > SAY_EVERY:
            print(f"{done} of {len(programs)} programs, {now - started:.0f} s: {different} differ", flush=True)
            said = now
        if different == options.most:
            break
    seconds = time.perf_counter() - started
    print(f"{done} programs, {calls} calls, {seconds:.0f} s: {different} differ", flush=True)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
