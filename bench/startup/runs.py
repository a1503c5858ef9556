"""Runs arms in fresh processes."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

import simplegraph as sg
from bench.arms import ARMS, COMPILED, load_arm
from bench.arms.base import Arm, NotAvailable, Setup
from bench.arms.correctness import compare_with_eager, counts_to_compare, eager_noise
from bench.models.attention import attention_name
from bench.models.workload import Workload
from bench.tools import compiler, environment, fresh, torchrun
from bench.tools.measure import (
    DeviceMemory,
    Figures,
    Timeline,
    device_of,
    few_threads,
    host_microseconds,
    say,
    step_milliseconds,
)

STEP_BATCHES = (1, 8, 64, 256)
A = TypeVar("A", bound=Arm)


def start(arm_class: type[A], setup: Setup) -> tuple[A, Figures]:
    """Start an arm; return it with the seconds since the model was built, and the memory kept and at its peak."""
    gc.collect()
    first = setup.batch(1)
    _ = setup.largest  # made before the timing starts
    before = DeviceMemory.now(setup.device)
    if before:
        torch.cuda.reset_peak_memory_stats(setup.device)
    timeline = Timeline(setup.device)
    arm = arm_class(setup)
    arm.start(first, timeline)
    figures: Figures = {"seconds": timeline.seconds}
    if before:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(setup.device)
        figures |= before.spent(DeviceMemory.now(setup.device))
    return arm, figures


def speeds(arm: Arm, setup: Setup, steps: int) -> Figures:
    """Measure step times in ms by batch, and on a GPU microseconds of host time per call at batch 1."""
    batches = (count for count in STEP_BATCHES if count <= setup.workload.max_batch)
    step_ms = {str(n): step_milliseconds(arm.call(setup.batch(n)), setup.device, steps=steps) for n in batches}
    if setup.device.type != "cuda":
        return {"step_ms": step_ms}
    return {"step_ms": step_ms, "host_us": host_microseconds(arm.call(setup.batch(1)), setup.device, calls=steps)}


def shape(setup: Setup) -> Figures:
    """Describe the model, the sizes and the attention that ran."""
    weight = next(setup.model.parameters())
    return {
        "model": setup.workload.model,
        "layers": setup.model.config.num_hidden_layers,
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": setup.device.type,
        "sizes": sorted(setup.workload.sizes),
        "context": setup.workload.context,
        "lm_head": setup.workload.lm_head,
        "attention": attention_name(weight.device, weight.dtype),
        "pid": os.getpid(),
        "tp": setup.workload.shard.size,
    }


Result = dict[str, Any]

_READY = ("seconds", "ready")
# Figures of a second start in the same process, which exclude loading the libraries.
_AGAIN, _KEPT = ("primed", "seconds", "ready"), ("primed", "device_bytes")
# Of ours, without the warmup and what is looked up about the graphs.
_ALONE, _ALONE_AGAIN = ("details", "captures_alone_s"), ("primed", "details", "captures_alone_s")
# Numerator and denominator of each ratio: a run, and a figure of it, seconds until all sizes are ready or bytes kept.
RATIOS = {
    "ready_plain_loop_over_ours": (("plain-loop", _READY), ("simplegraph", _READY)),
    "ready_lean_loop_over_ours": (("lean-loop", _READY), ("simplegraph", _READY)),
    "ready_ours_over_eager": (("simplegraph", _READY), ("eager", _READY)),
    "ready_our_captures_alone_over_eager": (("simplegraph", _ALONE), ("eager", _READY)),
    "again_plain_loop_over_ours": (("plain-loop", _AGAIN), ("simplegraph", _AGAIN)),
    "again_lean_loop_over_ours": (("lean-loop", _AGAIN), ("simplegraph", _AGAIN)),
    "again_our_captures_alone_over_plain_loop": (("simplegraph", _ALONE_AGAIN), ("plain-loop", _AGAIN)),
    "memory_ours_over_plain_loop": (("simplegraph", _KEPT), ("plain-loop", _KEPT)),
    "memory_ours_over_lean_loop": (("simplegraph", _KEPT), ("lean-loop", _KEPT)),
    "ready_piecewise_cold_over_ours": (("compiled-piecewise (cold)", _READY), ("simplegraph", _READY)),
    "ready_piecewise_warm_over_ours": (("compiled-piecewise (warm)", _READY), ("simplegraph", _READY)),
}


def combine(results: Sequence[Result]) -> Result:
    """Combine the rounds of one run: medians of the times, the rest from the first; a failure if one failed."""
    bad = next((result for result in results if result["status"] != "ok"), None)
    if bad is not None:
        return bad
    combined = medians(results)
    return combined | {"rounds": [result["seconds"] for result in results]}


def medians(values: Sequence[Any]) -> Any:
    """Return medians of floats, recursively in dicts; of everything else the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: medians([value[key] for value in values if key in value]) for key in first}
    return statistics.median(values) if isinstance(first, float) else first


def comparison(results: dict[str, Result]) -> dict[str, float]:
    """Compute `RATIOS`, and steps on DTensors over those on plain tensors, for all runs that have figures.

    Runs on the emulator, whose times are not speed, have the latter alone.
    """
    ratios = {} if any(result.get("device") == "cpu" for result in results.values()) else dict(RATIOS)
    for batch in results.get("simplegraph-dtensor", {}).get("step_ms", {}):
        step = ("step_ms", batch)
        ratios[f"step_dtensor_over_plain_at_{batch}"] = (("simplegraph-dtensor", step), ("simplegraph", step))
    pairs = {name: [figure(results.get(label), *path) for label, path in pair] for name, pair in ratios.items()}
    return {name: one / other for name, (one, other) in pairs.items() if one is not None and other}


def figure(result: Result | None, *path: str) -> float | None:
    """Return a nested figure of a result; None if it has none."""
    value: Any = result
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


AGAIN = 3  # starts in a process that has started before


def run_arm(name: str, plan: StartupPlan, caches: str, meeting: int) -> Figures:
    """Measure one arm with its compile caches in a folder, or return why it is not available."""
    try:
        with compiler.caches_in(caches):
            return {"status": "ok"} | measure_arm(name, plan, meeting)
    except NotAvailable as reason:
        return {"status": "not available", "error": str(reason)}


def measure_arm(name: str, plan: StartupPlan, meeting: int = 0) -> Figures:
    """Build, start, compare, then time; a mismatch gives no figures.

    Args:
        meeting: of the ranks; every run has another one.
    """
    shard, ranks, device = torchrun.start(plan.tp, f"bench/{meeting}", plan.device)
    arm_class = load_arm(name)
    arm_class.check_available(device)
    if plan.preloaded:
        sg.preload(device).wait()
    workload = Workload(plan.model, plan.sizes, device, lm_head=plan.lm_head, layers=plan.layers, shard=shard)
    say(f"{name}: building {plan.model} on {device}")
    setup = Setup(workload.build(), workload, ranks)
    with torch.inference_mode(), few_threads(device):
        weight = next(setup.model.parameters())
        say(f"{name}: attention is {attention_name(weight.device, weight.dtype)}")  # loads it, too
        arm_class.load(setup)
        arm, started = start(arm_class, setup)
        say(f"{name}: {', '.join(f'{mark} {s:.2f} s' for mark, s in started['seconds'].items())}")
        comparisons = compare_with_eager(arm, setup, counts_to_compare(sorted(workload.sizes)))
        figures = started | {"correct": [dataclasses.asdict(one) for one in comparisons]}
        figures |= {"eager_noise": eager_noise(setup)}
        figures |= speeds(arm, setup, plan.steps)
        figures |= arm.replays.figures() | {"graphs": arm.graphs(), "details": arm.details(), "notes": arm.notes}
        if arm_class.restartable:
            del arm
            figures["primed"] = medians([_start_again(arm_class, setup) for _ in range(AGAIN)])
    figures |= {"preloaded": plan.preloaded}
    return figures | shape(setup) | {"environment": environment.describe()}


def _start_again(arm_class: type[Arm], setup: Setup) -> Figures:
    arm, figures = start(arm_class, setup)
    return figures | {"details": arm.details()}


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


class CompileCaches:
    """Folders for compile caches: a new one for each cold run; a warm run uses that of its arm's last cold run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._filled: dict[str, str] = {}

    def folder(self, arm: str, cache: str | None) -> str:
        """Return the folder of the compile caches of this arm's process.

        Raises:
            RuntimeError: a warm run comes before its cold one.
        """
        if cache != "warm":
            self._filled[arm] = tempfile.mkdtemp(prefix=f"{arm}-", dir=self._root)
        if arm not in self._filled:
            raise RuntimeError(f"{arm} (warm) needs the cache of {arm} (cold), which has not run.")
        return self._filled[arm]


def measure(run: Run, plan: StartupPlan, caches: CompileCaches) -> Result:
    """Run one process of a run; any error in it is returned as a failed result."""
    found: Result = {"arm": run.arm, "cache": run.cache}
    missing = unavailable(run.arm, plan)
    if missing is not None:
        return found | {"status": "not available", "error": missing}
    try:
        task = run_arm, run.arm, plan, caches.folder(run.arm, run.cache), next(_meetings)
        return found | fresh.call(*task, seconds=plan.timeout)
    except (RuntimeError, TimeoutError) as error:
        say(str(error))
        return found | {"status": "failed", "error": getattr(error, "reason", str(error))}


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


_meetings = itertools.count()  # every rank runs the same arms in the same order, so it counts them alike


class Processes:
    """Measures runs in fresh processes; `python -m bench` and ``pytest bench/startup`` take their rounds from here.

    Args:
        plan: the settings of every process.
        caches: their compile caches.
    """

    def __init__(self, plan: StartupPlan, caches: CompileCaches) -> None:
        self.plan = plan
        self._caches = caches
        self._measured: dict[Run, list[Result]] = {}

    def result(self, run: Run, number: int) -> Result:
        """Return what a process of a run measured; processes up to this number are started if they have not been."""
        results = self._measured.setdefault(run, [])
        if run.cache == "warm" and not results:
            self.result(run._replace(cache="cold"), 0)  # fills the cache
        while len(results) <= number:
            say(f"{run.label}, process {len(results) + 1} of {self.plan.rounds_of(run)} ...")
            results.append(measure(run, self.plan, self._caches))
        return results[number]

    def rounds(self, run: Run) -> list[Result]:
        """Return every process of one run, and no further one after the first that has no figures."""
        results: list[Result] = []
        for number in range(self.plan.rounds_of(run)):
            results.append(self.result(run, number))
            if results[-1]["status"] != "ok":
                break
        return results


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
    processes = Processes(plan, caches)
    results: dict[str, Result] = {}
    for run in runs:
        results[run.label] = combine(processes.rounds(run))
        keep(results)
    return results
