"""Measures training steps: the time of a step, the seconds to its first replay, and its memory.

``python -m bench.training``: every workload and arm in a fresh process; ``--workloads`` and ``--arms`` choose. All arms
train the same model from the same weights on the same batches. ``eager`` has the optimizer that a user would choose,
``eager-capturable`` the settings of the graphs. Graphs of forward and backward and torch's own are timed once more, in
turn in one process. Arms that compile run only if ``--arms`` names them: all workloads at
once, ``--at-once`` of them, then timed one after the other.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.arms.base import NotAvailable
from bench.tools import command, fresh
from bench.tools.files import save_figures
from bench.tools.fresh import NO_TURN, Turn
from bench.tools.measure import Figures, gpu_busy, in_turn, say, step_milliseconds, synchronize
from bench.tools.options import Options, count, name_list
from bench.tools.replays import Served
from bench.tools.side_by_side import answer, side_by_side
from bench.tools.tables import MIB, cell, grid, measured
from bench.training.step_arms import ARMS
from bench.training.workloads import WORKLOADS, Step, Task, available

EAGER, SAME = "eager", "eager-capturable"
ROUNDING = 0.05  # allowed for losses: kernels that add in any order, and what a few steps make of it


def describe(found: Figures) -> str:
    """Describe one run in a line, or why it has no figures."""
    if "failed" in found:
        return "failed: " + found["failed"].strip().splitlines()[-1]
    if "skipped" in found:
        return f"skipped: {found['skipped']}"
    if isinstance(found.get("ms"), dict):
        return ", ".join(f"{arm} {ms:.3f} ms" for arm, ms in found["ms"].items())
    if "ms" not in found:
        return f"reserved {cell(found, 'reserved_mib', '.0f')} MiB"
    parts = [f"{found['ms']:.3f} ms a step", f"kernels {cell(found, 'kernel_ms', '.3f')} ms"]
    replayed = "" if found["first_replay"] is None else f"replayed at step {found['first_replay'] + 1}, "
    steady = f"{replayed}steady after {found['calls'][found['steady']]:.2f} s"
    return ", ".join([*parts, steady, f"reserved {cell(found, 'reserved_mib', '.0f')} MiB"])


def beyond_eager(found: Figures, eager: Figures, index: int | None) -> float | None:
    """Return the seconds until a step was done, less those of as many eager steps in a process of their own."""
    if index is None or "calls" not in eager:
        return None
    seconds: float = found["calls"][index] - eager["calls"][index]
    return seconds


def difference(found: Figures, same: Figures) -> float | None:
    """Return the largest relative difference of the first steps' losses from eager's with the same settings."""
    if "losses" not in same or "losses" not in found:
        return None
    both = zip(found["losses"], same["losses"], strict=True)
    return max(abs(ours - theirs) / max(abs(theirs), 1e-9) for ours, theirs in both)


_HEADER = ("workload", "arm", "ms", "kernels ms", "busy", "x eager", "replay s", "steady s", "reserved", "loss")


def render(figures: Figures) -> str:
    """Format the timed steps, then a line each for eight shapes, arms that took turns, and what has no figures."""
    lines: list[list[str]] = [list(_HEADER)]
    notes = []
    for kind in ("workloads", "shapes"):
        for name, arms in figures[kind].items():
            for arm, found in arms.items():
                if kind == "workloads" and arm != "in turn" and "ms" in found:
                    lines.append([name, arm, *_cells(found, arms)])
                else:
                    notes.append(f"{name}, {arm}: {describe(found)}")
    return "\n\n".join(part for part in (grid(measured(lines)), "\n".join(notes)) if part)


def _cells(found: Figures, arms: Figures) -> list[str]:
    eager = arms.get(EAGER, {})
    more = found | {
        "x": found["ms"] / eager["ms"] if "ms" in eager else None,
        "replay": beyond_eager(found, eager, found["first_replay"]),
        "until": beyond_eager(found, eager, found["steady"]),
        "loss": difference(found, arms.get(SAME, {})),
    }
    forms = {"ms": ".3f", "kernel_ms": ".3f", "busy_share": ".0%", "x": ".3f", "replay": ".3f", "until": ".3f"}
    forms |= {"reserved_mib": ".0f", "loss": ".1g"}
    return [cell(more, name, form) for name, form in forms.items()]


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


# Imported before processes are forked, as far as they are installed.
PRELOADED = (
    "bench.training.training_steps",
    "simplegraph.training.step",
    "simplegraph.training.runner",
    "timm",
    "torchvision",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
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
        json: the file, written whenever an arm is done.
    """

    workloads: tuple[str, ...]
    arms: tuple[str, ...]
    tiny: bool
    shapes: tuple[str, ...]
    at_once: int = 4
    timeout: int = 240
    json: Path | None = None


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
    fresh.preload(str(device), *PRELOADED)
    shapes = [name for name in plan.shapes if name in plan.workloads and set(SHAPES_ARMS) <= set(plan.arms)]
    figures: Figures = {"plan": dataclasses.asdict(plan) | {"json": None}, "device": device.type}
    figures |= {"workloads": {name: {} for name in plan.workloads}, "shapes": {name: {} for name in shapes}}

    def keep(kind: str, name: str, arm: str, found: Figures) -> None:
        figures[kind][name][arm] = found
        say(f"{name}, {arm}: {describe(found)}")
        save_figures(plan.json, figures)

    def in_a_process(run: Callable[..., Figures], name: str, arms: str | tuple[str, ...]) -> Figures:
        return answer(run, name, arms, device, plan.tiny, seconds=plan.timeout)

    for name, arm in pairs(plan):
        if not ARMS[arm].compiles:
            keep("workloads", name, arm, in_a_process(run_arm, name, arm))
    for name, arm in itertools.product(shapes, SHAPES_ARMS):
        keep("shapes", name, arm, in_a_process(run_shapes, name, arm))
    if set(IN_TURN_ARMS) <= set(plan.arms):
        for name in plan.workloads:
            keep("workloads", name, "in turn", in_a_process(run_in_turn, name, IN_TURN_ARMS))
    tasks = {pair: (run_arm, (*pair, device, plan.tiny)) for pair in pairs(plan) if ARMS[pair[1]].compiles}
    for (name, arm), found in side_by_side(tasks, plan.timeout, plan.at_once):
        keep("workloads", name, arm, found)
    return figures


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


OPTIONS: Options = {
    "--workloads": name_list(WORKLOADS, "all that are installed by default"),
    "--arms": name_list(ARMS, "those that compile nothing by default"),
    "--shapes": name_list(WORKLOADS, "whose memory with eight shapes is measured"),
    "--tiny": {"action": "store_true", "help": "tiny shapes, as on a CPU"},
    "--at-once": {"type": count, "help": "processes that compile side by side"},
    "--timeout": {"type": count, "help": "seconds that a process may take"},
}
main = command.of("bench.training", __doc__, OPTIONS, default_plan, measure, render, failures)
