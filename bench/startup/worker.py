"""One arm, measured in this process and no other: ``python -m bench.startup.worker --arm NAME --json OUT``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.tools import torchrun

STEP_BATCHES = (1, 8, 64, 256)


def main(arguments: list[str] | None = None) -> int:
    """Measure one arm and write the figures; 0 also where the arm is not available, 1 where it failed."""
    options = parser().parse_args(arguments)
    began = time.perf_counter()
    result: dict[str, Any] = {"arm": options.arm, "cache": options.cache}
    result |= _outcome(options)
    result["process_s"] = time.perf_counter() - began
    Path(options.json).write_text(json.dumps(result, indent=2))
    return int(result["status"] == "failed")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup.worker", description=__doc__)
    parser.add_argument("--arm", required=True, help="a name in bench.arms.ARMS")
    parser.add_argument("--json", required=True, help="file to write")
    parser.add_argument("--model", default="tiny", help="tiny, 8b, 70b, or a folder with a config.json")
    parser.add_argument("--layers", type=int, help="in place of the model's number of layers")
    parser.add_argument("--sizes", type=parse_sizes, default=(1, 2, 4, 8), help="batch sizes, such as 1,2,4")
    parser.add_argument("--device", default=None, help="cuda or cpu; cuda where there is one by default")
    parser.add_argument("--lm-head", action="store_true", help="return logits in place of hidden states")
    parser.add_argument("--steps", type=int, default=50, help="steps that a step time is the median of")
    torchrun.add_option(parser)
    parser.add_argument("--tp-run", default="0", help="names the meeting of the ranks; each process its own")
    parser.add_argument("--cache", choices=("cold", "warm"), default=None, help="noted in the result")
    return parser


def parse_sizes(text: str) -> tuple[int, ...]:
    """``1,2,4`` as numbers."""
    return tuple(int(part) for part in text.split(","))


def _outcome(options: argparse.Namespace) -> dict[str, Any]:
    """The figures, or why there are none."""
    from bench.arms.base import NotAvailable

    try:
        return {"status": "ok", **measure_arm(options)}
    except NotAvailable as error:
        return {"status": "not available", "error": str(error)}
    except Exception as error:  # the other arms go on; this one is reported, and the exit status says so
        traceback.print_exc()
        return {"status": "failed", "error": f"{type(error).__name__}: {error}"}


def measure_arm(options: argparse.Namespace) -> dict[str, Any]:
    """Build, start, compare, then time; a mismatch leaves no figures."""
    import torch

    from bench.arms import load_arm
    from bench.arms.base import Setup
    from bench.arms.correctness import compare_with_eager, counts_to_compare, eager_noise
    from bench.models.attention import attention_name
    from bench.models.workload import Workload
    from bench.tools import environment
    from bench.tools.measure import say

    device_type = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    shard, ranks = torchrun.start(options.tp, device_type, f"bench/{options.tp_run}")
    device = device_of(options.device)
    arm_class = load_arm(options.arm)
    arm_class.check_available(device)
    workload = Workload(
        options.model, options.sizes, device, lm_head=options.lm_head, layers=options.layers, shard=shard
    )
    say(f"{options.arm}: building {options.model} on {device}")
    setup = Setup(workload.build(), workload, ranks)
    with torch.inference_mode(), few_threads(device):
        weight = next(setup.model.parameters())
        say(f"{options.arm}: attention is {attention_name(weight.device, weight.dtype)}")  # loads it, too
        arm_class.load(setup)
        arm, started = start(arm_class, setup)
        say(f"{options.arm}: {', '.join(f'{name} {s:.2f} s' for name, s in started['seconds'].items())}")
        comparisons = compare_with_eager(arm, setup, counts_to_compare(sorted(workload.sizes)))
        figures = started | {"correct": [dataclasses.asdict(one) for one in comparisons]}
        figures |= {"eager_noise": eager_noise(setup)}
        figures |= speeds(arm, setup, options.steps)
        figures |= {"graphs": arm.graphs(), "details": arm.details(), "notes": arm.notes}
        if arm_class.restartable and device.type == "cuda":
            del arm
            figures["primed"] = start(arm_class, setup)[1]
    return figures | shape(setup) | {"environment": environment.describe()}


def device_of(name: str | None) -> Any:
    """The named device, or the current GPU where there is one; with its index."""
    import torch

    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)


@contextlib.contextmanager
def few_threads(device: Any) -> Iterator[None]:
    """On a CPU one thread: operators this small gain nothing from more, and wait long where cores are shared."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1 if device.type == "cpu" else threads)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def start(arm_class: type[Any], setup: Any) -> tuple[Any, dict[str, Any]]:
    """A started arm, with its seconds from the built model on, and the memory that it keeps and peaked at."""
    import torch

    from bench.tools.measure import Memory, Timeline

    gc.collect()
    first = setup.batch(1)
    _ = setup.largest  # made before the clock
    before = Memory.now(setup.device)
    if before:
        torch.cuda.reset_peak_memory_stats(setup.device)
    timeline = Timeline(setup.device)
    arm = arm_class(setup)
    arm.start(first, timeline)
    figures: dict[str, Any] = {"seconds": timeline.seconds}
    if before:
        figures["peak_bytes"] = torch.cuda.max_memory_allocated(setup.device)
        figures |= before.spent(Memory.now(setup.device))
    return arm, figures


def speeds(arm: Any, setup: Any, steps: int) -> dict[str, Any]:
    """Step times in ms by batch, and on a GPU microseconds of host time per call at batch 1."""
    from bench.tools.measure import host_microseconds, step_milliseconds

    step_ms = {}
    for count in STEP_BATCHES:
        if count <= setup.workload.max_batch:
            batch = setup.batch(count)
            step_ms[str(count)] = step_milliseconds(lambda batch=batch: arm(*batch), setup.device, steps=steps)
    if setup.device.type != "cuda":
        return {"step_ms": step_ms}
    one = setup.batch(1)
    return {"step_ms": step_ms, "host_us": host_microseconds(lambda: arm(*one), setup.device, calls=steps)}


def shape(setup: Any) -> dict[str, Any]:
    """What was run: the model, the sizes, the attention."""
    from bench.models.attention import attention_name

    weight = next(setup.model.parameters())
    return {
        "model": setup.workload.model,
        "layers": setup.model.config.num_hidden_layers,
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": setup.device.type,
        "sizes": sorted(setup.workload.sizes),
        "context": setup.workload.context,
        "lm_head": setup.workload.lm_head,
        "attention": attention_name(weight.device, weight.dtype),
        "pid": os.getpid(),
        "tp": setup.workload.shard.size,
    }


if __name__ == "__main__":
    sys.exit(main())
