"""Vision, diffusion and encoder models: how soon do they answer, what does a call cost, and what memory is kept?

``python -m bench.models_first_call``: every model and arm in a fresh process; ``--models`` and ``--arms`` choose.
``first``: the first result, from the built model, imports left out. ``ready``: three calls, after which every arm has
compiled and captured everything. Every arm's output for a new input is compared with eager's; ours
also at batches of 1, 2 and 3, padded if not captured, each from a replay. Compiling takes a minute or more
per model, so that arm runs only if ``--arms`` names it; ``sooner`` is its first call's time over the arm's.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.arms.base import NotAvailable
from bench.models_first_call.model_arms import ARMS, QUICK, Step
from bench.models_first_call.zoo import ZOO, available
from bench.tools import command
from bench.tools.measure import DeviceMemory, Figures, Timeline, gpu_busy, say, step_milliseconds
from bench.tools.options import add_names, count
from bench.tools.replays import Replays, Served
from bench.tools.tables import MIB, cell, ratio
from bench.tools.turns import answer

READY_CALLS = 4
RAGGED = (1, 2, 3)  # rows of calls after the measured ones; three are padded to four
COMPILED = "compiled-reduce-overhead"
# Allowed difference relative to the largest value, since a compiler may choose other kernels.
ROUNDING = {torch.bfloat16: 0.05, torch.float32: 1e-3}


@dataclasses.dataclass(frozen=True)
class FirstCallPlan:
    """The models, arms and counts of a measurement.

    Args:
        models: of `ZOO`; arms: of `ARMS`.
        tiny: the models' tiny shapes.
        batch: rows of the calls that are measured.
        processes: processes per arm and model, of which medians are reported.
        timeout: seconds that a process may take.
    """

    models: tuple[str, ...]
    arms: tuple[str, ...]
    tiny: bool
    batch: int = 1
    processes: int = 1
    timeout: int = 300


def default_plan(device: torch.device) -> FirstCallPlan:
    """Return the installed models and the arms that compile nothing, at real shapes on a GPU, tiny ones on a CPU."""
    return FirstCallPlan(tuple(available()), QUICK, tiny=device.type != "cuda")


# In the process of an arm.


def run_arm(model: str, arm: str, device: torch.device, tiny: bool, batch: int) -> Figures:
    """Measure one arm on one model; `skipped` is the reason if it cannot run.

    Raises:
        RuntimeError: its outputs differ from eager's, or one of ours was not replayed.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        module = ZOO[model].build(tiny)
    module = module.to(device, dtype).eval().requires_grad_(False)

    def inputs(rows: int) -> list[Tensor]:
        return [_placed(tensor, device, dtype) for tensor in ZOO[model].inputs(tiny, rows)]

    measured = inputs(batch)
    try:
        ARMS[arm].load(device)
    except NotAvailable as reason:
        return {"skipped": str(reason)}
    with torch.no_grad():
        before, timeline = DeviceMemory.now(device), Timeline(device)
        step = ARMS[arm].make(module, tuple(measured))
        for _ in range(READY_CALLS):
            step(*measured)
            timeline.mark("first")
        timeline.mark("ready")
        after = DeviceMemory.now(device)
        figures: Figures = {f"{name}_seconds": seconds for name, seconds in timeline.seconds.items()}
        replays = Replays(step, name=arm) if isinstance(step, sg.CudaGraphWrapper) else Replays()
        call = Served(lambda: step(*measured), replays)
        figures["ms"] = step_milliseconds(call, device)
        figures |= _memory(before, after) | gpu_busy(call, device) | replays.figures()
        differences = [_difference(step, module, inputs(batch))]
        if replays.by:
            differences += [_replayed_difference(step, replays, module, inputs(rows)) for rows in RAGGED]
        figures["difference"] = max(differences)
    return figures


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def _memory(before: DeviceMemory | None, after: DeviceMemory | None) -> Figures:
    if before is None or after is None:
        return {}
    return {f"{name.removesuffix('_bytes')}_mib": size / MIB for name, size in before.spent(after).items()}


def _replayed_difference(step: Step, replays: Replays, module: nn.Module, inputs: list[Tensor]) -> float:
    """Do as `_difference`, for a call that is replayed."""
    for _ in range(READY_CALLS):
        step(*inputs)
    replays.begin()
    difference = _difference(step, module, inputs)
    replays.end(1)
    return difference


def _difference(step: Step, module: nn.Module, inputs: list[Tensor]) -> float:
    """Return the largest difference from eager's output, relative to its largest value."""
    answer, wanted = step(*inputs), module(*inputs)
    if answer.shape != wanted.shape:
        raise RuntimeError(f"an answer of shape {tuple(answer.shape)} where eager's is {tuple(wanted.shape)}.")
    difference = float((answer.float() - wanted.float()).abs().max() / wanted.float().abs().max())
    if not difference <= ROUNDING[wanted.dtype]:
        rows = inputs[0].shape[0]
        raise RuntimeError(f"answers to {rows} rows differ from eager's by {difference:.3g} of the largest value.")
    return difference


# Around the processes.


def measure(plan: FirstCallPlan, device: torch.device) -> Figures:
    """Measure every model and arm; return medians over processes, and every process's figures."""
    models: dict[str, Figures] = {model: {} for model in plan.models}
    for model, arm in itertools.product(plan.models, plan.arms):
        say(f"{model}, {arm} ...")
        found = models[model][arm] = _measure_arm(plan, model, arm, device)
        say(f"{model}, {arm}: {_in_a_line(found)}")
    return {"plan": dataclasses.asdict(plan), "device": device.type, "models": models}


def _measure_arm(plan: FirstCallPlan, model: str, arm: str, device: torch.device) -> Figures:
    runs: list[Figures] = []
    for _ in range(plan.processes):
        runs.append(answer(run_arm, model, arm, device, plan.tiny, plan.batch, seconds=plan.timeout))
        if "ms" not in runs[-1]:
            return runs[-1]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]} | {"runs": runs}


def _in_a_line(found: Figures) -> str:
    """The figures of an arm in a line, or why there are none."""
    if "ms" not in found:
        return str(found.get("skipped") or "failed: " + found["failed"].splitlines()[-1])
    return f"first {found['first_seconds']:.3f} s, ready {found['ready_seconds']:.3f} s, {found['ms']:.3f} ms a call"


def failures(figures: Figures) -> list[str]:
    """List required models and arms that failed; failures of other libraries' arms are reported as figures."""
    arms = [(model, arm, found) for model, arms in figures["models"].items() for arm, found in arms.items()]
    return [
        f"{arm} of {model}:\n{found['failed']}" for model, arm, found in arms if "failed" in found and ARMS[arm].ours
    ]


_COLUMNS = {
    "first_seconds": "first s",
    "ready_seconds": "ready s",
    "ms": "ms a call",
    "kernel_ms": "kernels ms",
    "busy_share": "GPU busy",
    "reserved_mib": "kept MiB",
    "difference": "error",
}


def render(figures: Figures) -> str:
    """Format the figures as a table."""
    lines = [f"{'':>46}" + "".join(f"{title:>12}" for title in (*_COLUMNS.values(), "x eager ms", "x sooner"))]
    for model, arms in figures["models"].items():
        for arm, found in arms.items():
            lines.append(f"{model:>20}  {arm:>24}{_cells(found, arms)}")
    return "\n".join(lines)


def _cells(found: Figures, arms: Figures) -> str:
    if "ms" not in found:
        return f"    {_in_a_line(found)}"
    forms = {"difference": ".2g", "busy_share": ".0%"}
    cells = [cell(found, name, forms.get(name, ".3f")) for name in _COLUMNS]
    cells.append(ratio(found, arms.get("eager", {}), "ms", ".3f"))
    cells.append(ratio(arms.get(COMPILED, {}), found, "first_seconds", ".1f"))
    return "".join(f"{text:>12}" for text in cells)


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.models_first_call", description=__doc__)
    add_names(parser, "--models", available(), "all that are installed by default")
    add_names(parser, "--arms", ARMS, "those that compile nothing by default")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, as on a CPU")
    parser.add_argument("--batch", type=count, help="rows of the calls that are measured")
    parser.add_argument("--processes", type=count, help="of each arm and model")
    parser.add_argument("--timeout", type=count, help="seconds that a process may take")
    command.run(parser, argv, default_plan, measure, render, failures)
