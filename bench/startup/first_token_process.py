"""``python -m bench.startup.first_token_process --arm NAME --json OUT``: one process of `first_token`.

It marks the time since its start at every stage, so it imports nothing heavy before `measure` does.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from bench.tools.options import add_json, add_model

# How the engine runs in each arm; simplegraph's answers its first request before it captures.
ARMS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "NONE", "fused": False},
    "simplegraph": {"fused": False},
    "simplegraph-fused": {"fused": True},
    "compiled-piecewise": {"mode": "PIECEWISE", "compiled": True},
}
STAGES = ("python", "torch", "imported", "weights", "loaded", "engine", "first_token", "ready")
PROMPT = 128
# Packages that take long to import; what is imported of them is in the figures.
HEAVY = (
    *("triton", "transformers", "flashinfer", "vllm", "vllm_flash_attn", "flash_attn_interface", "pytest", "sympy"),
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"),
)


def measure(arm: str, model: str, began: float, *, preload: bool) -> dict[str, Any]:
    """Start an engine and answer one request.

    Args:
        arm: a name in `ARMS`.
        model: as `python -m bench` takes it.
        began: when this process was started, in seconds since the epoch.
        preload: load what CUDA loads at its first use in a thread, as soon as this is called.

    Returns:
        seconds: from the start of the process to each of `STAGES`; "loaded" is when the thread was waited for.
        preload: the same for each part that the thread loaded; empty without it.
        heavy: those of `HEAVY` that were imported until the first token; modules: the number of all.
    """
    seconds = {"python": time.time() - began}

    def mark(stage: str) -> None:
        seconds.setdefault(stage, time.time() - began)

    import simplegraph as sg  # imports no torch

    started = time.time() - began
    compiled = ARMS[arm].get("compiled", False)
    # A compiled model has kernels of its own.
    then = None if compiled else functools.partial(_load_kernels, arm, model)
    loading = sg.preload(then=then) if preload else None
    import torch  # noqa: F401

    mark("torch")
    from bench.engine import Engine, SamplingParams
    from bench.models.workload import Workload
    from bench.tools import environment, text
    from bench.tools.measure import device_of, synchronize

    if compiled:
        importlib.import_module("torch._inductor.compile_fx")
        importlib.import_module("bench.models.serving_compiled")
    mark("imported")
    device = device_of()
    llama = Workload(model, (1,), device, lm_head=True).build(windows=True)
    synchronize(device)
    mark("weights")
    if loading is not None:
        loading.wait()
        mark("loaded")
    engine = Engine(llama, _config(arm, device))
    mark("engine")
    engine.add(text.token_ids(PROMPT, llama.config.vocab_size).tolist(), SamplingParams(max_tokens=2))
    for _ in engine.stream():
        mark("first_token")
    imported = set(sys.modules)
    summary = engine.capture()
    synchronize(device)
    mark("ready")
    parts = {} if loading is None else {part: started + taken for part, taken in loading.seconds.items()}
    described = {"captured": summary.captured, "environment": environment.describe()}
    return {"seconds": seconds, "preload": parts, **_describe(engine, imported), **described}


def _describe(engine: Any, imported: set[str]) -> dict[str, Any]:
    return {
        "heavy": [name for name in HEAVY if name in imported],
        "modules": len(imported),
        "attention": engine.runner.backends[0].name,
        "fused": engine.runner.model.fused,
    }


def _config(arm: str, device: Any) -> Any:
    from bench.engine import EngineConfig

    size: Any = {"max_num_seqs": 256} if device.type == "cuda" else {"max_num_seqs": 4, "capture_sizes": (1, 4, PROMPT)}
    return EngineConfig(max_model_len=512, num_pages=4096, **size, **ARMS[arm])


def _load_kernels(arm: str, model: str) -> None:
    """Run one layer of the model's shape, so that its kernels are compiled and loaded."""
    from bench.engine.start import load_kernels
    from bench.models.workload import Workload
    from bench.tools.measure import device_of

    device = device_of()
    load_kernels(Workload(model, (1,), device).config(), _config(arm, device), device, PROMPT)


def main(arguments: list[str] | None = None) -> int:
    """Measure one arm in this process, and write its figures."""
    began = time.time()
    parser = argparse.ArgumentParser(prog="python -m bench.startup.first_token_process", description=__doc__)
    add_model(parser, default="tiny")
    add_json(parser)
    parser.add_argument("--arm", choices=ARMS, required=True, help="what to measure")
    parser.add_argument("--began", type=float, default=began, help="when it was started, in seconds since the epoch")
    parser.add_argument("--no-preload", action="store_true", help="load everything where it is used first")
    options = parser.parse_args(arguments)
    found = measure(options.arm, options.model, options.began, preload=not options.no_preload)
    Path(options.json).write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
