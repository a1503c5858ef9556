"""Measures the latency of single calls at batch 1, side by side, with guards and without.

``python -m bench.latency``: ``waited``: us of a call and of the wait for its answer, as a robot, a game or a request at
batch 1 needs it; ``issued``: until the call returns, the device idle before; ``back to back``: us of a call among
others that are waited for together. ``simplegraph`` copies its answers, ``static`` leaves them in the graph's memory,
as all others do. ``no-guards`` is ``static`` with its guards left out, which only this benchmark can do, and
``bare-graph`` a `torch.cuda.CUDAGraph` of the module with the same copy of inputs. Then graphs of
``make_graphed_callables`` and of tensordict, ``optimized-static`` after ``simplegraph.optimize``, and, only with
``--compiled``, ``torch.compile(mode="reduce-overhead")``, warm. Weights are random, in bfloat16 on a GPU. All arms of a
row are in one process, on the same weights but for what changes them, and take turns. ``--tail 5000`` measures the
slowest of so many waited calls instead: as users have them, with proofs now and then; with ``verify=0``; and eager.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

import simplegraph as sg
from bench.arms.base import NotAvailable
from bench.latency import guards, tail
from bench.latency.arms import ARMS, BARE, CALLABLES, COMPILED, OPTIMIZED, STATIC, UNGUARDED, USUAL, remove_guards
from bench.latency.models import MODELS, STEP, TINY, available
from bench.optimized.rows import Inputs, Step
from bench.tools import command
from bench.tools.files import known_rows, save_figures
from bench.tools.measure import Call, Figures, say, synchronize
from bench.tools.options import Options, count, name_list
from bench.tools.replays import Replays, Served, timed
from bench.tools.tables import cell, grid, in_line, measured

READY_CALLS = 5  # after which every arm has compiled and captured
WARMUP = 5  # calls of an arm before those of its turn
EXACT = 0.05  # largest difference of an arm's answer from eager's, relative to its norm
BLOCK = 0.3  # seconds that one arm's calls of a round take at most, so that a slow model has fewer
WAITED, ISSUED, ROW = "waited_us", "issued_us", "row_us"
TITLES = {WAITED: "waited", ISSUED: "issued", ROW: "back to back"}


@dataclasses.dataclass(frozen=True)
class LatencyPlan:
    """The rows of a measurement.

    Attributes:
        models: of `MODELS`; arms: of `ARMS`.
        rounds: in which arms take turns; calls: of an arm in a round, waited for, and as many back to back.
        compiled: True to compile every model, too.
        guards: True to measure the parts of the guards, too.
        tail: calls of each arm of `bench.latency.tail`, which is measured instead; 0 for none.
        smoke: True for tiny shapes, two models and few calls.
        total: seconds after which rows that are not done are left out.
        more: True to keep the rows that the file has, and measure the others.
        json: the file, written whenever a row is done.
    """

    models: tuple[str, ...]
    arms: tuple[str, ...] = USUAL
    rounds: int = 5
    calls: int = 200
    compiled: bool = False
    guards: bool = False
    tail: int = 0
    smoke: bool = False
    total: int = 1000
    more: bool = False
    json: Path | None = None


def default_plan(device: torch.device) -> LatencyPlan:
    """Return all models that are installed on a GPU but the largest; a smoke on a CPU."""
    if device.type == "cuda":
        return LatencyPlan(tuple(available()))
    return LatencyPlan(TINY, rounds=1, calls=5, smoke=True)


def measure(plan: LatencyPlan, device: torch.device) -> Figures:
    """Measure row by row."""
    if plan.smoke and device.type == "cuda":
        plan = dataclasses.replace(plan, models=TINY, rounds=1, calls=5)
    rows: dict[str, Figures] = known_rows(plan.json) if plan.more else {}
    figures: Figures = {"plan": dataclasses.asdict(plan) | {"json": None}, "device": device.type, "rows": rows}
    began, left = time.monotonic(), [name for name in plan.models if name not in rows]
    while left and time.monotonic() - began < plan.total:
        name = left.pop(0)
        try:
            rows[name] = _tail(name, plan, device) if plan.tail else _row(name, plan, device)
        except Exception as error:  # the other models go on
            figures.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"
            say(f"{name} failed: {error}")
            continue
        finally:
            _release(device)
        for figure, title in TITLES.items():
            arms = {arm: each[figure] for arm, each in rows[name]["arms"].items() if figure in each}
            if arms:
                say(f"{name}, {title}: {in_line(arms, '.1f', 'us')}")
        if plan.tail:
            say(tail.render({name: rows[name]}))
        if "guards" in rows[name]:
            say(f"{name}, guards: {in_line(rows[name]['guards'], '.1f', '')}")
        save_figures(plan.json, figures)
    if left:
        say(f"{plan.total} s are over; left out: {', '.join(left)}. The same command with --more measures them.")
    return figures


def _release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _tail(name: str, plan: LatencyPlan, device: torch.device) -> Figures:
    dtype = _dtype(device)
    with torch.no_grad():
        module, batch = _built(name, plan.smoke, device, dtype)
        return tail.tails(module, batch, plan.tail, device) | {"dtype": str(dtype).removeprefix("torch.")}


def _row(name: str, plan: LatencyPlan, device: torch.device) -> Figures:
    """Make every arm ready, check its answer, and time all in turn. Raises NotReplayed."""
    dtype = _dtype(device)
    with torch.no_grad():
        module, batch = _built(name, plan.smoke, device, dtype)
        found: dict[str, Figures] = {}
        steps = dict(_ready(name, module, batch, plan, device, found))
        expected = module(*batch).double()
        for arm, step in steps.items():
            found[arm]["difference"] = float((step(*batch).double() - expected).norm() / expected.norm())
        taken = Samples({arm: _call(arm, step, batch) for arm, step in steps.items()}, device)
        for _ in range(plan.rounds):
            taken.take(plan.calls)
        for arm, figures in taken.medians().items():
            found[arm] |= figures
        row: Figures = {"arms": found, "dtype": str(dtype).removeprefix("torch."), **guards.held(module)}
        if plan.guards and STATIC in steps:
            row["guards"] = guards.breakdown(steps[STATIC], batch, device, plan.calls)
        return row


def _built(name: str, tiny: bool, device: torch.device, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
    entry = MODELS[name]
    torch.manual_seed(0)
    with device:
        module = entry.build(tiny).to(device).eval().requires_grad_(False)
    if name != STEP:  # which is built in its dtype, with frequencies in float32
        module.to(dtype)
    given = entry.inputs(tiny, 1)
    return module, tuple(each.to(device, dtype if each.is_floating_point() else each.dtype) for each in given)


def _ready(
    name: str, module: nn.Module, batch: Inputs, plan: LatencyPlan, device: torch.device, found: dict[str, Figures]
) -> Iterator[tuple[str, Step]]:
    """Yield the arms that run here, called until they are ready; why others do not is in `found`."""
    for arm in sorted({*plan.arms, *([COMPILED] if plan.compiled else [])}, key=list(ARMS).index):
        found[arm] = {}
        try:
            ARMS[arm].load(device)
            step = ARMS[arm].make(MODELS[name], copy.deepcopy(module) if arm == OPTIMIZED else module, [batch])
            for _ in range(READY_CALLS):
                step(*batch)
            if arm == UNGUARDED:
                remove_guards(step)
            yield arm, step
        except NotAvailable as reason:
            found[arm]["skipped"] = str(reason)
        except Exception as error:
            if ARMS[arm].ours:
                raise
            found[arm]["failed"] = f"{type(error).__name__}: {error}"


def _call(arm: str, step: Step, batch: Inputs) -> Served:
    replays = Replays(step, name=arm) if isinstance(step, sg.CudaGraphWrapper) else Replays()
    return Served(lambda: step(*batch), replays)


class Samples:
    """Microseconds of several calls, measured in turn so that clock drift affects all alike."""

    def __init__(self, calls: Mapping[str, Call], device: torch.device) -> None:
        self._calls, self._device = calls, device
        self._taken: dict[str, dict[str, list[float]]] = {name: {each: [] for each in TITLES} for name in calls}

    def take(self, calls: int) -> None:
        """Measure one round: of each so many calls that are waited for, or as `BLOCK` allows, and as many in a row."""
        most = calls
        for name, call in self._calls.items():
            taken = self._taken[name]
            synchronize(self._device)
            usual = min(self._waited(call)[1] for _ in range(WARMUP))
            calls = max(3, min(most, int(BLOCK / usual)))
            with timed(call, 2 * calls) as bare:
                issued, waited = zip(*(self._waited(bare) for _ in range(calls)), strict=True)
                taken[ISSUED].append(statistics.median(issued))
                taken[WAITED].append(statistics.median(waited))
                began = time.perf_counter()
                for _ in range(calls):
                    bare()
                synchronize(self._device)
                taken[ROW].append((time.perf_counter() - began) / calls)

    def _waited(self, call: Call) -> tuple[float, float]:
        began = time.perf_counter()
        call()
        issued = time.perf_counter()
        synchronize(self._device)
        return issued - began, time.perf_counter() - began

    def medians(self) -> dict[str, Figures]:
        """Return the median round of each, in us, and the fastest and slowest round of those that are waited for."""
        return {
            name: {each: statistics.median(seconds) * 1e6 for each, seconds in taken.items()}
            | {"waited_range_us": [min(taken[WAITED]) * 1e6, max(taken[WAITED]) * 1e6]}
            for name, taken in self._taken.items()
        }


def render(figures: Figures) -> str:
    """Format a table of waited calls, one of issued ones, one of calls back to back, and one of guards."""
    rows: dict[str, Figures] = figures["rows"]
    if figures["plan"]["tail"]:
        return tail.render(rows)
    parts = []
    for figure, title in TITLES.items():
        lines = [[name, *(cell(row["arms"].get(arm, {}), figure, ".1f") for arm in ARMS)] for name, row in rows.items()]
        parts.append(grid(measured([[f"{title}, us", *ARMS], *lines])))
    parts += [_render_guards(rows)] if any("guards" in row for row in rows.values()) else []
    arms = [(arm, each) for row in rows.values() for arm, each in row["arms"].items()]
    missing = {f"{arm}: {why}" for arm, each in arms if (why := each.get("skipped") or each.get("failed"))}
    told = [*sorted(missing), *(goals(rows) if figures["device"] == "cuda" else [])]
    return "\n\n".join([*parts, *(["\n".join(told)] if told else [])])


def _render_guards(rows: Mapping[str, Figures]) -> str:
    found = {name: row["guards"] for name, row in rows.items() if "guards" in row}
    titles = list(next(iter(found.values())))
    forms = ["d" if title in ("dicts", "tensors") else ".1f" for title in titles]
    lines = [[name, *map(cell, [each] * len(titles), titles, forms)] for name, each in found.items()]
    return grid([["guards, after a wait", *titles], *lines])


def goals(rows: Mapping[str, Figures]) -> list[str]:
    """List what static outputs miss, waited for: what guards may cost, a bare graph, and `make_graphed_callables`."""
    found = []
    for name, row in rows.items():
        us = {arm: each[WAITED] for arm, each in row["arms"].items() if WAITED in each}
        if {STATIC, UNGUARDED} <= us.keys():
            cost, most = us[STATIC] - us[UNGUARDED], guards.DICT_US * row["dicts"] + guards.TENSOR_US * row["tensors"]
            found += [f"{name}: guards cost {cost:.1f} us, goal {most:.1f}"] if cost > most else []
        if {UNGUARDED, BARE} <= us.keys() and us[UNGUARDED] > (most := us[BARE] * 1.02 + 15):
            found.append(f"{name}: without guards {us[UNGUARDED]:.1f} us, goal {most:.1f} (bare graph x 1.02 + 15)")
        if {STATIC, CALLABLES} <= us.keys() and us[STATIC] > 1.05 * us[CALLABLES]:
            found.append(f"{name}: {us[STATIC] / us[CALLABLES]:.2f} times make_graphed_callables, goal 1.05")
    return found


def failures(figures: Figures) -> list[str]:
    """List rows that failed, and answers that are not eager's."""
    return [f"{name}: {why}" for name, why in figures.get("failed", {}).items()] + [
        f"{name}: {arm}'s answer differs from eager's by {each['difference']:.2e} of its norm"
        for name, row in figures["rows"].items()
        for arm, each in row["arms"].items()
        if not each.get("difference", 0.0) <= EXACT
    ]


OPTIONS: Options = {
    "--models": name_list(MODELS, "all that are installed but the largest by default; on a CPU two tiny ones"),
    "--arms": name_list(ARMS, "all but compiled by default"),
    "--compiled": {"action": "store_true", "help": "compile every model, too, which takes up to a minute for each"},
    "--rounds": {"type": count, "help": "in which arms take turns; 5 on a GPU, else 1"},
    "--calls": {"type": count, "help": "of an arm in a round; 200 on a GPU, else 5"},
    "--guards": {"action": "store_true", "help": "measure the parts of the guards, too, as after a wait"},
    "--tail": {
        "type": count,
        "help": "measure p50, p99 and the slowest of so many calls instead, with proofs and without",
    },
    "--smoke": {"action": "store_true", "help": "tiny shapes and few calls, on any machine"},
    "--total": {"type": count, "help": "seconds after which rows that are not done are left out"},
    "--more": {"action": "store_true", "help": "keep the rows that the file has, and measure the others"},
}
main = command.of("bench.latency", __doc__, OPTIONS, default_plan, measure, render, failures)
