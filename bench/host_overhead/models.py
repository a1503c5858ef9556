"""``python -m bench.host_overhead.models``: calls of whole models, steady, mixed, and while sizes are captured.

``steady``: calls with static outputs: the host's us after the device has been waited for (``us``) and in a row
(``row_us``), and the ms of a step; of ten modules, of the startup's model at batch 1, and of the models of
`bench.optimized`; each beside the bare replay of such a graph. ``mixed``: calls of the startup's
model at many batch sizes, all of them proven, with ``verify`` as users have it beside ``verify=0``, in turn. ``lazy``:
the longest call of such batches while each size is captured as it comes, or one in the gap before each call, which is
not timed, beside eager's longest.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench.models.workload import INPUT_NAMES, PAD_VALUES, Workload
from bench.optimized.shapes import MODELS, available
from bench.tools import command
from bench.tools.files import save_figures
from bench.tools.lean_capture import LeanCapture
from bench.tools.measure import Call, Figures, host_microseconds, say, seconds, step_milliseconds, synchronize
from bench.tools.options import Options, count, model_name, name_list
from bench.tools.replays import NotReplayed, Replays, Served
from bench.tools.tables import cell, grid
from simplegraph.batch.sizes import default_sizes

TEN, LLAMA = "ten modules", "llama"
READY_CALLS = 4  # after which a size is captured and proven
BLOCK = 50  # calls of an arm before the other's turn
BATCHES = 48  # different ones among mixed calls


@dataclasses.dataclass(frozen=True)
class ModelsPlan:
    """The parts to measure.

    Attributes:
        parts: of `PARTS`; models: of `bench.optimized`; model, largest: the startup's model and its largest size.
        calls: mixed ones of an arm.
        json: the file, written whenever a part is done.
    """

    parts: tuple[str, ...]
    models: tuple[str, ...] = dataclasses.field(default_factory=lambda: tuple(available()))
    model: str = "8b"
    largest: int = 512
    calls: int = 1000
    json: Path | None = None


def default_plan(device: torch.device) -> ModelsPlan:
    """Return everything that is installed; on a CPU a tiny model and few calls."""
    return ModelsPlan(tuple(PARTS)) if device.type == "cuda" else ModelsPlan(tuple(PARTS), (), "tiny", 8, 100)


def measure(plan: ModelsPlan, device: torch.device) -> Figures:
    """Measure the parts one after the other."""
    figures: Figures = {"model": plan.model, "largest": plan.largest}
    with torch.inference_mode():
        for part in plan.parts:
            for name, found in PARTS[part](plan, device):
                figures.setdefault(part, {})[name] = found
                say(f"{part}, {name}: {found}")
                save_figures(plan.json, figures)
            gc.collect()
    return figures


class _Model:
    """The startup's model, and calls of it at any batch size."""

    def __init__(self, plan: ModelsPlan, device: torch.device) -> None:
        self.sizes = default_sizes(plan.largest)
        self._workload = Workload(plan.model, tuple(self.sizes), device)
        self.module = self._workload.build()
        self._vocabulary = self.module.config.vocab_size

    def wrap(self, **settings: Any) -> Any:
        dims, pads = dict.fromkeys(INPUT_NAMES, 0), PAD_VALUES
        settings = {"capture_sizes": self.sizes, "progress": False} | settings
        return sg.wrap(self.module, outputs="static", batch_dims=dims, pad_values=pads, **settings)

    def batch(self, rows: int) -> tuple[Tensor, ...]:
        return self._workload.batch(rows, self._vocabulary)

    def mixed(self, plan: ModelsPlan) -> list[tuple[Tensor, ...]]:
        """Draw the batches of mixed calls, by the same numbers in every arm."""
        draw = random.Random(0)
        known = [self.batch(draw.randint(1, plan.largest // 2)) for _ in range(BATCHES)]
        return known + [draw.choice(known) for _ in range(plan.calls)]


def _steady(plan: ModelsPlan, device: torch.device) -> Iterator[tuple[str, Figures]]:
    for name, module, batch, wrap in _modules(plan, device):
        wrapped = wrap()
        for _ in range(READY_CALLS):
            wrapped(*batch)
        calls = {"": Served(lambda wrapped=wrapped, batch=batch: wrapped(*batch), Replays(wrapped, name=name))}
        if device.type == "cuda":
            calls["bare_"] = Served(_bare(module, batch), Replays())
        found: Figures = {}
        try:
            for kind, call in calls.items():
                found[f"{kind}us"] = host_microseconds(call, device, calls=200)
                found[f"{kind}row_us"] = _in_a_row(call, device)
                found[f"{kind}ms"] = step_milliseconds(call, device)
        except NotReplayed as reason:  # the other models go on
            found["failed"] = str(reason)
        yield name, found


def _in_a_row(call: Call, device: torch.device, calls: int = 30, rounds: int = 7) -> float:
    """Measure the median us to issue a call among others in a row, which a GPU works off behind them."""
    taken = []
    for _ in range(rounds):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        taken.append((time.perf_counter() - began) / calls * 1e6)
    synchronize(device)
    return statistics.median(taken)


def _modules(
    plan: ModelsPlan, device: torch.device
) -> Iterator[tuple[str, nn.Module, tuple[Tensor, ...], Callable[[], Any]]]:
    """Yield each module with its name, a batch, and what wraps it."""
    ten = nn.Sequential(*(nn.Linear(64, 64) for _ in range(9))).to(device).eval()
    yield TEN, ten, (torch.randn(8, 64, device=device),), lambda: _static(ten, 8)
    llama = _Model(plan, device)
    yield LLAMA, llama.module, llama.batch(1), lambda: llama.wrap(capture_sizes=[1])
    for name in plan.models:
        with device:
            module = MODELS[name].build(False).eval().requires_grad_(False).bfloat16()
        given = (each.to(device) for each in MODELS[name].inputs(False, 1))
        batch = tuple(each.bfloat16() if each.is_floating_point() else each for each in given)
        yield name, module, batch, lambda module=module: _static(module, 1)


def _static(module: nn.Module, rows: int) -> Any:
    return sg.wrap(module, capture_sizes=[rows], outputs="static", progress=False)


def _bare(module: nn.Module, batch: tuple[Tensor, ...]) -> Callable[[], object]:
    """Capture the module as it is; the copy of its inputs is not in it."""
    lean = LeanCapture()
    with lean.on_stream():
        module(*batch)
    with lean.session():
        graph, output = lean.capture(module, *batch)
    return lambda kept=output: graph.replay()


def _mixed(plan: ModelsPlan, device: torch.device) -> Iterator[tuple[str, Figures]]:
    model = _Model(plan, device)
    batches = model.mixed(plan)
    arms = {"verified": model.wrap(), "unverified": model.wrap(verify=0)}
    for wrapped in arms.values():
        wrapped.capture_graphs(*model.batch(plan.largest))
        for batch in batches[:BATCHES] * READY_CALLS:
            wrapped(*batch)
    eager = {name: wrapped.graph_stats.eager.total() for name, wrapped in arms.items()}
    taken: dict[str, list[float]] = {name: [] for name in arms}
    for first in range(BATCHES, len(batches), BLOCK):
        for name, wrapped in arms.items():
            some = batches[first : first + BLOCK]
            taken[name].append(seconds(lambda wrapped=wrapped, some=some: [wrapped(*one) for one in some], device))
    ratios = [one / other for one, other in zip(*taken.values(), strict=True)]
    found = {f"{name}_seconds": sum(each) for name, each in taken.items()}
    found |= {f"{name}_eager_calls": each.graph_stats.eager.total() - eager[name] for name, each in arms.items()}
    found["ratio"] = found["verified_seconds"] / found["unverified_seconds"]
    yield f"{plan.calls} calls", found | {"median_ratio": statistics.median(ratios)}


def _lazy(plan: ModelsPlan, device: torch.device) -> Iterator[tuple[str, Figures]]:
    model = _Model(plan, device)
    batches, example, waiting = model.mixed(plan), model.batch(plan.largest), model.wrap(capture="upfront")
    for batch in batches[:BATCHES]:
        model.module(*batch)  # libraries load here
    for name, call, gap in (
        ("eager", model.module, int),
        ("simplegraph", model.wrap(capture="lazy"), int),
        ("simplegraph-in-gaps", waiting, lambda: waiting.capture_next(*example)),
    ):
        taken = []
        for batch in batches[: plan.calls // 2]:
            gap()
            synchronize(device)
            began = time.perf_counter()
            call(*batch)
            synchronize(device)
            taken.append((time.perf_counter() - began) * 1e3)
        yield name, {"longest_ms": max(taken), "median_ms": statistics.median(taken)}


PARTS: dict[str, Callable[[ModelsPlan, torch.device], Iterator[tuple[str, Figures]]]] = {
    "mixed": _mixed,
    "steady": _steady,
    "lazy": _lazy,
}


def render(figures: Figures) -> str:
    """Format a line for every call, part by part."""
    parts = []
    for part in PARTS:
        found = figures.get(part, {})
        names = [name for name in next(iter(found.values()), {}) if name != "failed"]
        rows = [(name, *(cell(each, key, ".3f") for key in names)) for name, each in found.items()]
        parts += [grid([(part, *names), *rows])] if found else []
    return "\n\n".join(parts)


def failures(figures: Figures) -> list[str]:
    """List the models that graphs did not serve."""
    return [f"{name}: {each['failed']}" for name, each in figures.get("steady", {}).items() if "failed" in each]


OPTIONS: Options = {
    "--parts": name_list(PARTS, "all by default"),
    "--models": name_list(MODELS, "all that are installed by default on a GPU, none on a CPU"),
    "--model": model_name(),
    "--largest": {"type": count, "help": "the largest captured size; 512 on a GPU, else 8"},
    "--calls": {"type": count, "help": "mixed calls of an arm; 1,000 on a GPU, else 100"},
}
main = command.of("bench.host_overhead.models", __doc__, OPTIONS, default_plan, measure, render, failures)


if __name__ == "__main__":
    main()
