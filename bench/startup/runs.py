"""Runs arms in fresh processes."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from bench.arms import ARMS, COMPILED, load_arm
from bench.arms.base import NotAvailable
from bench.startup.processes import CompileCaches, cache_environment, run_worker
from bench.startup.results import Result, combine
from bench.tools.measure import device_of, say


class Run(NamedTuple):
    """One arm, with the state of its compile cache if it has one."""

    arm: str
    cache: str | None = None

    @property
    def label(self) -> str:
        """The run's name in tables."""
        return self.arm if self.cache is None else f"{self.arm} ({self.cache})"


@dataclasses.dataclass(frozen=True)
class StartupPlan:
    """The settings that all runs share.

    Args:
        model: tiny, 8b, 70b, or a folder with a config.json.
        sizes: batch sizes to have ready.
        device: cuda, cpu, or None for the best there is.
        rounds: fresh processes per run, of the arms that compile nothing.
        compiled_rounds: the same for those that compile.
        steps: calls that a step time is the median of.
        timeout: seconds a process may take.
        lm_head: True if the model returns logits.
        tp: ranks of tensor parallelism, each a process that starts its own workers.
        layers: replaces the model's number of layers.
        preloaded: call `simplegraph.preload` before the clock, in every arm alike.
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
    preloaded: bool = False

    def rounds_of(self, run: Run) -> int:
        """Return the number of processes of a run; compiled arms take fewer, since they are slow."""
        return self.compiled_rounds if run.arm in COMPILED else self.rounds


def runs_of(arms: Iterable[str]) -> list[Run]:
    """Return the runs of some arms: compiled ones cold, then warm.

    Raises:
        KeyError: no arm has this name.
    """
    runs = []
    for arm in arms:
        if arm not in ARMS:
            raise KeyError(f"no arm is called {arm!r}; the arms are {', '.join(ARMS)}.")
        runs += [Run(arm, cache) for cache in (("cold", "warm") if arm in COMPILED else (None,))]
    return runs


def measure(run: Run, plan: StartupPlan, caches: CompileCaches) -> Result:
    """Run one process of a run; any error in it is returned as a failed result."""
    missing = unavailable(run.arm, plan)
    if missing is not None:
        return {"arm": run.arm, "cache": run.cache, "status": "not available", "error": missing}
    try:
        environment = cache_environment(caches.folder(run.arm, run.cache))
        return run_worker(command(run, plan), environment, plan.timeout)
    except RuntimeError as error:
        return {"arm": run.arm, "cache": run.cache, "status": "failed", "error": str(error)}


def unavailable(arm: str, plan: StartupPlan) -> str | None:
    """Return why an arm cannot run without a GPU, before a process is started for it; None if it may."""
    device = device_of(plan.device)
    if device.type == "cuda":
        return None  # what an arm imports to find out, its own process imports
    try:
        load_arm(arm).check_available(device)
    except NotAvailable as reason:
        return str(reason)
    return None


def command(run: Run, plan: StartupPlan) -> list[str]:
    """Return the worker's command line."""
    sizes = ",".join(map(str, plan.sizes))
    line = [sys.executable, "-m", "bench.startup.worker", "--arm", run.arm, "--model", plan.model]
    line += ["--sizes", sizes, "--steps", str(plan.steps)]
    line += ["--device", plan.device] if plan.device else []
    line += ["--cache", run.cache] if run.cache else []
    line += ["--layers", str(plan.layers)] if plan.layers else []
    line += ["--tp", str(plan.tp), "--tp-run", str(next(_meetings))] if plan.tp > 1 else []
    line += ["--preloaded"] if plan.preloaded else []
    return line + (["--lm-head"] if plan.lm_head else [])


_meetings = itertools.count()  # every rank runs the same arms in the same order, so it counts them alike


def run_all(
    runs: Sequence[Run],
    plan: StartupPlan,
    caches: CompileCaches,
    keep: Callable[[dict[str, Result]], object] = lambda results: None,
) -> dict[str, Result]:
    """Run everything, and return each run's combined result by label.

    Args:
        keep: called with all results so far after each run, so that one cut short loses none of them.
    """
    results: dict[str, Result] = {}
    for run in runs:
        results[run.label] = combine(measure_rounds(run, plan, caches))
        keep(results)
    return results


def measure_rounds(run: Run, plan: StartupPlan, caches: CompileCaches) -> list[Result]:
    """Every process of one run, and no further one after the first that has no figures."""
    results: list[Result] = []
    for number in range(plan.rounds_of(run)):
        say(f"{run.label}, process {number + 1} of {plan.rounds_of(run)} ...")
        results.append(measure(run, plan, caches))
        if results[-1]["status"] != "ok":
            break
    return results
