"""Measures optimized modules with graphs beside the compiler: a call, the first call, the error, the kernels.

``python -m bench.optimized``: every model and batch in a fresh process, all arms in it. ``eager``; ``graph``, the
module as it is in a graph; ``optimized``, after ``simplegraph.optimize``; ``optimized-static``, which does not copy
its answers, as the arms of others do not; graphs of ``make_graphed_callables`` and of tensordict; ``compiled``,
``torch.compile(mode="reduce-overhead")``. Others only if ``--arms`` names them: ``compiled-default``,
``compiled-max-autotune``, ``compiled-freezing``, ``aot-inductor`` (exported, compiled ahead of time, and loaded), and
``compiled-warm``, which is ``compiled`` with the compile caches that another process left. ``--in-turn`` has all
batches in one row, one call each. Weights are random, in bfloat16 on a GPU. Processes prepare side by side,
``--at-once`` of them. One at a time makes the first calls of an arm, and they are timed one after the other while the
others are halted.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.arms.base import NotAvailable
from bench.arms.libraries import (
    NamedArm,
    load_compiler,
    load_cuda,
    load_optimizer,
    load_tensordict,
    load_warm_compiler,
)
from bench.optimized.shapes import MODELS, ComparedModel, available
from bench.tools import command, environment, fresh
from bench.tools.compiler import empty_caches
from bench.tools.files import known_rows, save_figures
from bench.tools.fresh import NO_TURN, Turn
from bench.tools.measure import DeviceMemory, Figures, Timeline, in_turn, kernels_by_name, say
from bench.tools.options import Options, count, name_list, numbers
from bench.tools.replays import Replays, Served
from bench.tools.side_by_side import side_by_side
from bench.tools.tables import cell, grid, in_line, ratio

READY_CALLS = 4  # after which every arm has compiled and captured
BATCHES = 4  # different ones that take turns
ROUNDS = {"cuda": 9, "cpu": 1}  # in which arms take turns
PER_TURN = {"cuda": 20, "cpu": 2}
LISTED = 30  # kernels of an arm
EAGER, GRAPH, OPTIMIZED, STATIC = "eager", "graph", "optimized", "optimized-static"
COMPILED, DEFAULT, AUTOTUNED = "compiled", "compiled-default", "compiled-max-autotune"
FROZEN, AHEAD, WARM = "compiled-freezing", "aot-inductor", "compiled-warm"
COMPARED = (GRAPH, OPTIMIZED, STATIC, COMPILED)  # arms whose kernels are listed

Step = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


def _graph(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs], **settings: Any) -> Step:
    sizes = sorted({len(batch[0]) for batch in batches})
    return sg.wrap(module, capture_sizes=sizes, progress=False, **settings)


def _optimized(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs], **settings: Any) -> Step:
    sg.optimize(entry.optimized(module))
    return _graph(entry, module, batches, **settings)


def _compiled(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs], **settings: Any) -> Step:
    compiled: Step = torch.compile(module, **settings)
    return compiled


def _one_size(batches: Sequence[Inputs], what: str) -> Inputs:
    """Return a batch of what takes only one size."""
    if len({len(batch[0]) for batch in batches}) > 1:
        raise NotAvailable(f"{what} takes one batch size")
    return batches[0]


def _ahead_of_time(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs]) -> Step:
    program = torch.export.export(module, _one_size(batches, "a program that was exported so"))
    loaded: Step = torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))
    return loaded


def _graphed_callables(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs]) -> Step:
    # Copies: it takes what it is given for static inputs, and copies nothing in a call that passes these again.
    samples = tuple(each.clone() for each in _one_size(batches, "a graphed callable"))
    graphed: Step = torch.cuda.make_graphed_callables(lambda *tensors: module(*tensors), samples)
    # The graph of a function keeps nothing alive, and would read weights that are given back.
    return lambda *tensors, kept=module: graphed(*tensors)


def _tensordict(entry: ComparedModel, module: nn.Module, batches: Sequence[Inputs]) -> Step:
    from tensordict.nn import CudaGraphModule

    (first, *_) = _one_size(batches, "its CudaGraphModule")
    graphed: Step = CudaGraphModule(module, warmup=READY_CALLS - 2, device=first.device)
    return graphed


REDUCED = functools.partial(_compiled, mode="reduce-overhead")
# Options and a mode exclude each other: this is reduce-overhead's, and one more.
_FREEZING = {"triton.cudagraphs": True, "freezing": True}
# Called with the entry, the module and the batches.
ARMS: dict[str, NamedArm] = {
    EAGER: NamedArm(lambda entry, module, batches: module, ours=True),
    GRAPH: NamedArm(_graph, ours=True),
    OPTIMIZED: NamedArm(_optimized, load_optimizer, ours=True),
    STATIC: NamedArm(functools.partial(_optimized, outputs="static"), load_optimizer, ours=True),
    "make-graphed-callables": NamedArm(_graphed_callables, load_cuda),
    "tensordict-cudagraph": NamedArm(_tensordict, load_tensordict),
    COMPILED: NamedArm(REDUCED, load_compiler, compiles=True),
    DEFAULT: NamedArm(_compiled, load_compiler, compiles=True),
    AUTOTUNED: NamedArm(functools.partial(_compiled, mode="max-autotune"), load_compiler, compiles=True),
    FROZEN: NamedArm(functools.partial(_compiled, options=_FREEZING), load_compiler, compiles=True),
    AHEAD: NamedArm(_ahead_of_time, load_compiler, compiles=True),
    WARM: NamedArm(REDUCED, load_warm_compiler, compiles=True),
}


def run_row(
    name: str,
    sizes: int | tuple[int, ...],
    arms: Sequence[str],
    device: torch.device,
    tiny: bool,
    gpu: int = 0,
    turn: Turn = NO_TURN,
) -> Figures:
    """Measure arms on one model, one after the other from a first call on, then in turn.

    Eager comes first, so that what CUDA and its libraries load at their first use is in no other arm's first call.
    Processes that run side by side make first calls in turn: a compiler takes all cores. Compile caches, Triton's
    included, are empty. Calls of several `sizes` take turns.

    Raises:
        NotReplayed: graphs did not serve an arm of ours.
    """
    with empty_caches(), torch.no_grad():
        entry, dtype, module, batches = _prepared(name, sizes, device, tiny)
        steps: dict[str, Step] = {}
        figures: Figures = {"arms": {}, "dtype": str(dtype).removeprefix("torch.")}
        for arm in sorted(arms, key=list(ARMS).index):
            found = figures["arms"][arm] = {}
            try:
                ARMS[arm].load(device)
                made = copy.deepcopy(module)
                with turn:
                    if arm == WARM:
                        _fill_caches(name, sizes, device, tiny)
                    steps[arm] = _first_calls(entry, made, arm, batches, device, found)
            except NotAvailable as reason:
                found["skipped"] = str(reason)
            except Exception as error:
                if ARMS[arm].ours:
                    raise
                found["failed"] = f"{type(error).__name__}: {error}"
        with turn:
            _measure(figures["arms"], steps, batches, device)
            inputs = _batch(entry, len(batches[0][0]), device, dtype, tiny)
            wanted = _in_float64(module, inputs)
            for arm, step in steps.items():
                figures["arms"][arm]["error"] = float((step(*inputs).double() - wanted).norm() / wanted.norm())
                if arm in COMPARED and device.type == "cuda":
                    figures["arms"][arm]["kernels"] = _profiled(step, batches[0])
    return figures


def _prepared(
    name: str, sizes: int | tuple[int, ...], device: torch.device, tiny: bool
) -> tuple[ComparedModel, torch.dtype, nn.Module, list[Inputs]]:
    """Build a model, and batches of its calls: different ones, of each size in turn."""
    entry, dtype = MODELS[name], torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    with device:
        module = entry.build(tiny).to(device, dtype).eval().requires_grad_(False)
    every = sizes if isinstance(sizes, tuple) else (sizes,) * BATCHES
    return entry, dtype, module, [_batch(entry, rows, device, dtype, tiny) for rows in every]


def _fill_caches(name: str, sizes: int | tuple[int, ...], device: torch.device, tiny: bool) -> None:
    """Compile a row's model in another process, with the compile caches of this one."""
    given = ", ".join(map(repr, (name, sizes, device.type, tiny)))
    subprocess.run([sys.executable, "-c", f"from bench.optimized.rows import fill; fill({given})"], check=True)


def fill(name: str, sizes: int | tuple[int, ...], device: str, tiny: bool) -> None:
    """Compile a model and call it until it is ready, for the compile caches alone."""
    with torch.no_grad():
        entry, _, module, batches = _prepared(name, sizes, torch.device(device), tiny)
        step = REDUCED(entry, module, batches)
        for batch in batches * READY_CALLS:
            step(*batch)


def _batch(entry: ComparedModel, rows: int, device: torch.device, dtype: torch.dtype, tiny: bool) -> Inputs:
    return tuple(
        each.to(device, dtype if each.is_floating_point() else each.dtype) for each in entry.inputs(tiny, rows)
    )


def _first_calls(
    entry: ComparedModel,
    module: nn.Module,
    arm: str,
    batches: Sequence[Inputs],
    device: torch.device,
    found: Figures,
) -> Step:
    """Make the arm's step and call it until it is ready; notes the seconds, memory, and what `optimize` did."""
    before = DeviceMemory.now(device, release=False)  # an emptied cache would count in the seconds
    timeline = Timeline(device)
    step = ARMS[arm].make(entry, module, batches)
    sizes = len({len(batch[0]) for batch in batches})
    for _, batch in zip(range(READY_CALLS * sizes), itertools.cycle(batches), strict=False):
        step(*batch)
        timeline.mark("first")
    timeline.mark("ready")
    found |= {f"{name}_seconds": seconds for name, seconds in timeline.seconds.items()}
    if before is not None and (after := DeviceMemory.now(device, release=False)) is not None:
        found["memory"] = before.spent(after)
    if isinstance(step, sg.CudaGraphWrapper):
        found["report"] = str(step.graph_report()).splitlines()
    return step


def _measure(
    found: Mapping[str, Figures], steps: Mapping[str, Step], batches: Sequence[Inputs], device: torch.device
) -> None:
    calls = {arm: _cycling(arm, step, batches) for arm, step in steps.items()}
    gc.collect()
    for arm, ms in in_turn(calls, device, rounds=ROUNDS[device.type], steps=PER_TURN[device.type]).items():
        found[arm] |= {"ms": ms} | calls[arm].replays.figures()


def _cycling(arm: str, step: Step, batches: Sequence[Inputs]) -> Served:
    turns = itertools.cycle(batches)
    replays = Replays(step, name=arm) if isinstance(step, sg.CudaGraphWrapper) else Replays()
    return Served(lambda: step(*next(turns)), replays)


def _profiled(step: Step, batch: Inputs) -> list[list[Any]]:
    """List the kernels of a call that take most: name, how often, us in total; the rest in one line."""
    found = sorted(kernels_by_name(lambda: step(*batch)).items(), key=lambda item: -item[1][1])
    shown = [[name[:160], round(count, 1), round(us, 2)] for name, (count, us) in found[:LISTED]]
    others = [numbers for _, numbers in found[LISTED:]]
    return [*shown, ["others", round(sum(each[0] for each in others), 1), round(sum(each[1] for each in others), 2)]]


def _in_float64(module: nn.Module, inputs: Inputs) -> Tensor:
    """Compute the answer in float64, row by row: attention in float64 takes memory by the square of the tokens."""
    wide = copy.deepcopy(module).double()
    answers = []
    for row in range(len(inputs[0])):
        given = [each[row : row + 1] if each.dim() else each for each in inputs]
        answers.append(wide(*(each.double() if each.is_floating_point() else each for each in given)))
    return torch.cat(answers)


# Imported before processes are forked, as far as they are installed.
PRELOADED = (
    "bench.optimized.rows",
    "simplegraph.fused.optimizing.optimize",
    "torchvision",
    "transformers.models.bert.modeling_bert",
    "diffusers",
)
LONGER = 1.2  # times the compiler's; above it, a row's kernels are printed
EXACT = 1.5  # times eager's error against float64
SELDOM = (DEFAULT, AUTOTUNED, FROZEN, AHEAD, WARM)
USUAL = tuple(arm for arm in ARMS if arm not in SELDOM)
_SHOWN = 12  # kernels of an arm


@dataclasses.dataclass(frozen=True)
class OptimizedPlan:
    """The rows of a measurement.

    Attributes:
        models: of `MODELS`; batches: rows of their calls; arms: of `ARMS`.
        in_turn: True for one row of all batches.
        tiny: the models' tiny shapes.
        at_once: processes that prepare side by side.
        timeout: seconds that a process may take.
        total: seconds after which rows that are not done are left out.
        more: True to keep the rows that the file has, and measure the others.
        json: the file, written whenever rows are done.
    """

    models: tuple[str, ...]
    batches: tuple[int, ...] = (1, 8)
    arms: tuple[str, ...] = USUAL
    in_turn: bool = False
    tiny: bool = False
    at_once: int = 4
    timeout: int = 300
    total: int = 1000
    more: bool = False
    json: Path | None = None


def default_plan(device: torch.device) -> OptimizedPlan:
    """Return the installed models, at real shapes on a GPU, tiny ones on a CPU."""
    return OptimizedPlan(tuple(available()), tiny=device.type != "cuda")


def row_name(model: str, batch: int | tuple[int, ...]) -> str:
    """Return the name of a row."""
    return f"{model} {'+'.join(map(str, batch)) if isinstance(batch, tuple) else batch}"


def measure(plan: OptimizedPlan, device: torch.device) -> Figures:
    """Measure every model and batch in a fresh process."""
    if {COMPILED, WARM} <= {*plan.arms}:
        raise SystemExit(f"{COMPILED} and {WARM} share what a process has compiled: measure them in two calls")
    fresh.preload(device.type, *PRELOADED)
    rows: dict[str, Figures] = known_rows(plan.json) if plan.more else {}
    figures: Figures = {"plan": dataclasses.asdict(plan) | {"json": None}, "device": device.type, "rows": rows}
    described, began = environment.describe(), time.monotonic()
    batches: tuple[int | tuple[int, ...], ...] = (plan.batches,) if plan.in_turn else plan.batches
    pairs = [(model, batch) for batch, model in itertools.product(batches, plan.models)]
    for arms in _tries(plan.arms):
        tasks = {pair: (run_row, (*pair, arms, device, plan.tiny)) for pair in pairs if row_name(*pair) not in rows}
        left, total = list(tasks), plan.total - (time.monotonic() - began)
        for pair, found in side_by_side(tasks, plan.timeout, plan.at_once, total):
            name = row_name(*pair)
            left.remove(pair)
            say(f"{time.monotonic() - began:.0f} s, {name}: {_in_a_line(found)}; {len(left)} rows are left")
            failed: dict[str, str] = figures.setdefault("failed", {})
            if "failed" in found:  # such a row is measured again by --more
                failed.setdefault(name, found["failed"])
            else:
                reason = {"failed": f"its process: {_last_line(failed[name])}"} if name in failed else {}
                found["arms"] |= {arm: reason for arm in plan.arms if arm not in arms}
                rows[name] = found
            save_figures(plan.json, figures, described)
    if left:
        names = ", ".join(row_name(*pair) for pair in left)
        say(f"{plan.total} s are over; left out: {names}. The same command with --more measures them.")
    return figures


def _tries(arms: tuple[str, ...]) -> list[tuple[str, ...]]:
    """List the arms of a row's first try, and of one for a row that failed: some compilers end their process."""
    safe = tuple(arm for arm in arms if arm not in SELDOM)
    return [arms, safe] if safe and safe != arms else [arms]


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def _in_a_line(found: Figures) -> str:
    if "failed" in found:
        return "failed: " + _last_line(found["failed"])
    arms = found["arms"].items()
    ms = in_line({arm: each["ms"] for arm, each in arms if "ms" in each}, ".3f", "ms")
    return ms + "; first " + in_line({arm: each["first_seconds"] for arm, each in arms if "ms" in each}, ".2f", "s")


def failures(figures: Figures) -> list[str]:
    """List rows that failed, and those of ours that are not exact enough."""
    failed = {name: why for name, why in figures.get("failed", {}).items() if name not in figures["rows"]}
    return [f"{name}:\n{why}" for name, why in failed.items()] + [
        f"{name}: {arm}'s error against float64 is {each['error']:.2e}, eager's {row['arms'][EAGER]['error']:.2e}"
        for name, row in figures["rows"].items()
        for arm, each in row["arms"].items()
        if ARMS[arm].ours and EAGER in row["arms"] and each["error"] > EXACT * row["arms"][EAGER]["error"] + _steps(row)
    ]


def _steps(row: Figures) -> float:
    """Return what a few outputs may differ by: two steps of their dtype, as `optimize` allows itself."""
    return float(2 * torch.finfo(getattr(torch, row["dtype"])).eps)


def render(figures: Figures) -> str:
    """Format the rows, a summary, and the kernels of rows above `LONGER`."""
    lines: list[str] = []
    rows: dict[str, Figures] = figures["rows"]
    used = [arm for arm in ARMS if any(arm in row["arms"] for row in rows.values())]
    titles = ["ms a call", *used, "x compiled", "x graph", "first s", "compiled's", "sooner", "error", "eager's"]
    table = [titles, *([name, *_cells(row["arms"], used)] for name, row in rows.items())]
    lines += [grid(table), "", *summary(rows), *_missing(rows)]
    for name, row in rows.items():
        if (_ratio(row) or 0.0) > LONGER:
            lines += ["", f"{name}: kernels, how often, us", *_kernels(row["arms"], OPTIMIZED, COMPILED)]
    return "\n".join(lines)


def _missing(rows: dict[str, Figures]) -> list[str]:
    """Say why arms have no figures."""
    arms = [(f"{name}: {arm}", each) for name, row in rows.items() for arm, each in row["arms"].items()]
    return [f"{name}: {_last_line(why)}" for name, each in arms if (why := each.get("skipped") or each.get("failed"))]


def _cells(arms: dict[str, Figures], used: list[str]) -> list[str]:
    ours, theirs = arms.get(OPTIMIZED, {}), arms.get(COMPILED, {})
    return [
        *(cell(arms.get(arm, {}), "ms", ".3f") for arm in used),
        ratio(ours, theirs, "ms", ".2f"),
        ratio(ours, arms.get(GRAPH, {}), "ms", ".2f"),
        cell(ours, "first_seconds", ".2f"),
        cell(theirs, "first_seconds", ".1f"),
        ratio(theirs, ours, "first_seconds", ".1f"),
        cell(ours, "error", ".1e"),
        cell(arms.get(EAGER, {}), "error", ".1e"),
    ]


def _ratio(row: Figures) -> float | None:
    ours, theirs = row["arms"].get(OPTIMIZED, {}), row["arms"].get(COMPILED, {})
    return ours["ms"] / theirs["ms"] if "ms" in ours and "ms" in theirs else None


def _kernels(arms: dict[str, Figures], *names: str) -> list[str]:
    found = []
    for arm in names:
        listed = arms[arm].get("kernels", [])
        total, often = sum(us for _, _, us in listed), sum(count for _, count, _ in listed)
        found.append(f"  {arm}: {often:.0f} kernels, {total:.0f} us")
        found += [f"    {us:9.1f}  x {count:<6g} {name[:100]}" for name, count, us in listed[:_SHOWN]]
    return found


def summary(rows: dict[str, Figures]) -> list[str]:
    """Compare all rows with the compiler's."""
    ratios = {name: found for name, row in rows.items() if (found := _ratio(row)) is not None}
    if not ratios:
        return ["nothing was compiled, so there is nothing to compare with"]
    arms = [rows[name]["arms"] for name in ratios]
    first = min(each[COMPILED]["first_seconds"] / each[OPTIMIZED]["first_seconds"] for each in arms)
    mean = statistics.geometric_mean(ratios.values())
    return [
        f"geometric mean of {len(ratios)} rows {mean:.3f} times the compiler's",
        f"first call sooner: {first:.1f} times at least",
    ]


OPTIONS: Options = {
    "--models": name_list(MODELS, "all that are installed by default"),
    "--batches": {"type": numbers, "help": "rows of the calls; 1,8 by default"},
    "--arms": name_list(ARMS, f"all but {', '.join(SELDOM)} by default"),
    "--in-turn": {"action": "store_true", "help": "one row of all batches, of which each has a call in turn"},
    "--tiny": {"action": "store_true", "help": "tiny shapes, as on a CPU"},
    "--more": {"action": "store_true", "help": "keep the rows that the file has, and measure the others"},
    "--at-once": {"type": count, "help": "processes that prepare side by side"},
    "--timeout": {"type": count, "help": "seconds that a process may take"},
    "--total": {"type": count, "help": "seconds after which rows that are not done are left out"},
}
main = command.of("bench.optimized", __doc__, OPTIONS, default_plan, measure, render, failures)
