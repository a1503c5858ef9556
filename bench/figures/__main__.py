"""``python -m bench.figures FOLDER``: measures every table of docs/figures.md, each file by its own command.

It prints a line for each as it ends. What is there, of this commit, is not measured again, so the same command goes on
where it was cut. Copied to bench/results, the files become tables by `python -m docs.tools`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from bench.figures.jobs import HEADLINE_SECONDS, all_jobs, headline_jobs
from bench.figures.running import BAD, Outcome, Runner, commits, gpu_ids, last_lines
from bench.tools.options import positive

SHOWN = 60  # lines of a headline's log


def main(arguments: list[str] | None = None) -> int:
    """Measure; return 1 if a job failed or was cut, or a file lacks what figures need to be repeated."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the files of figures and the logs")
    names = "tables or files, with * and ?, separated by commas; by default all that have a table"
    parser.add_argument("--only", metavar="NAME[,NAME]", help=names)
    headline = (
        "the jobs of README's and the first tables, the most important first, at one commit; one H200, 25 minutes"
    )
    parser.add_argument("--headline", action="store_true", help=headline)
    total = "seconds after which no job begins and a running one is cut; without limit by default, 1500 with --headline"
    parser.add_argument("--total", type=positive, help=total)
    parser.add_argument("--again", action="store_true", help="measure what has been measured at this commit, too")
    parser.add_argument("--list", action="store_true", help="print the jobs and run none")
    options = parser.parse_args(arguments)
    jobs = headline_jobs() if options.headline else [job for job in all_jobs() if job.tables or options.only]
    jobs = [job for job in jobs if not options.only or job.is_named(options.only.split(","))]
    if not jobs:
        parser.error(f"no table and no file is named {options.only}; --list prints all")
    if options.list:
        for job in jobs:
            print(
                f"{job.file} [{', '.join(job.tables)}]: {job.gpus} GPUs, {job.seconds:.0f} s: {' '.join(job.command)}"
            )
        return 0
    ended = 0

    def tell(outcome: Outcome) -> None:
        nonlocal ended
        ended += 1
        print(f"{ended}/{len(jobs)} {outcome}", flush=True)
        if options.headline and outcome.seconds:
            print("\n".join(last_lines(folder / f"{outcome.job.file}.log", SHOWN)), flush=True)

    folder, total = options.folder.resolve(), options.total or (HEADLINE_SECONDS if options.headline else float("inf"))
    outcomes = Runner(folder, gpu_ids(), total, again=options.again, tell=tell).run(jobs)
    for line in commits(outcomes, options.folder):
        print(line)
    return int(any(one.status in BAD for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
