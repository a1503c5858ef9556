"""Run random changes between calls: ``python -m tests.fuzz.changes --calls 50000 --workers 2 [--without-versions]``.

What graphs read is replaced, moved, freed, filled, resized, reordered, hooked, and brought back; every answer must be
that of an eager twin which is changed alike. It counts captures and recaptures: as many with versions of dicts, which
say when to look, as without. A program that differs is made smaller and printed as text that runs by itself.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import importlib
import itertools
import random
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any
from unittest import mock

from tests.fuzz.__main__ import reports
from tests.fuzz.grammar import AND_BACK, CHANGE_PROMISES, CHANGES, OWN_DICT, PENDING, PLAIN, SLEEP
from tests.fuzz.program import Program, prepare, shrunk

VERSIONS, READING = "simplegraph.guard.versions", "simplegraph.guard.reading"
SIZES = ([4], [4, 8], [1, 2, 4])
ARGUMENTS = ("x", "x", "indices")  # of all calls of a program
BLOCK = 50  # programs after which it says how many calls there were
MODES = ("no_grad", "inference_mode", "no_grad autocast", "no_grad eager", "grad")


@contextlib.contextmanager
def without_versions() -> Iterator[None]:
    """Let guards read all values at every call, as with a torch that has no versions of dicts."""
    try:
        versions = importlib.import_module(VERSIONS)
    except ModuleNotFoundError:
        yield
        return
    with mock.patch.object(versions, "dict_version", None):
        yield


@contextlib.contextmanager
def asking_allocator() -> Iterator[None]:
    """Let launches before a comparison ask the allocator what it released, as for modules of many tensors."""
    with mock.patch.object(importlib.import_module(READING), "FEW_TENSORS", -1):
        yield


def changing_program(seed: int, without: Collection[str] = ()) -> Program:
    """A module that graphs serve, and changes of it between runs of calls; `without` names promises left out."""
    rng = random.Random(seed)
    pieces = tuple(rng.sample(sorted(PLAIN), rng.randint(0, 2)))
    settings: dict[str, Any] = {"capture_sizes": rng.choice(SIZES)}
    if rng.random() < 0.3:
        settings["outputs"] = "static"
    if rng.random() < 0.5:
        settings["mixin"] = True
    if rng.random() < 0.15:
        settings["sleepable"] = True
    if any("break" in piece for piece in pieces) or rng.random() < 0.1:
        settings["mode"] = "PIECEWISE"
    return Program(seed, pieces, "h", settings, rng.random() < 0.1, tuple(_events(rng, settings, without)))


def _events(rng: random.Random, settings: dict[str, Any], without: Collection[str]) -> Iterator[tuple[Any, ...]]:
    """Runs of calls that end in replays, with a change, or two, before each; half are taken back later."""
    rows, mode, arguments = rng.choice(settings["capture_sizes"]), rng.choice(MODES[:2]), rng.choice(ARGUMENTS)
    left_out = {name for name, promise in CHANGE_PROMISES.items() if promise in without}
    left_out -= {f"{name} (and back)" for name in OWN_DICT} if "mixin" in settings else set()
    there = [name for name in AND_BACK if f"{name} (and back)" not in left_out]
    backs_and_there = {f"{name}{end}" for name in AND_BACK for end in (" (and back)", ", back")}
    others = sorted(CHANGES.keys() - backs_and_there - left_out)
    backs: list[str] = []
    yield from _calls(rng, rows, mode, arguments, 5)
    for _ in range(rng.randint(4, 8)):
        for _ in range(rng.choice([1, 1, 1, 2])):
            kind = rng.random()
            if backs and kind < 0.4:
                yield "change", f"{backs.pop(rng.randrange(len(backs)))}, back"
            elif kind < 0.8:
                name = rng.choice(there)
                backs.append(name)
                yield "change", f"{name} (and back)"
            else:
                yield "change", rng.choice(others)
        if "sleepable" in settings:
            yield "graphs", SLEEP
        if rng.random() < 0.1:
            yield "call", rows, rng.choice(MODES), arguments
        yield from _calls(rng, rows, mode, arguments, rng.randint(1, 5))


def _calls(rng: random.Random, rows: int, mode: str, arguments: str, count: int) -> Iterator[tuple[Any, ...]]:
    for _ in range(count):
        yield "call", rows if rng.random() < 0.9 else rng.randint(1, rows), mode, arguments


def outcome(
    seed: int, device: str, *, versions: bool = True, without: Collection[str] = (), whole: bool = False
) -> tuple[str | None, collections.Counter[str]]:
    """Run the program of a seed; return what differs, with its text, or None, and what its graphs did."""
    prepare()
    program = changing_program(seed, without)
    with contextlib.ExitStack() as stack:
        if not versions:
            stack.enter_context(without_versions())
        if seed % 2:
            stack.enter_context(asking_allocator())
        found, done = program.run(device)
        done["calls"] = program.calls
        if found is None:
            return None, done
        small = program if whole else shrunk(program, lambda tried: tried.difference(device) is not None)
        return f"# seed {seed}: {found}\n# made smaller: {small.difference(device)}\n{small.text(device)}", done


def arguments(name: str, doc: str, gaps: Collection[str]) -> argparse.ArgumentParser:
    """Read the arguments of a command that runs programs until there were so many calls.

    Args:
        name: of the module that is run.
        doc: its own; the first line describes the command.
        gaps: promises that are left out unless told otherwise.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=doc.splitlines()[0])
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes that run programs at the same time")
    parser.add_argument("--most", type=int, default=10, help="stop after so many programs that differ")
    parser.add_argument("--whole", action="store_true", help="print programs as they are, not made smaller")
    parser.add_argument("--without", default=",".join(sorted(gaps)), help="promises left out, by comma (%(default)s)")
    return parser


def run_programs(run: Callable[[int], tuple[str | None, collections.Counter[str]]], options: argparse.Namespace) -> int:
    """Run the programs of seeds until there were so many calls; return 1 if any differs."""
    total, different, began = collections.Counter[str](), 0, time.perf_counter()
    seeds = itertools.count(options.seed)
    while total["calls"] < options.calls and different < options.most:
        for found, done in reports(run, itertools.islice(seeds, BLOCK), options.workers):
            total += done
            different += found is not None
            if found is not None:
                print(found, flush=True)
        counted = ", ".join(f"{count} {name}" for name, count in sorted(total.items()))
        print(f"{time.perf_counter() - began:.0f} s, {counted}: {different} programs differ", flush=True)
    return 1 if different else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run programs until there were so many calls; 1 if any differs."""
    parser = arguments("tests.fuzz.changes", __doc__, PENDING)
    parser.add_argument("--without-versions", action="store_true", help="as with a torch without versions of dicts")
    options = parser.parse_args(argv)
    run = functools.partial(
        outcome,
        device=options.device,
        versions=not options.without_versions,
        without=set(filter(None, options.without.split(","))),
        whole=options.whole,
    )
    return run_programs(run, options)


if __name__ == "__main__":
    sys.exit(main())
