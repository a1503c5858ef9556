"""Runs the arms, each in a fresh process, and puts their rounds together."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.arms import ARMS, COMPILED
from bench.tools.environment import ROOT
from bench.tools.measure import say

Result = dict[str, Any]

ERROR_LINES = 15
POLL_SECONDS = 0.2


class Run(NamedTuple):
    """One arm, with the state of its compile cache where it has one."""

    arm: str
    cache: str | None = None

    @property
    def label(self) -> str:
        """As the tables name it."""
        return self.arm if self.cache is None else f"{self.arm} ({self.cache})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What every run has in common.

    Args:
        model: tiny, 8b, 70b, or a folder with a config.json.
        sizes: batch sizes to have ready.
        device: cuda, cpu, or None for the best there is.
        rounds: fresh processes per run, of the arms that compile nothing.
        compiled_rounds: the same for those that compile.
        steps: calls that a step time is the median of.
        timeout: seconds a process may take.
        lm_head: whether the model returns logits.
        tp: ranks of tensor parallelism, each a process of its own that starts its own workers.
        layers: in place of the model's own number.
    """

    model: str
    sizes: tuple[int, ...]
    device: str | None = None
    rounds: int = 3
    compiled_rounds: int = 1
    steps: int = 50
    timeout: float = 300.0
    lm_head: bool = False
    tp: int = 1
    layers: int | None = None

    def rounds_of(self, run: Run) -> int:
        """How many processes a run takes: one with an empty cache, or none, says as much as it costs."""
        return self.compiled_rounds if run.arm in COMPILED or run.arm == "inductor-partition" else self.rounds


class CompileCaches:
    """A fresh folder per cold run; a warm run takes the last that its arm's cold run filled."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._filled: dict[str, Path] = {}

    def folder(self, run: Run) -> Path:
        """Where this run's compilers keep their cache.

        Raises:
            RuntimeError: a warm run before its cold one.
        """
        if run.cache != "warm":
            self._filled[run.arm] = Path(tempfile.mkdtemp(prefix=f"{run.arm}-", dir=self._root))
        if run.arm not in self._filled:
            raise RuntimeError(f"{run.label} needs the cache of {run.arm} (cold), which has not run.")
        return self._filled[run.arm]


def runs_of(arms: Iterable[str]) -> list[Run]:
    """The runs of some arms: compiled ones cold, then warm.

    Raises:
        KeyError: no arm has this name.
    """
    runs = []
    for arm in arms:
        if arm not in ARMS:
            raise KeyError(f"no arm is called {arm!r}; the arms are {', '.join(ARMS)}.")
        runs += [Run(arm, cache) for cache in (("cold", "warm") if arm in COMPILED else (None,))]
    return runs


def measure(run: Run, plan: Plan, caches: CompileCaches) -> Result:
    """One process of one run; whatever goes wrong in it comes back as a failed result."""
    say(f"{run.label} ...")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        try:
            environment = cache_environment(caches.folder(run))
            code, tail = run_worker(command(run, plan, out), environment, Path(folder) / "stderr", plan.timeout)
        except RuntimeError as error:
            return failed(run, str(error))
        if out.is_file():
            return json.loads(out.read_text())
    return failed(run, f"the process ended with status {code} and no result:\n{tail}")


def failed(run: Run, error: str) -> Result:
    """The result of a run that has no figures."""
    return {"arm": run.arm, "cache": run.cache, "status": "failed", "error": error}


def command(run: Run, plan: Plan, out: Path) -> list[str]:
    """The worker's command line."""
    sizes = ",".join(map(str, plan.sizes))
    line = [sys.executable, "-m", "bench.startup.worker", "--arm", run.arm, "--json", str(out), "--model", plan.model]
    line += ["--sizes", sizes, "--steps", str(plan.steps)]
    line += ["--device", plan.device] if plan.device else []
    line += ["--cache", run.cache] if run.cache else []
    line += ["--layers", str(plan.layers)] if plan.layers else []
    line += ["--tp", str(plan.tp), "--tp-run", str(next(_meetings))] if plan.tp > 1 else []
    return line + (["--lm-head"] if plan.lm_head else [])


_meetings = itertools.count()  # every rank runs the same arms in the same order, so it counts them alike


def cache_environment(folder: Path) -> dict[str, str]:
    """The process environment with every compile cache of torch switched on, in this folder alone."""
    switches = {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
    }
    return {**os.environ, **switches}


def run_worker(line: list[str], environment: dict[str, str], log: Path, timeout: float) -> tuple[int, str]:
    """Run a worker, showing its stderr as it comes; (status, last lines).

    Through a file, not a pipe: compilers leave processes behind that would hold a pipe open.
    """
    deadline = time.monotonic() + timeout
    with log.open("w") as written, log.open(errors="replace") as read:
        process = subprocess.Popen(line, stderr=written, env=environment, start_new_session=True)
        try:
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                sys.stderr.write(read.read())
        finally:
            late = process.poll() is None
            if late:
                os.killpg(process.pid, signal.SIGKILL)
        sys.stderr.write(read.read())
    if late:
        raise RuntimeError(f"no result within {timeout:.0f} s; last lines:\n{_last(log.read_text())}")
    return process.wait(), _last(log.read_text())


def _last(text: str) -> str:
    return "\n".join(text.splitlines()[-ERROR_LINES:])


def combine(results: Sequence[Result]) -> Result:
    """The rounds of one run as one result: medians of the times, the rest as in the first; a failure if one failed."""
    bad = next((result for result in results if result["status"] != "ok"), None)
    if bad is not None:
        return bad
    combined = _median_of(list(results))
    return combined | {"rounds": [result["seconds"] for result in results]}


def _median_of(values: list[Any]) -> Any:
    """Medians of floats, through dicts; the first of everything else."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _median_of([value[key] for value in values if key in value]) for key in first}
    return statistics.median(values) if isinstance(first, float) else first


def run_all(runs: Sequence[Run], plan: Plan, caches: CompileCaches) -> dict[str, Result]:
    """Every run's combined result, by label."""
    return {run.label: combine([measure(run, plan, caches) for _ in range(plan.rounds_of(run))]) for run in runs}


def comparison(results: dict[str, Result]) -> dict[str, float]:
    """What this library is judged by, as ratios; of those runs that have figures.

    Times: how many times sooner than the other all sizes are ready. Memory: bytes kept, over the plain loop's.
    Steps: the time on DTensors, over that on plain tensors, both in graphs.
    The figures called again are of a second start in the same process: the libraries' own start is not in them.
    """
    ratios = {
        "ready_plain_loop_over_ours": _ratio(_ready(results, "plain-loop"), _ready(results, "simplegraph")),
        "again_plain_loop_over_ours": _ratio(_again(results, "plain-loop"), _again(results, "simplegraph")),
        "memory_ours_over_plain_loop": _ratio(_kept(results, "simplegraph"), _kept(results, "plain-loop")),
        "again_breakable_over_our_piecewise": _ratio(
            _again(results, "breakable"), _again(results, "simplegraph-piecewise")
        ),
        "memory_our_piecewise_over_breakable": _ratio(
            _kept(results, "simplegraph-piecewise"), _kept(results, "breakable")
        ),
    }
    plain, on_dtensors = (_steps(results, label) for label in ("simplegraph", "simplegraph-dtensor"))
    for batch, ms in on_dtensors.items():
        ratios[f"step_dtensor_over_plain_at_{batch}"] = _ratio(ms, plain.get(batch))
    for cache in ("cold", "warm"):
        other = _ready(results, Run("compiled-piecewise", cache).label)
        ratios[f"ready_piecewise_{cache}_over_ours"] = _ratio(other, _ready(results, "simplegraph"))
    return {name: ratio for name, ratio in ratios.items() if ratio is not None}


def figure(result: Result | None, *path: str) -> float | None:
    """A nested figure of a result, None where it has none."""
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _ready(results: dict[str, Result], label: str) -> float | None:
    return figure(results.get(label), "seconds", "ready")


def _again(results: dict[str, Result], label: str) -> float | None:
    return figure(results.get(label), "primed", "seconds", "ready")


def _steps(results: dict[str, Result], label: str) -> dict[str, float]:
    """Step times by batch; none where the run has no figures."""
    steps: dict[str, float] = results.get(label, {}).get("step_ms", {})
    return steps


def _kept(results: dict[str, Result], label: str) -> float | None:
    return figure(results.get(label), "primed", "device_bytes")


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None
