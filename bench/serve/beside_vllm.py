"""``python -m bench.serve.beside_vllm``: starts and decode steps of our engine beside real vLLM's, on one GPU.

Both have random weights of the 8 B shape, FlashAttention-3, prompts of 128 tokens, and greedy sampling. Each arm is
a fresh process with empty compile caches; a warm arm has the caches that the arm before it left. vLLM has to be
installed: ``pip install vllm``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.tools.options import count, name_list, numbers, positive

PROMPT, OUTPUT, ROUNDS = 128, 64, 3
LAST = 40  # steps of a generation that count: by then all prompts are read
MOST = 512  # requests that both engines take at once
_STARTED = "BENCH_STARTED"  # environment variable: seconds since the epoch at which a process was asked for
_CACHES = {"VLLM_CACHE_ROOT": "vllm", "TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}

# Generates so many tokens of so many requests, prompts by a seed; returns when each step of the engine had returned.
Generate = Callable[[int, int, int], list[float]]


@dataclasses.dataclass(frozen=True)
class EngineArm:
    """An engine, and how its process is started.

    Args:
        start: makes the engine with so many layers, all by default.
        modules: imported before, which is timed apart.
        warm_after: the arm whose compile caches it has; by default they are empty.
    """

    start: Callable[[int | None], Generate]
    modules: tuple[str, ...]
    warm_after: str | None = None


def prompts(requests: int, seed: int, vocab: int) -> list[list[int]]:
    """Return random token ids, the same for both engines."""
    source = random.Random(seed)
    return [[source.randrange(10, vocab) for _ in range(PROMPT)] for _ in range(requests)]


def start_ours(layers: int | None) -> Generate:
    """Start our engine; without a GPU a tiny model."""
    from bench.engine import EngineConfig, SamplingParams
    from bench.engine.start import start
    from bench.models.workload import PAGE_SIZE, Workload
    from bench.tools.measure import device_of

    device = device_of()
    shape, attention, most = ("8b", "fa3", MOST) if device.type == "cuda" else ("tiny", "sdpa", 8)
    length = PROMPT + OUTPUT
    config = EngineConfig(
        attention=attention,
        max_num_seqs=most,
        max_model_len=length,
        num_pages=1 + most * -(-length // PAGE_SIZE),
        page_size=PAGE_SIZE,
    )
    engine = start(config, Workload(shape, (1,), device, lm_head=True, layers=layers).build())
    vocab = engine.runner.llama.config.vocab_size

    def generate(requests: int, tokens: int, seed: int) -> list[float]:
        for prompt in prompts(requests, seed, vocab):
            engine.add(prompt, SamplingParams(max_tokens=tokens))
        marks, made = [], 0
        while not engine.idle:
            made += len(engine.step())
            marks.append(time.perf_counter())
        if made != requests * tokens:
            raise RuntimeError(f"{requests} requests gave {made} tokens; expected {tokens} of each.")
        return marks

    return generate


def start_vllm(layers: int | None, mode: str) -> Generate:
    """Start vLLM; `mode` is one of `bench.vllm_audit`'s."""
    from vllm import SamplingParams

    from bench.vllm_audit import MODEL, load

    llm = load(mode, layers or 32)
    engine = llm.llm_engine
    inner = engine.step

    def generate(requests: int, tokens: int, seed: int) -> list[float]:
        marks: list[float] = []

        def step() -> Any:
            result = inner()
            marks.append(time.perf_counter())
            return result

        engine.step = step
        given = [{"prompt_token_ids": prompt} for prompt in prompts(requests, seed, int(str(MODEL["vocab_size"])))]
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate(given, sampling, use_tqdm=False)
        made = [len(output.outputs[0].token_ids) for output in outputs]
        if made != [tokens] * requests:
            raise RuntimeError(f"{requests} requests gave {sum(made)} tokens; expected {tokens} of each.")
        return marks

    return generate


_OURS = "bench.engine.start", "bench.models.workload"
_VLLM = "bench.vllm_audit", "vllm.entrypoints.llm"
_compiled, _full = functools.partial(start_vllm, mode="default"), functools.partial(start_vllm, mode="full")
ARMS = {
    "simplegraph": EngineArm(start_ours, _OURS),
    "simplegraph, warm": EngineArm(start_ours, _OURS, "simplegraph"),
    "vllm, compiled": EngineArm(_compiled, _VLLM),
    "vllm, compiled, warm": EngineArm(_compiled, _VLLM, "vllm, compiled"),
    "vllm, full graphs": EngineArm(_full, _VLLM),
}


def measure(arm: EngineArm, batches: tuple[int, ...], layers: int | None) -> dict[str, Any]:
    """Start an engine in this process, and measure its steps; times are in ms where nothing else is said."""
    begun = time.time()
    for module in arm.modules:
        importlib.import_module(module)
    imported = time.time()
    generate = arm.start(layers)
    generate(1, 1, 0)
    figures: dict[str, Any] = {
        "first_answer_s": time.time() - float(os.environ.get(_STARTED, begun)),
        "engine_s": time.time() - imported,
        "version": getattr(sys.modules[arm.modules[-1].partition(".")[0]], "__version__", None),
        "batches": {},
    }
    for requests in batches:
        generate(requests, 8, 1)  # a warmup
        medians, firsts = [], []
        for round_ in range(ROUNDS):
            begun = time.perf_counter()
            firsts.append((generate(requests, 1, 100 + round_)[-1] - begun) * 1e3)
            marks = generate(requests, OUTPUT, 200 + round_)
            steps = [(after - before) * 1e3 for before, after in itertools.pairwise(marks)]
            medians.append(statistics.median(steps[-LAST:]))
        figures["batches"][str(requests)] = {
            "step_ms": statistics.median(medians),
            "step_ms_each": medians,
            "first_tokens_ms": statistics.median(firsts),
        }
        print(f"{requests:>4} requests: {statistics.median(medians):.3f} ms a step", flush=True)
    return figures


def _in_process(name: str, arguments: list[str], caches: Path, seconds: float) -> dict[str, Any]:
    """Measure an arm in a fresh process; return its figures, or the error."""
    folder = caches / (ARMS[name].warm_after or name)
    variables = {variable: str(folder / part) for variable, part in _CACHES.items()}
    file = caches / "figures.json"
    file.unlink(missing_ok=True)
    line = [sys.executable, "-m", "bench.serve.beside_vllm", "--in-process", name, "--json", str(file), *arguments]
    try:
        subprocess.run(line, env=os.environ | variables | {_STARTED: str(time.time())}, timeout=seconds, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return {"error": str(error)}
    figures: dict[str, Any] = json.loads(file.read_text())
    del figures["machine_info"]  # the parent's is the same
    return figures


def render(arms: dict[str, Any]) -> str:
    """Format the figures as a table."""
    lines = ["ms a step at so many requests, and seconds from the process's start until its first answer"]
    for name, figures in arms.items():
        if "error" in figures:
            lines.append(f"{name:>22}  {figures['error']}")
            continue
        steps = "  ".join(f"{batch}: {row['step_ms']:.3f}" for batch, row in figures["batches"].items())
        lines.append(
            f"{name:>22}  {steps}  {figures['first_answer_s']:.1f} s (without imports {figures['engine_s']:.1f} s)"
        )
    return "\n".join(lines)


def main(given: list[str] | None = None) -> None:
    """Measure every arm, one after the other; figures are written after each."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.beside_vllm", description=__doc__)
    parser.add_argument("--arms", **name_list(ARMS, "by default all"))
    parser.add_argument("--batches", type=numbers, default=(1, 8, 64, 256), help="requests, such as 1,8")
    parser.add_argument("--layers", type=count, help="of the model; by default all")
    parser.add_argument("--limit", type=positive, default=180.0, help="seconds of a process")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--in-process", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.in_process:
        figures = measure(ARMS[options.in_process], options.batches, options.layers)
    from bench.tools.files import save_figures  # after what is timed has been imported

    if options.in_process:
        save_figures(options.json, figures)
        return
    arguments = ["--batches", ",".join(map(str, options.batches))]
    arguments += ["--layers", str(options.layers)] if options.layers else []
    arms: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as caches:
        for name in options.arms or ARMS:
            arms[name] = _in_process(name, arguments, Path(caches), options.limit)
            print(render({name: arms[name]}), flush=True)
            plan = {"prompt": PROMPT, "output": OUTPUT, "rounds": ROUNDS, "last": LAST, "requests": MOST}
            save_figures(options.json, {"plan": plan, "arms": arms})
    print(render(arms))
    if any("error" in figures for figures in arms.values()):
        raise SystemExit("an arm failed, or took too long")


if __name__ == "__main__":
    main()
