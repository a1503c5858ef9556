"""Vision and diffusion models: how soon do they answer, what does a call cost, and what memory is kept?

``python -m bench.models_first_call``: every model and arm in a fresh process. ``first``: the first result, from
the built model. ``ready``: three calls, after which every arm has compiled or captured what it will. Every arm's
answer to an input that it has not seen is compared with eager's.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg
from bench import environment
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
    """All models installed, at real shapes on a GPU; tiny on a CPU, where times are not speed."""
    return Plan(tuple(available()), tuple(ARMS), tiny=device.type != "cuda")


# The arms: each makes a callable of a module; the second argument is a call's tensors.


def _eager(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return module


def _simplegraph(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return sg.wrap(module, capture_sizes=[inputs[0].shape[0]], progress=False)


def _simplegraph_static(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    return sg.wrap(module, capture_sizes=[inputs[0].shape[0]], progress=False, outputs="static")


def _compiled(module: nn.Module, inputs: tuple[Tensor, ...]) -> Step:
    _needs_gpu(inputs)
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


# In the process of an arm.


def run_arm(model: str, arm: str, device: torch.device, *, tiny: bool) -> Figures:
    """The figures of one arm on one model; `skipped` says why there are none.

    Raises:
        RuntimeError: its answers are not eager's.
    """
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    module = ZOO[model].build(tiny).to(device, dtype).eval().requires_grad_(False)
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
    try:
        runs = [_in_process(plan, model, arm, device) for _ in range(plan.processes)]
    except subprocess.TimeoutExpired:
        return {"skipped": f"took more than {plan.timeout} s"}
    if "skipped" in runs[0]:
        return runs[0]
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]} | {"runs": runs}


def _in_process(plan: Plan, model: str, arm: str, device: torch.device) -> Figures:
    say(f"{model}, {arm}")
    command = [sys.executable, "-m", "bench.models_first_call", f"--model={model}", f"--arm={arm}"]
    command += [f"--device={device.type}", *(["--tiny"] if plan.tiny else [])]
    answer = subprocess.run(
        command,
        cwd=environment.ROOT,
        env=os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},  # a first call is a cold one
        capture_output=True,
        text=True,
        timeout=plan.timeout,
    )
    if answer.returncode:
        raise RuntimeError(f"{arm} of {model} failed:\n{answer.stderr[-4000:]}")
    figures: Figures = json.loads(answer.stdout.splitlines()[-1])
    return figures


_COLUMNS = {
    "first_seconds": "first s",
    "ready_seconds": "ready s",
    "ms": "ms a call",
    "kernel_ms": "kernels ms",
    "busy_share": "GPU busy",
    "reserved_mib": "kept MiB",
}


def render(figures: Figures) -> str:
    """The figures as a table."""
    lines = [] if figures["device"] == "cuda" else [NOT_SPEED]
    lines.append(f"{'':>46}" + "".join(f"{title:>12}" for title in _COLUMNS.values()))
    for model, arms in figures["models"].items():
        for arm, found in arms.items():
            cells = [f"{found[name]:.3f}" if name in found else "-" for name in _COLUMNS]
            text = found["skipped"] if "skipped" in found else "".join(f"{cell:>12}" for cell in cells)
            lines.append(f"{model:>20}  {arm:>24}{'  ' * ('skipped' in found)}{text}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure all, or, with ``--arm``, be the process of one arm and model."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(prog="python -m bench.models_first_call", description=__doc__)
    parser.add_argument("--model", choices=list(ZOO), help="this one alone")
    parser.add_argument("--arm", choices=list(ARMS), help="be the process of one arm; needs --model")
    parser.add_argument("--device", default=device)
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, as on a CPU")
    parser.add_argument("--processes", type=int, help="of each arm and model")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(argv)
    plan = default_plan(torch.device(given.device))
    plan = dataclasses.replace(plan, tiny=plan.tiny or given.tiny, processes=given.processes or plan.processes)
    if given.model:
        plan = dataclasses.replace(plan, models=(given.model,))
    if given.arm:
        print(json.dumps(run_arm(given.model, given.arm, torch.device(given.device), tiny=plan.tiny)))
        return
    figures = measure(plan, torch.device(given.device))
    print(render(figures))
    if given.json:
        given.json.write_text(json.dumps(figures | {"environment": environment.describe()}, indent=2))


if __name__ == "__main__":
    main()
