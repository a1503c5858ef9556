"""Measures training steps: the time of a step, the seconds to its first replay, and its memory.

``python -m bench.training``: every workload and arm in a fresh process; ``--workloads`` and ``--arms`` choose. All arms
train the same model from the same weights on the same batches. ``eager`` has the optimizer that a user would choose,
``eager-capturable`` the settings of the graphs. Graphs of forward and backward and torch's own are timed once more, in
turn in one process. Arms that compile run only if ``--arms`` names them: all workloads at
once, ``--at-once`` of them, then timed one after the other.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable

import torch

from bench.tools import command, fresh
from bench.tools.measure import Figures, say
from bench.tools.options import add_names, count
from bench.tools.turns import answer, side_by_side
from bench.training.one_run import run_arm, run_in_turn, run_shapes
from bench.training.step_arms import ARMS
from bench.training.table import ROUNDING, SAME, describe, difference, render
from bench.training.workloads import WORKLOADS, available

QUICK = tuple(name for name, arm in ARMS.items() if not arm.compiles)
SHAPES_OF = ("mlp", "gpt2", "vit-b 64")  # whose memory with eight shapes is measured
SHAPES_ARMS = ("eager", "train-step")
IN_TURN_ARMS = ("forward-backward", "make-graphed-callables")  # compared in one process


@dataclasses.dataclass(frozen=True)
class TrainingPlan:
    """The workloads, arms and limits of a measurement.

    Args:
        workloads: of `WORKLOADS`; arms: of `ARMS`.
        tiny: the workloads' tiny shapes.
        shapes: workloads, of the above, whose memory with eight shapes is measured, by `SHAPES_ARMS`.
        at_once: processes of arms that compile which start side by side.
        timeout: seconds that a process may take.
    """

    workloads: tuple[str, ...]
    arms: tuple[str, ...]
    tiny: bool
    shapes: tuple[str, ...]
    at_once: int = 4
    timeout: int = 240


def default_plan(device: torch.device) -> TrainingPlan:
    """Return the installed workloads and the arms that compile nothing, at real shapes on a GPU, tiny ones on a CPU."""
    tiny = device.type != "cuda"
    installed = tuple(available(tiny))
    return TrainingPlan(installed, QUICK, tiny, tuple(name for name in SHAPES_OF if name in installed))


def pairs(plan: TrainingPlan) -> list[tuple[str, str]]:
    """List the workloads and arms to measure; the ones for forward and backward alone leave whole steps out."""
    return [
        (name, arm)
        for name, arm in itertools.product(plan.workloads, plan.arms)
        if not (WORKLOADS[name].forward_backward and ARMS[arm].whole)
    ]


def measure(plan: TrainingPlan, device: torch.device) -> Figures:
    """Measure every workload and arm, and the memory of eight shapes; compiled arms come last."""
    fresh.preload("bench.training.preloaded", str(device))
    figures: Figures = {"plan": dataclasses.asdict(plan), "device": device.type}
    steps = figures["workloads"] = {name: {} for name in plan.workloads}
    shapes = figures["shapes"] = {
        name: {} for name in plan.shapes if name in plan.workloads and set(SHAPES_ARMS) <= set(plan.arms)
    }
    slow = [pair for pair in pairs(plan) if ARMS[pair[1]].compiles]
    for name, arm in pairs(plan):
        if not ARMS[arm].compiles:
            steps[name][arm] = _measured(plan, run_arm, name, arm, device)
    for name, arm in itertools.product(shapes, SHAPES_ARMS):
        shapes[name][arm] = _measured(plan, run_shapes, name, arm, device)
    if set(IN_TURN_ARMS) <= set(plan.arms):
        for name in plan.workloads:
            steps[name]["in turn"] = _measured(plan, run_in_turn, name, IN_TURN_ARMS, device)
    for first in range(0, len(slow), plan.at_once):
        tasks = {pair: (run_arm, (*pair, device, plan.tiny)) for pair in slow[first : first + plan.at_once]}
        for (name, arm), found in side_by_side(tasks, plan.timeout).items():
            steps[name][arm] = found
            say(f"{name}, {arm}: {describe(found)}")
    return figures


def _measured(
    plan: TrainingPlan, run: Callable[..., Figures], name: str, arm: str | tuple[str, ...], device: torch.device
) -> Figures:
    found = answer(run, name, arm, device, plan.tiny, seconds=plan.timeout)
    say(f"{name}, {arm if isinstance(arm, str) else ' and '.join(arm)}: {describe(found)}")
    return found


def failures(figures: Figures) -> list[str]:
    """List our arms that failed or trained otherwise than eager; failures of other libraries' arms are figures."""
    kinds = [*figures["workloads"].items(), *figures["shapes"].items()]
    every = [
        (name, arm, found) for name, arms in kinds for arm, found in arms.items() if arm in ARMS and ARMS[arm].ours
    ]
    failed = [f"{arm} of {name}:\n{found['failed']}" for name, arm, found in every if "failed" in found]
    return failed + [
        f"{arm} of {name}: losses differ from eager's by up to {apart:.2g} of their value"
        for name, arm, found in every
        if (apart := difference(found, figures["workloads"].get(name, {}).get(SAME, {}))) is not None
        and not apart <= ROUNDING
    ]


def main(argv: list[str] | None = None) -> None:
    """Measure, print the tables, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.training", description=__doc__)
    add_names(parser, "--workloads", WORKLOADS, "all that are installed by default")
    add_names(parser, "--arms", ARMS, "those that compile nothing by default")
    add_names(parser, "--shapes", WORKLOADS, "whose memory with eight shapes is measured")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, as on a CPU")
    parser.add_argument("--at-once", type=count, help="processes that compile side by side")
    parser.add_argument("--timeout", type=count, help="seconds that a process may take")
    command.run(parser, argv, default_plan, measure, render, failures)
