"""``python -m bench.startup.first_token``: time from a process's start to its first token and to all graphs captured.

Every arm is an engine in two fresh processes. Compile caches (Inductor's, Triton's, FlashInfer's) are empty in the
first and filled in the second. Weights are random: reading them from disk would add the same time to all arms.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.models.workload import Workload
from bench.startup.processes import CompileCaches, cache_environment, run_worker
from bench.tools import environment, text
from bench.tools.files import OUT, save_figures
from bench.tools.measure import NOT_SPEED, Figures, device_of, say, synchronize
from bench.tools.options import add_json, add_model, add_names
from bench.tools.tables import grid, in_line

# How the engine runs in each arm; simplegraph's answers its first request before it captures.
ARMS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "NONE", "fused": False},
    "simplegraph": {"fused": False},
    "simplegraph-fused": {"fused": True},
    "compiled-piecewise": {"mode": "PIECEWISE", "compiled": True},
}
NEEDS_GPU = ("simplegraph-fused", "compiled-piecewise")
PROMPT = 128
TIMEOUT = 400.0


def default_arms(device: torch.device) -> list[str]:
    """Return the arms that run on this device."""
    return [arm for arm in ARMS if device.type == "cuda" or arm not in NEEDS_GPU]


def measure(arms: Sequence[str], model: str, caches: CompileCaches) -> list[Figures]:
    """Measure every arm with cold and warm caches: seconds since its process began, by stage.

    Raises:
        RuntimeError: a process failed.
    """
    found = []
    for arm, cache in itertools.product(arms, ("cold", "warm")):
        found.append(_one(arm, cache, model, caches))
        say(f"first token: {arm}, {cache} caches: {in_line(found[-1]['seconds'], '.2f', 's')}")
    return found


def _one(arm: str, cache: str, model: str, caches: CompileCaches) -> Figures:
    say(f"first token: {arm}, {cache} caches ...")
    folder = caches.folder(arm, cache)
    environment = cache_environment(folder) | {"FLASHINFER_WORKSPACE_BASE": str(folder)}
    line = [sys.executable, "-m", "bench.startup.first_token", "--arm", arm, "--model", model]
    return {"arm": arm, "cache": cache} | run_worker([*line, "--began", repr(time.time())], environment, TIMEOUT)


def _engine_stages(arm: str, model: str, began: float) -> Figures:
    """Measure one process's stages, in seconds since it began."""
    importlib.import_module("transformers.models.llama.configuration_llama")  # which building would else import
    seconds = {"imported": time.time() - began}
    device = device_of()
    llama = Workload(model, (1,), device, lm_head=True).build(windows=True)
    synchronize(device)
    seconds["weights"] = time.time() - began
    size: Any = {"max_num_seqs": 256} if device.type == "cuda" else {"max_num_seqs": 4, "capture_sizes": (1, 4, PROMPT)}
    engine = Engine(llama, EngineConfig(max_model_len=512, num_pages=4096, **size, **ARMS[arm]))
    engine.add(text.token_ids(PROMPT, llama.config.vocab_size).tolist(), SamplingParams(max_tokens=2))
    for _ in engine.stream():
        seconds.setdefault("first_token", time.time() - began)
    summary = engine.capture()
    synchronize(device)
    seconds["ready"] = time.time() - began
    return {"seconds": seconds, "attention": engine.runner.backends[0].name, "captured": summary.captured}


def render(figures: Sequence[Figures]) -> str:
    """Format a line for every process: seconds since it began, and since its weights were loaded."""
    lines = [("arm", "caches", "imported s", "weights s", "token s", "ready s", "token after weights s")]
    for found in figures:
        seconds = found["seconds"]
        stages = [seconds[name] for name in ("imported", "weights", "first_token", "ready")]
        after = seconds["first_token"] - seconds["weights"]
        lines.append((found["arm"], found["cache"], *(f"{value:.2f}" for value in (*stages, after))))
    return grid(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure one arm in this process if --arm is given; otherwise all arms, each in its own process."""
    parser = argparse.ArgumentParser(prog="python -m bench.startup.first_token", description=__doc__)
    add_model(parser)
    add_names(parser, "--arms", ARMS, "those that run on this device by default")
    add_json(parser, OUT / "first_token.json")
    parser.add_argument("--arm", choices=ARMS, help="measure this process, as the command does in processes of its own")
    parser.add_argument("--began", type=float, help="when this process was started, in seconds since the epoch")
    options = parser.parse_args(arguments)
    if options.arm is not None:
        began = options.began or time.time()
        Path(options.json).write_text(json.dumps(_engine_stages(options.arm, options.model or "tiny", began)))
        return 0
    device = device_of()
    model = options.model or ("8b" if device.type == "cuda" else "tiny")
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(options.arms or default_arms(device), model, CompileCaches(Path(folder)))
    print(render(figures))
    if device.type == "cpu":
        print(NOT_SPEED)
    save_figures(options.json, {"machine_info": environment.describe(), "results": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
