"""The measurements of one arm on one workload, in the process of that arm."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.arms.base import NotAvailable
from bench.tools.fresh import NO_TURN, Turn
from bench.tools.measure import Figures, gpu_busy, in_turn, step_milliseconds, synchronize
from bench.tools.replays import Served
from bench.tools.tables import MIB
from bench.training.step_arms import ARMS
from bench.training.workloads import WORKLOADS, Step, Task

FIRST_CALLS = 12  # steps from the built model on, the device waited for after each
BATCHES = 4  # different ones that take turns
SHAPES = 8
SHAPE_ROUNDS = 6  # times that each shape comes before memory is read
STEADY = 2.0  # a first step counts as steady below this multiple of the last ones
TIMED_SECONDS = 1.0  # about how long the timed steps take
TIMED_STEPS = (10, 50)
PROFILED_STEPS = 10
IN_TURN = {"cuda": 15, "cpu": 2}  # rounds in which arms take turns
PER_TURN = 20


def run_arm(name: str, arm: str, device: torch.device, tiny: bool, gpu: int = 0, turn: Turn = NO_TURN) -> Figures:
    """Measure one arm on one workload; `skipped` is the reason if it cannot run.

    Raises:
        NotReplayed: graphs did not serve the timed steps of an arm of ours.
    """
    try:
        ARMS[arm].load(device)
    except NotAvailable as reason:
        return {"skipped": str(reason)}
    task = Task(WORKLOADS[name], device, tiny, ARMS[arm].capturable)
    batches = [task.batch() for _ in range(BATCHES)]
    torch.manual_seed(1)  # of dropout: the same draws for every arm whose graphs advance generators as eager does
    step, figures = _first_steps(task, arm, batches)
    replays = ARMS[arm].replays(task, step, f"{arm} of {name}")
    with turn:
        turns = itertools.cycle(batches)
        call = Served(lambda: step(*next(turns)), replays, ARMS[arm].each)
        estimate = figures["calls"][-1] - figures["calls"][-2]
        steps = min(max(int(TIMED_SECONDS / estimate), TIMED_STEPS[0]), TIMED_STEPS[1])
        figures["ms"] = step_milliseconds(call, device, steps=steps)
        figures |= _memory(device)
        figures |= gpu_busy(call, device, calls=PROFILED_STEPS)
        if "kernel_ms" in figures:
            figures["busy_share"] = min(figures["kernel_ms"] / figures["ms"], 1.0)
    return figures | replays.figures()


def _first_steps(task: Task, arm: str, batches: list[Any]) -> tuple[Step, Figures]:
    """Make the arm's step and run it; `calls` are the seconds until each step was done, from the built model on."""
    ends, losses, first_replay = [], [], None
    synchronize(task.device)
    start = time.perf_counter()
    step = ARMS[arm].make(task)
    for index, batch in zip(range(FIRST_CALLS), itertools.cycle(batches), strict=False):
        loss = step(*batch)
        synchronize(task.device)
        ends.append(time.perf_counter() - start)
        losses.append(float(loss))
        if first_replay is None and ARMS[arm].replayed(task, step):
            first_replay = index
    return step, {"calls": ends, "losses": losses, "first_replay": first_replay, "steady": first_steady(ends)}


def run_in_turn(name: str, arms: Sequence[str], device: torch.device, tiny: bool) -> Figures:
    """Measure arms on one workload in one process, in turn: ms of a step. An arm that cannot run is left out."""
    steps: dict[str, Any] = {}
    for arm in arms:
        try:
            ARMS[arm].load(device)
        except NotAvailable:
            continue
        task = Task(WORKLOADS[name], device, tiny, ARMS[arm].capturable)
        batches = [task.batch() for _ in range(BATCHES)]
        step, _ = _first_steps(task, arm, batches)
        turns, replays = itertools.cycle(batches), ARMS[arm].replays(task, step, f"{arm} of {name}")
        steps[arm] = Served(lambda step=step, turns=turns: step(*next(turns)), replays, ARMS[arm].each)
    return {"ms": in_turn(steps, device, rounds=IN_TURN[device.type], steps=PER_TURN)}


def first_steady(ends: list[float]) -> int:
    """Return the index of the first step from which on none takes more than `STEADY` times the last ones' median."""
    took = [end - begin for begin, end in zip([0.0, *ends], ends, strict=False)]
    usual = sorted(took[-3:])[1]
    slow = [index for index, seconds in enumerate(took) if seconds > STEADY * usual]
    return min(max(slow, default=-1) + 1, len(ends) - 1)


def run_shapes(name: str, arm: str, device: torch.device, tiny: bool) -> Figures:
    """Train with batches of eight sizes in turn, and measure the memory.

    Raises:
        NotReplayed: graphs did not serve the last round of an arm of ours.
    """
    workload = WORKLOADS[name]
    largest = workload.tiny_size if tiny else workload.size
    task = Task(workload, device, tiny, ARMS[arm].capturable)
    batches = [task.batch(largest * part // SHAPES) for part in range(SHAPES, 0, -1)]
    step = ARMS[arm].make(task)
    replays = ARMS[arm].replays(task, step, f"{arm} of {name}, {SHAPES} shapes")
    for _ in range(SHAPE_ROUNDS):
        replays.begin()
        for batch in batches:
            step(*batch)
    synchronize(device)
    replays.end(SHAPES)
    return _memory(device) | replays.figures()


def _memory(device: torch.device) -> Figures:
    """Return the MiB that the allocator holds for this process, its caches included; empty on a CPU."""
    gc.collect()
    return {"reserved_mib": torch.cuda.memory_reserved(device) / MIB} if device.type == "cuda" else {}
