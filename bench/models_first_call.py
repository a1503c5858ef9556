"""Vision, diffusion and encoder models: how soon do they answer, what does a call cost, and what memory is kept?

``python -m bench.models_first_call``: every model and arm in a fresh process; ``--models`` and ``--arms`` choose.
``first``: the first result, from the built model. ``ready``: three calls, after which every arm has compiled or
captured what it will. Every arm's answer to an input that it has not seen is compared with eager's. What compiles takes
a minute and more for each model, so it runs only where ``--arms`` names it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench import environment, fresh
from bench.arms.base import NotAvailable
from bench.measure import Memory, Timeline, say, step_milliseconds, synchronize
from bench.zoo import ZOO, available

Figures = dict[str, Any]
Step = Callable[..., Tensor]
MIB = 1 << 20
READY_CALLS = 3
BUSY_CALLS = 20
# Of the largest value, for kernels that a compiler chose otherwise.
ROUNDING = {torch.bfloat16: 0.05, torch.float32: 1e-3}
NOT_SPEED = "No GPU here: the graphs are the library's emulator, on tiny models. Times are NOT speed."


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        models: of `ZOO`; arms: of `ARMS`.
        tiny: the models' tiny shapes.
        processes: of each arm and model; medians count.
        timeout: seconds that a process may take.
    """

    models: tuple[str, ...]
    arms: tuple[str, ...]
    tiny: bool
    processes: int = 1
    timeout: int = 300


def default_plan(device: torch.device) -> Plan:
    """All models installed and the arms that compile nothing, at real shapes on a GPU; tiny ones on a CPU."""
    return Plan(tuple(available()), QUICK, tiny=device.type != "cuda")


# The arms: each makes a callable of a module; the second argument is a call's tensors.


def _eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return module


def _simplegraph(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return sg.wrap(module, capture_sizes=[inputs[0].shape[0]], progress=False)


def _simplegraph_static(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return sg.wrap(module, capture_sizes=[inputs[0].shape[0]], progress=False, outputs="static")


def _compiled(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    _needs_gpu(inputs)
    import torch._inductor.config

    torch._inductor.config.force_disable_caches = True  # a first call is a cold one
    compiled: Step = torch.compile(module, mode="reduce-overhead")
    return compiled


def _graphed_callables(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    _needs_gpu(inputs)
    # It replaces the module's forward, and eager is to stay what it was.
    graphed: Step = torch.cuda.make_graphed_callables(lambda *tensors: module(*tensors), inputs)
    return graphed


def _needs_gpu(inputs: tuple[Tensor, ...]) -> None:
    if not inputs[0].is_cuda:
        raise NotAvailable("needs a GPU")


ARMS: dict[str, Callable[[nn.Module, tuple[Tensor, ...]], Step]] = {
    "eager": _eager,
    "simplegraph": _simplegraph,
    "simplegraph-static": _simplegraph_static,
    "compiled-reduce-overhead": _compiled,
    "make-graphed-callables": _graphed_callables,
}
QUICK = tuple(arm for arm in ARMS if not arm.startswith("compiled"))
OURS = ("eager", "simplegraph", "simplegraph-static")  # which have to work


# In the process of an arm.


def run_arm(model: str, arm: str, device: torch.device, tiny: bool) -> Figures:
    """The figures of one arm on one model; `skipped` says why there are none.

    Raises:
        RuntimeError: its answers are not eager's.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        module = ZOO[model].build(tiny)
    module = module.to(device, dtype).eval().requires_grad_(False)
    inputs, others = ([_placed(tensor, device, dtype) for tensor in ZOO[model].inputs(tiny)] for _ in range(2))
    with torch.no_grad():
        before, timeline = Memory.now(device), Timeline(device)
        try:
            step = ARMS[arm](module, tuple(inputs))
        except NotAvailable as reason:
            return {"skipped": str(reason)}
        for _ in range(READY_CALLS):
            step(*inputs)
            timeline.mark("first")
        timeline.mark("ready")
        after = Memory.now(device)
        figures: Figures = {f"{name}_seconds": seconds for name, seconds in timeline.seconds.items()}
        figures["ms"] = step_milliseconds(lambda: step(*inputs), device)
        figures |= _memory(before, after) | _busy(step, inputs, device)
        figures["difference"] = _difference(step, module, others, dtype)
    return figures | ({"replays": step.graph_stats.replays} if isinstance(step, sg.CudaGraphWrapper) else {})


def _placed(tensor: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)


def _memory(before: Memory | None, after: Memory | None) -> Figures:
    if before is None or after is None:
        return {}
    return {f"{name.removesuffix('_bytes')}_mib": size / MIB for name, size in before.spent(after).items()}


def _busy(step: Step, inputs: list[Tensor], device: torch.device) -> Figures:
    """The share of the time in which the GPU runs kernels or copies, calls issued back to back."""
    if device.type != "cuda":
        return {}
    synchronize(device)
    started = time.perf_counter()
    for _ in range(BUSY_CALLS):
        step(*inputs)
    synchronize(device)
    seconds = time.perf_counter() - started
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(BUSY_CALLS):
            step(*inputs)
        synchronize(device)
    busy = sum(event.self_device_time_total for event in profile.key_averages()) / 1e6
    return {"kernel_ms": busy / BUSY_CALLS * 1e3, "busy_share": busy / seconds}


def _difference(step: Step, module: nn.Module, inputs: list[Tensor], dtype: torch.dtype) -> float:
    found, expected = step(*inputs).float(), module(*inputs).float()
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= ROUNDING[dtype]:
        raise RuntimeError(f"answers differ from eager's by {difference:.3g} of the largest value.")
    return difference


# Around the processes.


def measure(plan: Plan, device: torch.device) -> Figures:
    """Every model and arm; medians over processes, and every process's figures."""
    models = {model: {arm: _measure_arm(plan, model, arm, device) for arm in plan.arms} for model in plan.models}
    return {"plan": dataclasses.asdict(plan), "device": device.type, "models": models}


def _measure_arm(plan: Plan, model: str, arm: str, device: torch.device) -> Figures:
    say(f"{model}, {arm}")
    runs: list[Figures] = []
    for _ in range(plan.processes):
        try:
            runs.append(fresh.call(run_arm, model, arm, device, plan.tiny, seconds=plan.timeout))
        except TimeoutError as error:
            return {"skipped": str(error)}
        except fresh.ProcessFailed as error:
            say(str(error))
            return {"failed": str(error)}
    if "skipped" in runs[0]:
        return runs[0]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]} | {"runs": runs}


def failures(figures: Figures) -> list[str]:
    """Models and arms that had to work and did not; what others' arms cannot do is among their figures."""
    arms = [(model, arm, found) for model, arms in figures["models"].items() for arm, found in arms.items()]
    return [f"{arm} of {model}:\n{found['failed']}" for model, arm, found in arms if "failed" in found and arm in OURS]


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
    """The figures as a table."""
    lines = [] if figures["device"] == "cuda" else [NOT_SPEED]
    lines.append(f"{'':>46}" + "".join(f"{title:>12}" for title in (*_COLUMNS.values(), "of eager")))
    for model, arms in figures["models"].items():
        for arm, found in arms.items():
            lines.append(f"{model:>20}  {arm:>24}{_cells(found, arms.get('eager', {}))}")
    return "\n".join(lines)


def _cells(found: Figures, eager: Figures) -> str:
    if "ms" not in found:
        return f"    {found.get('skipped') or 'failed: ' + found['failed'].splitlines()[-1]}"
    cells = [
        format(found[name], ".2g" if name == "difference" else ".3f") if name in found else "-" for name in _COLUMNS
    ]
    cells.append(format(found["ms"] / eager["ms"], ".3f") if "ms" in eager else "-")
    return "".join(f"{cell:>12}" for cell in cells)


def main(argv: list[str] | None = None) -> None:
    """Measure, print the table, and write the figures where ``--json`` says."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m bench.models_first_call", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=available(), help="these alone")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), help=f"these; otherwise {' '.join(QUICK)}")
    parser.add_argument("--device", default=device)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, as on a CPU")
    parser.add_argument("--processes", type=int, help="of each arm and model")
    parser.add_argument("--timeout", type=int, help="seconds that a process may take")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(argv)
    chosen = {name: value for name, value in vars(given).items() if value and name not in ("device", "json")}
    plan = dataclasses.replace(default_plan(torch.device(given.device)), **chosen)
    figures = measure(plan, torch.device(given.device))
    print(render(figures))
    if given.json:
        given.json.write_text(json.dumps(figures | {"environment": environment.describe()}, indent=2))
    if failures(figures):
        raise SystemExit("\n\n".join(failures(figures)))


if __name__ == "__main__":
    main()
