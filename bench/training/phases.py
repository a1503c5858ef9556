"""The host's time of a training step by its phases, and the calls of CUDA that it makes.

``python -m bench.training.phases``: forward and backward graphs beside torch's own and eager, in turn in one process, a
step each. The device is idle before each step, so that no full queue makes the host wait. ``calls`` counts the calls of
CUDA's runtime in a step, as torch's profiler sees them.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bench.arms.base import NotAvailable
from bench.tools import command
from bench.tools.measure import NOT_SPEED, Figures, in_turn, say, synchronize
from bench.tools.options import add_names, count
from bench.tools.replays import Served, timed
from bench.tools.tables import grid
from bench.training.step_arms import ARMS
from bench.training.workloads import WORKLOADS, Task

PHASES = ("zero_grad", "forward", "loss", "backward", "clip", "optimizer")
WARMUP = 12
PROFILED = 10
WORKLOADS_OF = ("two linears", "two linears, autocast", "mlp")
ARMS_OF = ("forward-backward", "make-graphed-callables", "eager")


@dataclasses.dataclass(frozen=True)
class PhasesPlan:
    """The workloads (of `WORKLOADS`), arms (of `ARMS`), timed steps of each, and True for the tiny shapes."""

    workloads: tuple[str, ...]
    arms: tuple[str, ...]
    tiny: bool
    steps: int


def default_plan(device: torch.device) -> PhasesPlan:
    """Return the models that torch tests its graphs with, and an MLP; few steps of tiny ones on a CPU."""
    cpu = device.type != "cuda"
    return PhasesPlan(WORKLOADS_OF, ARMS_OF, cpu, 20 if cpu else 400)


class PhasedStep:
    """A task's step, timed by its phases: `microseconds` of each since `forget`."""

    def __init__(self, task: Task) -> None:
        self._task, self._call = task, task.call
        self._forward = 0.0
        task.call = self._timed_call
        self.microseconds: dict[str, list[float]] = {name: [] for name in PHASES}

    def forget(self) -> None:
        """Forget what was measured."""
        for found in self.microseconds.values():
            found.clear()

    def _timed_call(self, *args: Any) -> Any:
        start = time.perf_counter()
        result = self._call(*args)
        self._forward = time.perf_counter() - start
        return result

    def __call__(self, *batch: Any) -> None:
        """Do a step as `Task.step` does it."""
        task = self._task
        marks = [time.perf_counter()]
        task.optimizer.zero_grad(set_to_none=True)
        marks.append(time.perf_counter())
        with task.autocast():
            loss = task.workload.loss(task, *batch)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        nn.utils.clip_grad_norm_(task.model.parameters(), 1.0)
        marks.append(time.perf_counter())
        task.optimizer.step()
        marks.append(time.perf_counter())
        zero, loss_seconds, *others = (after - before for before, after in itertools.pairwise(marks))
        taken = zero, self._forward, loss_seconds - self._forward, *others
        for name, seconds in zip(PHASES, taken, strict=True):
            self.microseconds[name].append(seconds * 1e6)


def measure(plan: PhasesPlan, device: torch.device) -> Figures:
    """Measure every workload."""
    figures: Figures = {"plan": dataclasses.asdict(plan), "device": device.type, "workloads": {}}
    for name in plan.workloads:
        figures["workloads"][name] = found = _measured(name, plan, device)
        say(f"{name}: " + ", ".join(f"{arm} {sum(each['us'].values()):.0f} us" for arm, each in found.items()))
    return figures


def _measured(name: str, plan: PhasesPlan, device: torch.device) -> Figures:
    steps: dict[str, PhasedStep] = {}
    calls: dict[str, Callable[[], None]] = {}
    for arm in plan.arms:
        try:
            ARMS[arm].load(device)
        except NotAvailable as reason:
            say(f"{arm}: {reason}")
            continue
        task = Task(WORKLOADS[name], device, plan.tiny, ARMS[arm].capturable)
        turns = itertools.cycle([task.batch() for _ in range(4)])
        replays = ARMS[arm].replays(task, ARMS[arm].make(task), arm)
        step = steps[arm] = PhasedStep(task)
        calls[arm] = Served(lambda step=step, turns=turns: step(*next(turns)), replays, ARMS[arm].each)
        for _ in range(WARMUP):
            calls[arm]()
        step.forget()
    with contextlib.ExitStack() as stack:
        for call in calls.values():
            stack.enter_context(timed(call, plan.steps))
        for _ in range(plan.steps):
            for call in calls.values():
                synchronize(device)
                call()
    found = {
        arm: {"us": {phase: statistics.median(us) for phase, us in step.microseconds.items()}}
        for arm, step in steps.items()
    }
    back_to_back = in_turn(calls, device, rounds=1 if plan.tiny else 15, steps=20)
    for arm, call in calls.items():
        found[arm]["ms"] = back_to_back[arm]
        found[arm]["calls"] = _runtime_calls(call, device)
    return found


def _runtime_calls(call: Callable[[], None], device: torch.device) -> dict[str, list[float]]:
    """Count the calls of CUDA's runtime and driver in a step: name -> [how many, microseconds in all]."""
    if device.type != "cuda":
        return {}
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    synchronize(device)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(PROFILED):
            call()
        synchronize(device)
    found: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CPU and event.name.startswith(("cuda", "cu")):
            found[event.name][0] += 1 / PROFILED
            found[event.name][1] += event.time_range.elapsed_us() / PROFILED
    return dict(found)


def render(figures: Figures) -> str:
    """Format a table of each workload: phases, and then the runtime's calls."""
    parts = [] if figures["device"] == "cuda" else [NOT_SPEED]
    for name, arms in figures["workloads"].items():
        lines = [[name, *arms]]
        lines += [[f"{phase}, us", *(f"{found['us'][phase]:.1f}" for found in arms.values())] for phase in PHASES]
        lines.append(["all of them, us", *(f"{sum(found['us'].values()):.1f}" for found in arms.values())])
        lines.append(["back to back, ms", *(f"{found['ms']:.4f}" for found in arms.values())])
        for each in sorted({call for found in arms.values() for call in found["calls"]}):
            cells = (found["calls"].get(each, (0.0, 0.0)) for found in arms.values())
            lines.append([each, *(f"{number:.1f} in {us:.0f} us" for number, us in cells)])
        parts.append(grid(lines))
    return "\n\n".join(parts)


def failures(figures: Figures) -> list[str]:
    """List no failure: this only looks."""
    return []


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.training.phases", description=__doc__)
    add_names(parser, "--workloads", WORKLOADS, "the two pairs of linear layers and the MLP by default")
    add_names(parser, "--arms", ARMS, "graphs of forward and backward, ours and torch's, and eager by default")
    parser.add_argument("--steps", type=count, help="timed steps of each arm")
    command.run(parser, argv, default_plan, measure, render, failures)


if __name__ == "__main__":
    main()
