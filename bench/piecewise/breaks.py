"""Cost of eager breaks: one model under FULL and PIECEWISE graphs, and mixed batches that only breaks can serve.

``python -m bench.piecewise``: everything in one process, every output compared with eager before any time counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.arms import timing
from bench.arms.base import Arm, Setup
from bench.arms.correctness import compare_with_eager, counts_to_compare
from bench.arms.graphed import Piecewise, Upfront
from bench.models import attention
from bench.models.workload import Batch, Workload
from bench.piecewise import mixed_steps
from bench.tools import command, environment, tables
from bench.tools.measure import (
    Call,
    Figures,
    host_microseconds,
    in_turn,
    say,
    with_index,
)
from bench.tools.options import add_model, count, numbers
from simplegraph.batch.sizes import default_sizes

MODES: dict[str, type[Upfront]] = {"full": Upfront, "piecewise": Piecewise}
STEP_BATCHES = (1, 64, 256)
EXPLANATION = """\
first: seconds until every size is captured, in the process's first start; full comes before piecewise and pays for what
the GPU's libraries load. again, keeps: seconds of later starts, with no other graphs alive, and device memory kept.
ms: time of one step, the modes measured in turn. host: time to issue one step. launch: time to issue one call of the
attention operator. break: what a layer's break adds to a step beside that call, (piecewise - full) / layers - launch;
host break: the same of the times to issue. Neither has a floor: what the device hides comes out negative."""


@dataclasses.dataclass(frozen=True)
class BreaksPlan:
    """The sizes and counts of a measurement.

    Args:
        model: tiny, 8b, or a folder with a config.json.
        sizes: decode batches to capture, in requests.
        layers: replaces the config's number of layers.
        mixed_sizes: mixed batches to capture, in tokens.
        restarts: starts of each mode after its first.
        rounds: number of rounds in which the modes take turns at a step time.
        steps: calls that a round is the median of.
        mixed_steps: the same for mixed batches.
    """

    model: str = "8b"
    sizes: tuple[int, ...] = tuple(default_sizes(512))
    layers: int | None = None
    mixed_sizes: tuple[int, ...] = (16, 256, 1024, 2048)
    restarts: int = 3
    rounds: int = 5
    steps: int = 50
    mixed_steps: int = 10


CPU_PLAN = BreaksPlan("tiny", (1, 8, 64), mixed_sizes=(16, 256, 1024), restarts=1, rounds=1, steps=5, mixed_steps=2)


def default_plan(device: torch.device) -> BreaksPlan:
    """Return the 8B shape and all default sizes on a GPU; otherwise a small model and few sizes."""
    return CPU_PLAN if device.type == "cpu" else BreaksPlan()


def main(arguments: list[str] | None = None) -> None:
    """Measure, print the tables, and write the figures to the file that ``--json`` names."""
    parser = argparse.ArgumentParser(prog="python -m bench.piecewise", description=__doc__)
    add_model(parser)
    parser.add_argument("--layers", type=count, help="layers of the model, in place of its config's")
    parser.add_argument("--sizes", type=numbers, help="decode batches, such as 1,2; the default sizes to 512 on a GPU")
    parser.add_argument("--mixed-sizes", type=numbers, help="tokens of the mixed batches, such as 16,256")
    parser.add_argument("--rounds", type=count, help="how often the modes take turns at a step time")
    command.run(parser, arguments, default_plan, measure, render)


def measure(plan: BreaksPlan, device: torch.device) -> Figures:
    """Measure all figures.

    Raises:
        Mismatch: an output differs from eager's.
        RuntimeError: a graph has another number of breaks than expected.
    """
    device = with_index(device)
    workload = Workload(plan.model, plan.sizes, device, layers=plan.layers)
    say(f"piecewise: building {plan.model} on {device}")
    setup = Setup(workload.build(), workload)
    figures = timing.shape(setup) | {"status": "ok", "layers": setup.segments - 1, "plan": dataclasses.asdict(plan)}
    with torch.inference_mode():
        figures["starts"] = starts(setup, plan.restarts)
        again = {name: figures["starts"][name].get("again_s", figures["starts"][name]["first_s"]) for name in MODES}
        say(f"piecewise: ready after {tables.in_line(again, '.3f', 's')}")
        figures |= steps(setup, plan)
        say("piecewise: mixed batches ...")
        clock = functools.partial(in_turn, device=device, rounds=plan.rounds, steps=plan.mixed_steps)
        figures["mixed"] = mixed_steps.measure(setup, plan.mixed_sizes, clock)
    return figures | {"environment": environment.describe()}


def starts(setup: Setup, restarts: int) -> Figures:
    """Measure seconds and memory of every start by mode, and PIECEWISE over FULL; the modes take turns."""
    taken: dict[str, list[Figures]] = {name: [] for name in MODES}
    for _ in range(1 + restarts):
        for name, mode in MODES.items():
            taken[name].append(_start(mode, setup))
    found: Figures = {name: _summary(figures) | {"every": figures} for name, figures in taken.items()}
    return found | {"piecewise_over_full": _ratios(found["piecewise"], found["full"])}


def _start(mode: type[Upfront], setup: Setup) -> Figures:
    """Measure one start, and drop its graphs."""
    arm, figures = timing.start(mode, setup)
    return figures | {"capture_s": arm.details()["capture_s"]}


def _summary(figures: list[Figures]) -> Figures:
    """Return the first start, and medians of the others, in which the GPU's libraries are already loaded."""
    first, *later = figures
    summary = {"first_s": first["seconds"]["ready"]}
    if later:
        summary["again_s"] = statistics.median(one["seconds"]["ready"] for one in later)
        kept = [one["device_bytes"] for one in later if "device_bytes" in one]
        summary |= {"device_bytes": statistics.median(kept)} if kept else {}
    return summary


def _ratios(one: Figures, other: Figures) -> dict[str, float]:
    return {name: one[name] / other[name] for name in other if name in one and name != "every" and other[name]}


def steps(setup: Setup, plan: BreaksPlan) -> Figures:
    """Compare both modes with eager, then measure the cost of a break at every batch."""
    arms: dict[str, Arm] = {name: timing.start(mode, setup)[0] for name, mode in MODES.items()}
    counts = counts_to_compare(sorted(setup.sizes))
    correct = {name: compare_with_eager(arm, setup, counts) for name, arm in arms.items()}
    timed = [count for count in STEP_BATCHES if count <= setup.workload.max_batch]
    return {
        "correct": {name: [dataclasses.asdict(one) for one in compared] for name, compared in correct.items()},
        "steps": {str(count): break_cost(arms, setup, setup.batch(count), plan) for count in timed},
        "replayed": {name: arm.replays.figures() for name, arm in arms.items()},
    }


def break_cost(arms: dict[str, Arm], setup: Setup, batch: Batch, plan: BreaksPlan) -> dict[str, float]:
    """Measure how much one layer's break adds to a step, with the figures it is computed from."""
    calls: dict[str, Call] = {name: arm.call(batch) for name, arm in arms.items()}
    ms = in_turn(calls, setup.device, rounds=plan.rounds, steps=plan.steps)
    host = {name: host_microseconds(call, setup.device, calls=plan.steps) for name, call in calls.items()}
    launch, layers = launch_microseconds(setup, batch, plan.steps), setup.segments - 1
    say(f"piecewise: a step of {len(batch[0])} rows: {tables.in_line(ms, '.3f', 'ms')}")
    return {
        **{f"{name}_ms": value for name, value in ms.items()},
        **{f"{name}_host_us": value for name, value in host.items()},
        "launch_us": launch,
        "break_us": above_launch(ms["full"] * 1000, ms["piecewise"] * 1000, layers, launch),
        "host_break_us": above_launch(host["full"], host["piecewise"], layers, launch),
    }


def above_launch(full: float, piecewise: float, layers: int, launch: float) -> float:
    """Compute the cost of a layer's break beyond the launch of its operator, in us; may be negative."""
    return (piecewise - full) / layers - launch


def launch_microseconds(setup: Setup, batch: Batch, calls: int) -> float:
    """Measure the median time to issue one attention call, with all layers of a step in a row."""
    made, operator = attention_calls(setup, batch), torch.ops.bench.paged_attention.default

    def all_layers() -> None:
        for arguments in made:
            operator(*arguments)

    return host_microseconds(all_layers, setup.device, calls=calls) / len(made)


def attention_calls(setup: Setup, batch: Batch) -> list[tuple[Tensor | float, ...]]:
    """Return the arguments of every attention call of one eager step."""
    made: list[tuple[Tensor | float, ...]] = []

    def note(*arguments: Any) -> None:
        made.append(arguments)
        attention.paged_attention(*arguments)

    with attention.routed(note):
        setup.model(*batch)
    return made


def render(figures: Figures) -> str:
    """Format all figures as text."""
    lists = (_start_lines(figures["starts"]), _step_lines(figures["steps"]), _mixed_lines(figures["mixed"]))
    heading = tables.heading({"piecewise": figures})
    parts = [heading, *(tables.grid(tables.measured(list(lines))) for lines in lists)]
    return "\n\n".join([*parts, EXPLANATION])


def _start_lines(starts: Figures) -> Iterator[list[str]]:
    yield ["mode", "first s", "again s", "keeps MiB"]
    for name in MODES:
        yield [name, *_row(starts[name], ("first_s", "again_s"), ".3f"), _mib(starts[name].get("device_bytes"))]
    ratios = starts["piecewise_over_full"]
    yield ["piecewise / full", *_row(ratios, ("first_s", "again_s", "device_bytes"), ".2f")]


def _step_lines(steps: Figures) -> Iterator[list[str]]:
    names = next(iter(steps.values()))
    yield ["batch", *(name.replace("_", " ") for name in names)]
    for batch, costs in steps.items():
        yield [batch, *_row(costs, tuple(names), ".3f")]


def _mixed_lines(mixed: list[Figures]) -> Iterator[list[str]]:
    yield ["mixed batch", "tokens", "graph", "requests", "longest", "eager ms", "piecewise ms", "error", "allowed"]
    for one in mixed:
        whole = [str(one[name]) for name in ("tokens", "size", "requests", "max_query_len")]
        times = _row(one["ms"], ("eager", "piecewise"), ".2f")
        yield [one["mix"], *whole, *times, *_row(one, ("error", "allowed"), ".0e")]


def _row(figures: Figures, names: tuple[str, ...], form: str) -> list[str]:
    return [tables.cell(figures, name, form) for name in names]


def _mib(count: float | None) -> str:
    return tables.NOTHING if count is None else f"{count / tables.MIB:.0f}"
