"""Runs jobs, each with its time limit and its log, and judges the files that they write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.figures.jobs import JSON, Job
from bench.tools import environment

PYTHON = sys.executable
LEAST = 5.0  # seconds that a job is begun for
END_SECONDS = 15.0  # that a job has to end its processes when it is cut
DONE, KNOWN, LEFT_OUT, CUT, FAILED, LACKS = "done", "measured before", "left out", "CUT", "FAILED", "LACKS"
BAD = (CUT, FAILED, LACKS)


class Outcome(NamedTuple):
    """The end of a job.

    Attributes:
        job: which.
        status: one of the above.
        seconds: that it took.
        detail: why, or what the file lacks.
    """

    job: Job
    status: str
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        tables = f" [{', '.join(self.job.tables)}]" if self.job.tables else ""
        taken = f", {self.seconds:.0f} s" if self.seconds else ""
        return f"{self.job.file}{tables}: {self.status}{taken}" + (f": {self.detail}" if self.detail else "")


class Runner:
    """Runs jobs into a folder.

    A file is written under ``partial`` first, and moved when its job has ended well; a job whose file is there, of this
    commit, is not run again.

    Args:
        folder: of the figures and logs.
        gpus: ids of the GPUs, as in CUDA_VISIBLE_DEVICES; none on a machine without one.
        total: seconds after which no job is begun, and a running one is cut.
        again: True to measure what has been measured.
        tell: called with every outcome as it comes.
    """

    def __init__(
        self,
        folder: Path,
        gpus: Sequence[str],
        total: float,
        *,
        again: bool = False,
        tell: Callable[[Outcome], object] = print,
    ) -> None:
        self._folder, self._gpus, self._again, self._tell = folder, list(gpus), again, tell
        self._deadline = time.monotonic() + total
        self._commit = environment.commit()

    def run(self, jobs: Iterable[Job]) -> list[Outcome]:
        """Run jobs one after the other, and tell how each has ended."""
        outcomes = []
        for job in jobs:
            outcomes.append(self._outcome(job, self._gpus[: job.gpus]))
            self._tell(outcomes[-1])
        return outcomes

    def _outcome(self, job: Job, gpus: Sequence[str]) -> Outcome:
        if job.gpus > max(1, len(gpus)):
            return Outcome(job, LEFT_OUT, detail=f"it needs {job.gpus} GPUs, here are {len(self._gpus)}")
        file = self._folder / f"{job.file}.json"
        if file.is_file() and not self._again and _commit(file) == self._commit:
            return Outcome(job, LACKS if lacks(file) else KNOWN, detail=lacks(file))
        limit = min(job.seconds, self._deadline - time.monotonic())
        if limit < LEAST:
            return Outcome(job, LEFT_OUT, detail="the time is over; the same command goes on with it")
        partial = self._folder / "partial" / f"{job.file}.json"
        for path in (file, partial):
            path.parent.mkdir(parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
        began = time.monotonic()
        log = file.with_suffix(".log")
        status = self._process(job, gpus, partial, log, limit)
        taken = time.monotonic() - began
        so_far = f", figures so far in {partial}" if partial.is_file() else ""
        if status is None:
            return Outcome(job, CUT, taken, f"its limit was {limit:.0f} s{so_far}; see {log}")
        if status or not partial.is_file():
            return Outcome(job, FAILED, taken, f"status {status}{so_far}: {last_lines(log, 1)[0]}; see {log}")
        partial.replace(file)
        return Outcome(job, LACKS if lacks(file) else DONE, taken, lacks(file))

    def _process(self, job: Job, gpus: Sequence[str], file: Path, log: Path, limit: float) -> int | None:
        """Run the command; return its status, or None if it took too long."""
        paths = os.pathsep.join(filter(None, (str(environment.ROOT), os.environ.get("PYTHONPATH"))))
        variables = {**os.environ, **job.variables, "PYTHONPATH": paths, "BENCH_COMMIT": self._commit}
        if gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        line = [PYTHON, *(part.replace(JSON, str(file)) for part in job.command)]
        with log.open("w", encoding="utf-8") as output:
            process = subprocess.Popen(
                line,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                cwd=environment.ROOT,
                start_new_session=True,
            )
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGINT)  # it ends the processes that it has started in sessions of their own
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
                return None
            finally:
                _end(process)


def lacks(file: Path) -> str:
    """Say what a file of figures does not say about machine, versions and commit; empty if it says all."""
    missing = environment.missing(_machine(file))
    return f"no {', '.join(missing)}" if missing else ""


def _machine(file: Path) -> dict[str, object]:
    found = json.loads(file.read_text(encoding="utf-8"))
    machine = found.get("machine_info")
    return machine if isinstance(machine, dict) else {}


def _commit(file: Path) -> object:
    with contextlib.suppress(ValueError):
        return _machine(file).get("commit")
    return None


def last_lines(log: Path, number: int) -> list[str]:
    """Return the last lines of a log that are not blank."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return [line.rstrip() for line in lines if line.strip()][-number:] or ["no output"]


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command and what it started: compilers leave processes behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def gpu_ids() -> list[str]:
    """List the GPUs that may be used; their processes, not this one, start CUDA."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [name for name in given.split(",") if name]
    import torch

    return [str(index) for index in range(torch.cuda.device_count())]


def commits(outcomes: Sequence[Outcome], folder: Path) -> Iterator[str]:
    """Say which commits the files have, if they are not of one, clean."""
    files = (folder / f"{one.job.file}.json" for one in outcomes)
    found = {str(_commit(file)) for file in files if file.is_file()}
    if len(found) > 1:
        yield f"the files are of {len(found)} commits: {', '.join(sorted(found))}"
    if any("modified" in commit for commit in found):
        yield "the checkout has changes that are not committed"
