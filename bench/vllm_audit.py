"""An audit of real vLLM's graphs: are all inventoried, is there a false alarm, what does it cost, are faults found?

``python -m bench.vllm_audit {full,default} --json FILE``, where vLLM is installed. `full` is FULL_DECODE_ONLY without a
compiler (51 graphs), `default` the compiled default (piecewise, and 51 full ones). The audit is attached by vLLM's own
loading of plugins, so ``SIMPLEGRAPH_AUDIT`` must be set; without it the same is measured without an audit.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.tools.environment import describe
from simplegraph.doctor.audit import Audit

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
BATCHES, TOKENS, PROMPT, ROUNDS = (1, 8, 64, 256), 64, 128, 3
STARTED = time.perf_counter()


def say(what: str, value: object) -> None:
    print(f"[{time.perf_counter() - STARTED:6.1f}] {what}: {value}", flush=True)


class Clock:
    """Sums the seconds that calls of some functions take, each by its name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.calls: dict[str, int] = {}

    def watch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        label = f"{owner.__name__}.{name}"

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[label] = self.seconds.get(label, 0.0) + time.perf_counter() - started
                self.calls[label] = self.calls.get(label, 0) + 1

        setattr(owner, name, timed)


def load(mode: str, layers: int) -> Any:
    """Make an engine of vLLM with random weights of an 8B model's shape."""
    from vllm import LLM

    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL | {"num_hidden_layers": layers}))
    settings: dict[str, Any] = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=512,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        seed=0,
        attention_backend="FLASH_ATTN",
        **(settings if mode == "full" else {}),
    )


def generate(llm: Any, batch: int, tokens: int, seed: int) -> tuple[list[float], list[list[int]]]:
    """Generate; return the milliseconds of each step but the first, which holds the prefill, and the tokens."""
    from vllm import SamplingParams

    numbers = random.Random(seed)
    prompts = [{"prompt_token_ids": [numbers.randrange(10, 128000) for _ in range(PROMPT)]} for _ in range(batch)]
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    engine, times = llm.llm_engine, []
    inner = engine.step

    def step() -> Any:
        result = inner()
        times.append(time.perf_counter())
        return result

    engine.step = step
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    torch.cuda.synchronize()
    del engine.step
    steps = [(later - earlier) * 1e3 for earlier, later in itertools.pairwise(times)]
    return steps[-(tokens - 16) :], [list(output.outputs[0].token_ids) for output in outputs]


def decode(llm: Any, audit: Audit | None) -> dict[str, Any]:
    """Measure steps with the audit's hook in `replay` and without, in turn; then check at every single replay."""
    rows: dict[str, Any] = {}
    for batch in BATCHES:
        generate(llm, batch, 8, 1)
        arms: dict[str, list[float]] = {"without": [], "every 100th": []}
        answers: dict[str, list[list[int]]] = {}
        for round_ in range(ROUNDS):
            for arm, steps in arms.items():
                watch(audit, arm != "without")
                new, answers[arm] = generate(llm, batch, TOKENS, 100 + round_)
                steps += new
        row = {
            arm: [round(statistics.median(steps), 4), round(statistics.mean(steps), 4)] for arm, steps in arms.items()
        }
        if audit is not None:
            watch(audit, True)
            audit.every, before = 1, audit.checks
            for graph in audit._by_id.values():
                graph.due = 0
            row["same tokens"] = answers["without"] == answers["every 100th"]
            row["same tokens, every one checked"] = generate(llm, batch, TOKENS, 102)[1] == answers["without"]
            row["checks, every one"] = audit.checks - before
            row["findings"] = len(audit.findings)
            audit.every = 100
        rows[str(batch)] = row
        say(f"batch {batch}, ms a step (median, mean)", row)
    return rows


def watch(audit: Audit | None, watched: bool) -> None:
    if audit is not None and audit._watching != watched:
        audit._watching = watched
        audit._source.watch_replays(watched)


# Faults.


def _found(name: str) -> Any:
    return next(it for it in gc.get_objects() if type(it).__name__ == name)


@contextlib.contextmanager
def in_pool(segment: dict[str, Any]) -> Iterator[None]:
    """Context in which this stream's allocations come from the pool that a segment belongs to."""
    pool = tuple(segment["segment_pool_id"])
    if pool == (0, 0):
        yield
        return
    torch._C._cuda_beginAllocateCurrentStreamToPool(0, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(0, pool)
        torch._C._cuda_releasePool(0, pool)


def faults(llm: Any, audit: Audit) -> dict[str, list[str]]:
    """Inject eight faults one after the other; return what is found of each, by the next look at every graph."""
    gc.unfreeze()  # the engine froze its objects, and the collector lists none of those
    runner = _found("GPUModelRunner")

    def layer(number: int) -> Any:
        return runner.model.model.layers[number]

    def grow(tensor: torch.Tensor) -> None:
        tensor.untyped_storage().resize_(4 * tensor.untyped_storage().nbytes())

    def clone_weight() -> None:
        weight = layer(3).mlp.down_proj.weight
        weight.data = weight.data.clone()

    def move_cache() -> None:
        attention = layer(2).self_attn.attn
        cache = attention.kv_cache
        moved = torch.zeros_like(cache if isinstance(cache, torch.Tensor) else cache[0])
        attention.kv_cache = moved if isinstance(cache, torch.Tensor) else [moved]

    def replace_buffer() -> None:
        rotary = layer(0).self_attn.rotary_emb
        rotary.cos_sin_cache = rotary.cos_sin_cache.clone()

    def take_output() -> None:
        """Free what the graphs return, and allocate until another tensor has that memory."""
        output = runner.cudagraph_manager.hidden_states
        address, nbytes = output.data_ptr(), output.untyped_storage().nbytes()
        segments = torch.cuda.memory_snapshot()
        own = next(it for it in segments if it["address"] <= address < it["address"] + it["total_size"])
        output.untyped_storage().resize_(0)
        with torch.cuda.stream(torch.cuda.ExternalStream(own["stream"]) if own["stream"] else None), in_pool(own):
            while not kept or not kept[-1].data_ptr() <= address < kept[-1].data_ptr() + nbytes:
                if len(kept) > 1000:
                    raise RuntimeError(f"the allocator gave that memory to nobody; its segment is {own}")
                kept.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))

    def drop_pool() -> None:
        """Release the pool as often as graphs use it, and unmap what is free then."""
        torch.cuda.synchronize()
        pool = tuple(runner.cudagraph_manager.pool)
        for _ in [graph for graph in audit.graphs if str(pool) in graph.pools]:
            torch._C._cuda_releasePool(0, pool)
        torch.cuda.empty_cache()

    kept: list[torch.Tensor] = []
    injected: dict[str, Callable[[], object]] = {
        "freed workspace": lambda: runner.input_buffers.query_start_loc.untyped_storage().resize_(0),
        "resized workspace": lambda: grow(_found("FlashAttentionMetadataBuilder").scheduler_metadata),
        "weight.data = clone": clone_weight,
        "moved cache": move_cache,
        "replaced buffer": replace_buffer,
        "taken output": take_output,
        "freed input": lambda: runner.input_buffers.input_ids.untyped_storage().resize_(0),
        "dropped pool": drop_pool,
    }
    found: dict[str, list[str]] = {}
    for name, inject in injected.items():
        before = len(audit.findings)
        try:
            inject()
            audit.check()
        except Exception as error:
            say(name, f"not injected: {type(error).__name__}: {error}")
        found[name] = [str(finding) for finding in audit.findings[before:]]
        say(name, found[name][:3] + [f"and {len(found[name]) - 3} more"] * (len(found[name]) > 3))
    return found


def summarize(audit: Audit, clock: Clock) -> dict[str, Any]:
    """Say what was inventoried, and what that took of the captures."""
    capturing = clock.seconds.get("GPUModelRunner.capture_model", 0.0)
    own = sum(clock.seconds.get(f"Audit.{name}", 0.0) for name in ("capture_begins", "capture_ended"))
    own += clock.seconds.get("CudaGraphs._read", 0.0)
    notes: dict[str, int] = {}
    for graph in audit.graphs:
        for note, count in graph.reading.notes.items():
            notes[note] = notes.get(note, 0) + count
    return {
        "graphs": len(audit.graphs),
        "inventoried": sum(bool(graph.reading.nodes) for graph in audit.graphs),
        "nodes": sum(len(graph.nodes) for graph in audit.graphs),
        "named nodes": sum(bool(module) for graph in audit.graphs for _, _, module in graph.nodes),
        "uses": sum(len(graph.uses) for graph in audit.graphs),
        "capture_model seconds": round(capturing, 3),
        "of it the audit": round(own, 3),
        "share": round(own / (capturing - own), 4) if capturing > own else None,
        "surveys seconds": round(audit.survey_seconds, 3),
        "notes": notes,
        "replay unpatched": torch.cuda.CUDAGraph.replay is REPLAY,
    }


REPLAY = torch.cuda.CUDAGraph.replay


def check_costs(audit: Audit) -> dict[str, float]:
    """Measure one check of each of the last graphs, and the hook of a replay that is not checked."""
    graphs = list(audit._by_id.items())[-51:]
    started = time.perf_counter()
    for _, graph in graphs:
        audit._check(graph, audit._blocks())
    check = (time.perf_counter() - started) / len(graphs)
    started = time.perf_counter()
    audit._blocks()
    blocks = time.perf_counter() - started

    class Key:
        pass

    key, count = Key(), 100_000
    graphs[0][1].due, before = sys.maxsize, graphs[0][1].due
    audit._by_id[id(key)] = graphs[0][1]
    started = time.perf_counter()
    for _ in range(count):
        audit.replay_begins(key)
        audit.replay_ended(key)
    hook = (time.perf_counter() - started) / count
    del audit._by_id[id(key)]
    graphs[0][1].due = before
    return {
        "check ms": round(check * 1e3, 3),
        "of it the snapshot ms": round(blocks * 1e3, 3),
        "hook us": round(hook * 1e6, 3),
    }


def attempt(measure: Callable[..., Any], *arguments: Any) -> Any:
    """Measure, and go on if that fails: the run is short, and seldom."""
    try:
        return measure(*arguments)
    except Exception:
        say(measure.__name__, traceback.format_exc())
        return None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.vllm_audit", description=__doc__)
    parser.add_argument("mode", choices=["full", "default"])
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--captures-only", action="store_true", help="measure no steps, and inject no faults")
    given = parser.parse_args(argv)
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    from simplegraph.doctor.attach import CudaGraphs

    clock = Clock()
    clock.watch(GPUModelRunner, "capture_model")
    for owner, name in ((Audit, "capture_begins"), (Audit, "capture_ended"), (CudaGraphs, "_read")):
        clock.watch(owner, name)
    llm = load(given.mode, given.layers)
    audit = Audit.attached
    say("audit", "attached by vLLM's plugin" if audit is not None else "none")
    figures: dict[str, Any] = {
        "machine": describe(),
        "mode": given.mode,
        "layers": given.layers,
        "clock": clock.seconds,
    }
    say("capture_model seconds", clock.seconds.get("GPUModelRunner.capture_model"))
    if audit is not None:
        figures["before"] = summarize(audit, clock)
        say("after captures", figures["before"])

    def save() -> None:
        given.json.write_text(json.dumps(figures, indent=1))

    save()
    if given.captures_only:
        os._exit(0)
    figures["decode"] = attempt(decode, llm, audit)
    save()
    if audit is not None:
        figures["costs"] = attempt(check_costs, audit)
        say("costs", figures["costs"])
        figures["no fault"] = [str(finding) for finding in audit.check()]
        say("findings without a fault", figures["no fault"][:5])
        figures["audit"] = summarize(audit, clock)
        say("audit", figures["audit"])
        started = time.perf_counter()
        page = audit.save(given.json.with_suffix(".report.html"))
        figures["report"] = {"bytes": page.stat().st_size, "seconds": round(time.perf_counter() - started, 3)}
        say("report", figures["report"])
        save()
        figures["faults"] = attempt(faults, llm, audit) or {}
        caught = [name for name, found in figures["faults"].items() if found]
        say("faults found", f"{len(caught)} of {len(figures['faults'])}")
        audit.path = None
        audit.save(given.json.with_suffix(".faults.html"))
    save()
    sys.stdout.flush()
    os._exit(0)  # the pool is gone, if it was dropped


if __name__ == "__main__":
    main()
