"""``python -m bench.sleep``: a model's graphs, weights and caches sleep and wake, beside capturing again."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch import Tensor

import simplegraph as sg
from bench.models.llama import Llama
from bench.models.workload import INPUT_NAMES, PAD_VALUES, Batch, Workload
from bench.tools import command
from bench.tools.measure import Figures, say, synchronize
from bench.tools.neighbor import neighbor
from bench.tools.options import Options, count, numbers
from bench.tools.tables import grid
from simplegraph.batch.sizes import default_sizes

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class SleepPlan:
    """The model's shape and layers, captured sizes, tokens of each request's cache, and how often it sleeps."""

    model: str
    sizes: tuple[int, ...]
    context: int
    cycles: int = 10
    layers: int | None = None
    libraries: bool = False

    def workload(self, device: torch.device, **changes: Any) -> Workload:
        """Return the decode steps that are captured."""
        return dataclasses.replace(
            Workload(self.model, self.sizes, device, self.context, layers=self.layers), **changes
        )


def default_plan(device: torch.device) -> SleepPlan:
    """Return the 8B shape with 51 sizes and caches of 40 GiB; on a CPU a tiny one."""
    if device.type == "cpu":
        return SleepPlan("tiny", (1, 2, 4), 32, 3)
    return SleepPlan("8b", tuple(default_sizes(512)), 640)


def build(plan: SleepPlan, device: torch.device) -> Llama:
    """Build the model where it can sleep: its weights, and beside them its caches."""
    workload = plan.workload(device)
    with sg.sleepable(device=device):
        model = plan.workload(device, context=1).build()
    with sg.sleepable("caches", device=device):
        for layer in model.modules():
            for name in ("k_cache", "v_cache"):
                if hasattr(layer, name):
                    old = getattr(layer, name)
                    setattr(layer, name, old.new_zeros(workload.pages, *old.shape[1:]))
    return model


def used(device: torch.device) -> int:
    """Return the bytes that are taken on the device."""
    synchronize(device)
    if device.type == "cpu":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def libraries(plan: SleepPlan, device: torch.device) -> int:
    """Return what a process has taken whose context and libraries have served every size, and that holds no memory."""
    one = dataclasses.replace(plan, layers=1, context=16).workload(device)
    model, batch = one.build(), one.batch(one.max_batch, 256)
    with torch.inference_mode():
        for size in plan.sizes:
            model(*(each[:size] for each in batch))
    del model, batch
    torch._C._cuda_clearCublasWorkspaces() if device.type == "cuda" else None
    return used(device)


def answers(model: Any, sizes: tuple[int, ...], batch: Batch) -> list[Tensor]:
    """Return the answer to a batch of each size, on the host: the device is to be empty."""
    return [model(*(each[:size] for each in batch)).cpu() for size in sizes]


def timed(call: Any, device: torch.device) -> float:
    """Return the seconds that a call takes, the device's work included."""
    synchronize(device)
    started = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - started


def copy_seconds(size: int, device: torch.device) -> float:
    """Return the seconds that copying so many bytes from pinned memory takes."""
    if device.type == "cpu":
        return 0.0
    source = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(GIB, dtype=torch.uint8, device=device)
    rounds = [timed(lambda: target.copy_(source, non_blocking=True), device) for _ in range(6)]
    return statistics.median(rounds[1:]) * size / GIB


def measure(plan: SleepPlan, device: torch.device) -> Figures:
    """Capture, and sleep and wake again and again."""
    if plan.libraries:
        return {"libraries_bytes": libraries(plan, device)}
    alone = _libraries_alone(plan) if device.type == "cuda" else 0
    model, batch = build(plan, device), plan.workload(device).batch(plan.workload(device).max_batch, 256)
    settings: dict[str, Any] = {"batch_dims": dict.fromkeys(INPUT_NAMES, 0), "pad_values": PAD_VALUES, "verify": 0}
    wrapped = sg.wrap(model, capture_sizes=plan.sizes, progress=False, on_capture_failure="raise", **settings)
    cycles: list[Figures] = []
    with torch.inference_mode():
        capture = timed(lambda: wrapped.capture_graphs(*batch), device)
        wanted = answers(wrapped, plan.sizes, batch)
        captures, awake = wrapped.graph_stats.captures, used(device)
        say(f"captured in {capture:.1f} s; {awake / GIB:.2f} GiB taken, {alone / GIB:.2f} by libraries alone")
        for number in range(plan.cycles):
            report, asleep, taken = wrapped.sleep(caches="discard"), used(device), 0
            if not number and device.type == "cuda":
                with neighbor() as taken:
                    say(f"another process filled {taken / GIB:.2f} GiB with NaN")
            seconds = timed(wrapped.wake, device)
            equal = sum(map(torch.equal, wanted, answers(wrapped, plan.sizes, batch)))
            row = {"sleep": report.seconds, "wake": seconds, "equal": equal, "asleep_bytes": asleep}
            row |= {"given_back": report.given_back, "on_host": report.on_host, "kept": report.kept}
            cycles.append(row | {"awake_bytes": used(device), "neighbor_bytes": taken})
            say(f"asleep {asleep / GIB:.2f} GiB after {report.seconds:.2f} s, woken in {seconds:.3f} s, equal: {equal}")
        alone_copy = copy_seconds(cycles[-1]["on_host"], device)
        recaptures = wrapped.graph_stats.captures - captures + wrapped.graph_stats.recaptures
        again = timed(lambda: (wrapped.reset_graphs(), wrapped.capture_graphs(*batch)), device)
    return {
        "model": plan.model,
        "sizes": len(plan.sizes),
        "libraries_bytes": alone,
        "awake_bytes": awake,
        "capture_seconds": capture,
        "capture_again_seconds": again,
        "copy_alone_seconds": alone_copy,
        "recaptures": recaptures,
        "cycles": cycles,
    }


def _libraries_alone(plan: SleepPlan) -> int:
    arguments = [sys.executable, "-m", "bench.sleep", "--libraries", "--model", plan.model]
    run = subprocess.run(arguments, stdout=subprocess.PIPE, text=True, check=True)
    return int(run.stdout.split()[-1])


def rows(figures: Figures) -> list[tuple[str, str]]:
    """List what it held and how long it took, with names."""
    cycles, alone = figures["cycles"], figures["libraries_bytes"]
    wakes = [cycle["wake"] for cycle in cycles]
    return [
        (
            "sizes whose answers stay equal to the bit",
            f"{min(cycle['equal'] for cycle in cycles)} of {figures['sizes']}",
        ),
        ("recaptures", str(figures["recaptures"])),
        ("awake, GiB", f"{figures['awake_bytes'] / GIB:.2f}"),
        ("asleep, GiB above context and libraries", f"{(cycles[-1]['asleep_bytes'] - alone) / GIB:.3f}"),
        ("growth from the second cycle on, MiB", f"{_growth(cycles):.1f}"),
        ("on the host, GiB", f"{cycles[-1]['on_host'] / GIB:.2f}"),
        ("sleep, first and median, s", f"{cycles[0]['sleep']:.2f}, {_median(cycles, 'sleep'):.2f}"),
        ("wake, median and most, s", f"{statistics.median(wakes):.3f}, {max(wakes):.3f}"),
        ("the copy alone, s", f"{figures['copy_alone_seconds']:.3f}"),
        ("dropping the graphs and capturing again, s", f"{figures['capture_again_seconds']:.2f}"),
    ]


def render(figures: Figures) -> str:
    """Format the figures."""
    return grid([("", "sleep and wake"), *rows(figures)]) if "cycles" in figures else str(figures["libraries_bytes"])


def _growth(cycles: list[Figures]) -> float:
    later = [cycle["asleep_bytes"] for cycle in cycles[1:]] or [0]
    return float(max(later) - later[0]) / 2**20


def _median(cycles: list[Figures], name: str) -> float:
    return statistics.median(cycle[name] for cycle in cycles)


OPTIONS: Options = {
    "--model": {"help": "8b, 70b or tiny"},
    "--layers": {"type": count, "help": "instead of the model's own number"},
    "--sizes": {"type": numbers, "help": "captured batch sizes"},
    "--context": {"type": count, "help": "tokens of each request's cache"},
    "--cycles": {"type": count, "help": "how often it sleeps"},
    "--libraries": {"action": "store_true", "help": "only print the bytes that libraries alone take"},
}
main = command.of("bench.sleep", __doc__, OPTIONS, default_plan, measure, render)


if __name__ == "__main__":
    main()
