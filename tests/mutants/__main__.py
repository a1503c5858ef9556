"""Run the tests against mutants of the library: ``python -m tests.mutants --out tests/mutants/RESULTS.md``.

Each mutant is a copy of the package with one mistake in it. It is killed if one of its tests fails; a mutant that
survives shows what no test would notice. All of them take an hour or more: ``--sample 20 --seed TEXT`` runs 20 of them,
which are the same for the same text.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.mutants.mutants import MUTANTS, Mutant

ROOT = pathlib.Path(__file__).parent.parent.parent
COPIED = ("simplegraph", "tests", "setup.cfg", "setup.py", "README.md")


class Stale(Exception):
    """A mutant's text is not in the library any more, or more than once."""


def mutate(mutant: Mutant, root: pathlib.Path) -> None:
    """Make the mistake in a copy of the package."""
    path = root / "simplegraph" / mutant.file
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise Stale(f"{mutant.file} holds {text.count(mutant.old)} times {mutant.old!r} ({mutant.name})")
    path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")


def killer(mutant: Mutant) -> str | None:
    """The first test that fails for a mutant; None if none does."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name in COPIED:
            source = ROOT / name
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=ignored) if source.is_dir() else shutil.copy(source, root)
        mutate(mutant, root)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", *mutant.tests]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    failed = [line for line in done.stdout.splitlines() if line.startswith("FAILED ")]
    if done.returncode == 1 and failed:
        return failed[0].removeprefix("FAILED ").split(" - ")[0]
    if done.returncode != 0:
        said = done.stdout[-2000:] + done.stderr[-2000:]
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}\n{said}")
    return None


def table(found: Sequence[tuple[Mutant, str | None]]) -> str:
    """The mutants and what killed them, in Markdown."""
    lines = ["| mistake | file | killed by |", "|---|---|---|"]
    for mutant, test in found:
        lines.append(f"| {mutant.name} | {mutant.file} | {f'`{test}`' if test else '**survives**'} |")
    killed = sum(test is not None for _, test in found)
    return "\n".join([f"{killed} of {len(found)} mutants are killed.", "", *lines]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run all mutants, those whose name holds a text, or a sample of them; 1 if any survives."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="mutants whose name holds this")
    parser.add_argument("--sample", type=int, help="so many of them, chosen by --seed")
    parser.add_argument("--seed", default="0", help="any text, such as a commit's hash")
    parser.add_argument("--out", type=pathlib.Path, help="write the table there")
    options = parser.parse_args(argv)
    mutants = [mutant for mutant in MUTANTS if options.only in mutant.name]
    if options.sample is not None:
        mutants = random.Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
        print(f"{len(mutants)} of {len(MUTANTS)} mutants, chosen by --seed {options.seed}", flush=True)
    found = []
    for mutant in mutants:
        started = time.perf_counter()
        found.append((mutant, killer(mutant)))
        print(f"{time.perf_counter() - started:4.0f} s  {mutant.name}: {found[-1][1] or 'SURVIVES'}", flush=True)
    print(f"{sum(test is not None for _, test in found)} of {len(found)} mutants are killed.")
    if options.out:
        options.out.write_text(table(found), encoding="utf-8")
    return 1 if any(test is None for _, test in found) else 0


if __name__ == "__main__":
    sys.exit(main())
