"""The measurements of one model at one batch, all arms in one process."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.arms.base import NotAvailable
from bench.arms.libraries import NamedArm, load_compiler, load_cuda, load_optimizer, load_tensordict
from bench.optimized.shapes import MODELS, ComparedModel
from bench.tools.compiler import empty_caches
from bench.tools.fresh import NO_TURN, Turn
from bench.tools.measure import Figures, Timeline, in_turn, kernels_by_name
from bench.tools.replays import Replays, Served

READY_CALLS = 4  # after which every arm has compiled and captured
BATCHES = 4  # different ones that take turns
ROUNDS = {"cuda": 9, "cpu": 1}  # in which arms take turns
PER_TURN = {"cuda": 20, "cpu": 2}
LISTED = 30  # kernels of an arm
EAGER, GRAPH, OPTIMIZED, STATIC, COMPILED, DEFAULT = (
    "eager",
    "graph",
    "optimized",
    "optimized-static",
    "compiled",
    "compiled-default",
)
COMPARED = (GRAPH, OPTIMIZED, STATIC, COMPILED)  # arms whose kernels are listed

Step = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


def _graph(entry: ComparedModel, module: nn.Module, batch: Inputs, **settings: Any) -> Step:
    return sg.wrap(module, capture_sizes=[len(batch[0])], progress=False, **settings)


def _optimized(entry: ComparedModel, module: nn.Module, batch: Inputs, **settings: Any) -> Step:
    sg.optimize(entry.optimized(module))
    return _graph(entry, module, batch, **settings)


def _compiled(entry: ComparedModel, module: nn.Module, batch: Inputs, **settings: Any) -> Step:
    compiled: Step = torch.compile(module, **settings)
    return compiled


def _graphed_callables(entry: ComparedModel, module: nn.Module, batch: Inputs) -> Step:
    graphed: Step = torch.cuda.make_graphed_callables(lambda *tensors: module(*tensors), batch)
    return graphed


def _tensordict(entry: ComparedModel, module: nn.Module, batch: Inputs) -> Step:
    from tensordict.nn import CudaGraphModule

    graphed: Step = CudaGraphModule(module, warmup=READY_CALLS - 2, device=batch[0].device)
    return graphed


REDUCED = functools.partial(_compiled, mode="reduce-overhead")
# Called with the entry, the module and a batch.
ARMS: dict[str, NamedArm] = {
    EAGER: NamedArm(lambda entry, module, batch: module, ours=True),
    GRAPH: NamedArm(_graph, ours=True),
    OPTIMIZED: NamedArm(_optimized, load_optimizer, ours=True),
    STATIC: NamedArm(functools.partial(_optimized, outputs="static"), load_optimizer, ours=True),
    "make-graphed-callables": NamedArm(_graphed_callables, load_cuda),
    "tensordict-cudagraph": NamedArm(_tensordict, load_tensordict),
    COMPILED: NamedArm(REDUCED, load_compiler, compiles=True),
    DEFAULT: NamedArm(_compiled, load_compiler, compiles=True),
}


def run_row(
    name: str, rows: int, arms: Sequence[str], device: torch.device, tiny: bool, gpu: int = 0, turn: Turn = NO_TURN
) -> Figures:
    """Measure arms on one model, one after the other from a first call on, then in turn.

    Eager comes first, so that what CUDA and its libraries load at their first use is in no other arm's first call.
    Processes that run side by side make first calls in turn: a compiler takes all cores. Compile caches, Triton's
    included, are empty.

    Raises:
        NotReplayed: graphs did not serve an arm of ours.
    """
    with empty_caches(), torch.no_grad():
        entry, dtype = MODELS[name], torch.bfloat16 if device.type == "cuda" else torch.float32
        torch.manual_seed(0)
        with device:
            module = entry.build(tiny).to(device, dtype).eval().requires_grad_(False)
        batches = [_batch(entry, rows, device, dtype, tiny) for _ in range(BATCHES)]
        steps: dict[str, Step] = {}
        figures: Figures = {"arms": {}, "dtype": str(dtype).removeprefix("torch.")}
        for arm in sorted(arms, key=list(ARMS).index):
            found = figures["arms"][arm] = {}
            try:
                ARMS[arm].load(device)
                made = copy.deepcopy(module)
                with turn:
                    steps[arm] = _first_calls(entry, made, arm, batches, device, found)
            except NotAvailable as reason:
                found["skipped"] = str(reason)
            except Exception as error:
                if ARMS[arm].ours:
                    raise
                found["failed"] = f"{type(error).__name__}: {error}"
        with turn:
            _measure(figures["arms"], steps, batches, device)
            wide = _in_float64(module, _batch(entry, rows, device, dtype, tiny))
            for arm, step in steps.items():
                figures["arms"][arm]["error"] = _error(step(*wide.inputs), wide.answer)
                if arm in COMPARED and device.type == "cuda":
                    figures["arms"][arm]["kernels"] = _kernels(step, batches[0])
    return figures


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
    """Make the arm's step and call it until it is ready; notes the seconds, and what `optimize` did."""
    timeline = Timeline(device)
    step = ARMS[arm].make(entry, module, batches[0])
    for _, batch in zip(range(READY_CALLS), itertools.cycle(batches), strict=False):
        step(*batch)
        timeline.mark("first")
    timeline.mark("ready")
    found |= {f"{name}_seconds": seconds for name, seconds in timeline.seconds.items()}
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


def _kernels(step: Step, batch: Inputs) -> list[list[Any]]:
    """List the kernels of a call that take most: name, how often, us in total; the rest in one line."""
    found = sorted(kernels_by_name(lambda: step(*batch)).items(), key=lambda item: -item[1][1])
    shown = [[name[:160], round(count, 1), round(us, 2)] for name, (count, us) in found[:LISTED]]
    others = [numbers for _, numbers in found[LISTED:]]
    return [*shown, ["others", round(sum(each[0] for each in others), 1), round(sum(each[1] for each in others), 2)]]


@dataclasses.dataclass(frozen=True)
class _Wide:
    """Inputs, and a module's answer to them in float64."""

    inputs: Inputs
    answer: Tensor


def _in_float64(module: nn.Module, inputs: Inputs) -> _Wide:
    """Compute the answer row by row: attention in float64 takes memory by the square of the tokens."""
    wide = copy.deepcopy(module).double()
    answers = []
    for row in range(len(inputs[0])):
        given = [each[row : row + 1] if each.dim() else each for each in inputs]
        answers.append(wide(*(each.double() if each.is_floating_point() else each for each in given)))
    return _Wide(inputs, torch.cat(answers))


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())
