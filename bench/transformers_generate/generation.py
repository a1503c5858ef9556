"""transformers' `generate`, plain, with its static cache and the compiler, and through graphs.

``python -m bench.transformers_generate --models llama,t5``: every arm in a fresh process, so that its first generation
pays for all that it needs: CUDA's lazy loading, compiling with empty caches, capturing; neither imports nor the model.
Before that, tokens are compared in float32 over ragged batches, in a process of their own. With ``--at-once 9`` the
processes of nine models build, generate first and compile side by side, and later tokens are timed in turn: the first
generation then takes longer than it does alone.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from bench.tools import command, compiler, fresh
from bench.tools.fresh import NO_TURN, Turn
from bench.tools.measure import Figures, gpu_busy, say, seconds, synchronize
from bench.tools.options import Options, count, name_list
from bench.tools.replays import Replays, Served
from bench.tools.side_by_side import side_by_side
from bench.tools.tables import cell, ratio
from bench.transformers_generate import families, same_tokens

PLAIN, COMPILED = "plain", "static-compiled"
FUSED = {"simplegraph": True, "simplegraph-own-kernels": False}  # our arms
ARMS = (PLAIN, COMPILED, *FUSED)
LAUNCHES = {f"simplegraph-{tokens}-tokens": tokens for tokens in (4, 8, 16)}  # ours, tokens of one graph
ALL_ARMS = (*ARMS, *LAUNCHES)
PRELOADED = ("simplegraph.integrations.transformers.generate.generation", "transformers.models.llama.modeling_llama")
BUSY_TOKENS = 16  # the profiler keeps every kernel of every one


@dataclasses.dataclass(frozen=True)
class GenerationPlan:
    """The models, arms and counts of a measurement.

    Args:
        models: of `families.FAMILIES`; random weights.
        tiny: the models' tiny shapes.
        batch, prompt, tokens: rows, tokens of each prompt, and new ones.
        rounds: generations after the first; their median counts. Graphs serve the prompts of all but the first three.
        arms: of `ALL_ARMS`.
        compared: tokens that are generated in float32 to compare graphs with plain.
        processes: processes of each arm that compiles nothing.
        at_once: models whose processes run side by side.
        timeout: seconds that a process may take.
    """

    models: tuple[str, ...] = ("llama",)
    tiny: bool = False
    batch: int = 1
    prompt: int = 64
    tokens: int = 128
    rounds: int = 9
    arms: tuple[str, ...] = ARMS
    compared: int = 128
    processes: int = 3
    at_once: int = 1
    timeout: int = 400


def default_plan(device: torch.device) -> GenerationPlan:
    """Return the 1B shape of Llama on a GPU; a tiny one on a CPU, whose timings do not measure performance."""
    if device.type == "cuda":
        return GenerationPlan()
    return GenerationPlan(tiny=True, prompt=8, tokens=8, rounds=1, compared=8, processes=1)


# In the process of an arm.


def run_arm(
    plan: GenerationPlan,
    name: str,
    arm: str,
    device: torch.device,
    dtype: torch.dtype,
    gpu: int = 0,
    turn: Turn = NO_TURN,
) -> Figures:
    """Measure seconds of the first generation, ms per token of later ones, ms of one token, and return the tokens.

    The first generation includes the arm's changes to the model. Later ones wait for the process's turn.
    """
    from simplegraph.integrations.transformers import graph_generation

    model = families.build(name, device, dtype, tiny=plan.tiny)
    batch = families.batch(name, model, [plan.prompt] * plan.batch)
    settings: dict[str, Any] = {"do_sample": False}
    if arm == COMPILED:
        compiler.load_cold()
        settings["cache_implementation"] = "static"

    def generate(tokens: int = plan.tokens) -> torch.Tensor:
        found: torch.Tensor = model.generate(**batch, max_new_tokens=tokens, **settings)
        return found

    synchronize(device)
    started = time.perf_counter()
    graphs = None
    if arm in FUSED or arm in LAUNCHES:
        graphs = graph_generation(
            model,
            max_batch_size=plan.batch,
            max_length=families.FAMILIES[name].max_length,
            fused_kernels=FUSED.get(arm, True),
            tokens_per_launch=LAUNCHES.get(arm, 1),
        )
    result = generate()
    synchronize(device)
    taken = [time.perf_counter() - started]
    # A graph makes every token after the first, or several; that of the prompt is not counted.
    replays = Replays(*([] if graphs is None else [graphs]), name=f"{arm} of {name}")
    later = Served(generate, replays, (plan.tokens - 1) // LAUNCHES.get(arm, 1))
    with turn:
        taken += [seconds(later, device) for _ in range(plan.rounds)]
        figures: Figures = {
            "first_seconds": taken[0],
            "ms_per_token": statistics.median(taken[1:]) / plan.tokens * 1e3,
            "first_token_ms": statistics.median(seconds(lambda: generate(1), device) for _ in range(plan.rounds)) * 1e3,
            "seconds": taken,
            "tokens": result[:, -plan.tokens :].tolist(),
        }
    if arm == PLAIN:
        figures |= gpu_busy(lambda: generate(min(plan.tokens, BUSY_TOKENS)), device, calls=1)
    if arm == COMPILED:
        figures["compiled_graphs"] = compiler.compiled_graphs()
    return figures | replays.figures() | ({"report": graphs.report().to_dict()} if graphs is not None else {})


# Around the processes.


def measure(plan: GenerationPlan, device: torch.device) -> Figures:
    """Measure every model and arm in fresh processes; return medians over them, and every process's figures."""
    fresh.preload(device.type, "bench.transformers_generate.generation", *PRELOADED)
    models: dict[str, Figures] = {}
    for start in range(0, len(plan.models), plan.at_once):
        models |= _measure_models(plan, plan.models[start : start + plan.at_once], device)
    return {"plan": dataclasses.asdict(plan), "device": device.type, "models": models}


def _measure_models(plan: GenerationPlan, some: Sequence[str], device: torch.device) -> dict[str, Figures]:
    """Measure models side by side, one arm after the other."""
    say(f"{', '.join(some)}: tokens in float32 ...")
    settings = device, plan.tiny, plan.prompt, plan.compared
    found = dict(side_by_side({name: (same_tokens.compare, (name, *settings)) for name in some}, plan.timeout))
    for name, agreement in found.items():
        say(f"{name}, {_agreement(agreement)}")
    arms: dict[str, Figures] = {name: {} for name in some}
    for arm in plan.arms:
        say(f"{', '.join(some)}: {arm}, bfloat16 ...")
        for name, figures in _measure_arm(plan, some, arm, device).items():
            arms[name][arm] = figures
            say(f"{name}, {arm}: {_in_a_line(figures)}")
    return {name: found[name] | {"arms": arms[name]} for name in some}


def _measure_arm(plan: GenerationPlan, some: Sequence[str], arm: str, device: torch.device) -> dict[str, Figures]:
    runs: dict[str, list[Figures]] = {name: [] for name in some}
    for _ in range(1 if arm == COMPILED and device.type == "cuda" else plan.processes):
        left = [name for name in some if not any("failed" in run for run in runs[name])]
        tasks = {name: (run_arm, (plan, name, arm, device, torch.bfloat16)) for name in left}
        for name, run in side_by_side(tasks, plan.timeout):
            runs[name].append({key: value for key, value in run.items() if key != "tokens"})
    return {name: _medians(arm, each) for name, each in runs.items()}


def _medians(arm: str, runs: Sequence[Figures]) -> Figures:
    """Return the medians of an arm's processes, or the failure of one."""
    failed = next((run for run in runs if "failed" in run), None)
    if failed is not None:  # what transformers cannot compile is a figure, not a failure
        return {"skipped": failed["reason"]} if arm == COMPILED else failed
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    return {key: statistics.median(run[key] for run in runs) for key in numbers} | {"runs": list(runs)}


def failures(figures: Figures) -> list[str]:
    """List models whose tokens differ, and required arms that failed."""
    failed = []
    for name, model in figures["models"].items():
        parts = {"the comparison of tokens": model} | model["arms"]
        failed += [f"{part} of {name}:\n{found['failed']}" for part, found in parts.items() if "failed" in found]
    return failed


_COLUMNS = ("ms a token", "x plain ms", "1 token ms", "first s", "x sooner", "GPU busy")


def render(figures: Figures) -> str:
    """The figures as a table; `x sooner` is the compiled first generation's time over that of the arm."""
    lines = ["batch {batch}, prompt of {prompt}, {tokens} new tokens".format(**figures["plan"])]
    if figures["plan"].get("at_once", 1) > 1:
        lines.append("first generations ran beside those of other models, so they took longer than alone")
    lines.append(f"{'':>34}" + "".join(f"{title:>12}" for title in _COLUMNS))
    for name, model in figures["models"].items():
        lines += [f"{name:>10}  {arm:>22}{_cells(found, model['arms'])}" for arm, found in model["arms"].items()]
        lines.append(f"{name:>10}  {_agreement(model)}")
    return "\n".join(lines)


def _in_a_line(found: Figures) -> str:
    """The figures of an arm in a line, or why there are none."""
    if "ms_per_token" not in found:
        return f"skipped: {found['skipped']}" if "skipped" in found else f"failed: {found['reason']}"
    return f"{found['ms_per_token']:.3f} ms a token, first generate {found['first_seconds']:.2f} s"


def _cells(found: Figures, arms: Figures) -> str:
    if "ms_per_token" not in found:
        return f"    {_in_a_line(found)}"
    plain, compiled = (arms.get(arm, {}) for arm in (PLAIN, COMPILED))
    cells = [
        cell(found, "ms_per_token", ".3f"),
        ratio(found, plain, "ms_per_token", ".3f"),
        cell(found, "first_token_ms", ".1f"),
        cell(found, "first_seconds", ".2f"),
        ratio(compiled, found, "first_seconds", ".1f"),
        cell(found, "busy_share", ".0%"),
    ]
    row = "".join(f"{cell:>12}" for cell in cells)
    return row if found.get("compiled_graphs", 1) else f"{row}  (transformers compiled nothing)"


def _agreement(model: Figures) -> str:
    if "failed" in model:
        return f"tokens: {model['reason']}"
    parted = f", {model['parted']} parted where two tokens were as likely" if model["parted"] else ""
    return f"in float32 {model['rows']} ragged rows have {model['same_tokens']} tokens in common with plain{parted}"


_NUMBERS = {
    "batch": "rows",
    "prompt": "tokens of each prompt",
    "tokens": "new ones",
    "rounds": "generations after the first",
    "compared": "tokens to compare in float32",
    "processes": "of each arm that compiles nothing",
    "at_once": "models whose processes run side by side",
    "timeout": "seconds that a process may take",
}


OPTIONS: Options = {
    "--models": name_list(families.FAMILIES, "llama by default"),
    "--tiny": {"action": "store_true", "help": "tiny shapes, as on a CPU"},
    "--arms": name_list(ALL_ARMS, f"by default {', '.join(ARMS)}"),
    **{f"--{name.replace('_', '-')}": {"type": count, "help": text} for name, text in _NUMBERS.items()},
}
main = command.of("bench.transformers_generate", __doc__, OPTIONS, default_plan, measure, render, failures)
