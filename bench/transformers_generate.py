"""transformers' `generate`, plain, with its static cache and the compiler, and through graphs.

``python -m bench.transformers_generate``: every arm in a fresh process, so that its first generation pays for all that
it needs: CUDA's lazy loading, compiling, capturing. Tokens are compared in float32, in processes of their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench import environment
from bench.measure import say, synchronize

Figures = dict[str, Any]
ARMS = ("plain", "static-compiled", "simplegraph", "simplegraph-own-norms")
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "vocab_size": 128256}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256}
    | {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
}
SECONDS = 400  # that a process may take
NOT_SPEED = "No GPU here: the graphs are the library's emulator, and nothing is compiled. Times are NOT speed."


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Args:
        shape: of `SHAPES`; random weights.
        batch, prompt, tokens: rows, tokens of each prompt, and new ones.
        rounds: generations after the first; their median counts.
        arms: of `ARMS`.
        compared: tokens that plain and graphs generate in float32.
        processes: of each arm that compiles nothing.
    """

    shape: str
    batch: int = 1
    prompt: int = 64
    tokens: int = 128
    rounds: int = 5
    arms: tuple[str, ...] = ARMS
    compared: int = 128
    processes: int = 3


def default_plan(device: torch.device) -> Plan:
    """The 1B shape on a GPU; a tiny one on a CPU, where times are not speed."""
    if device.type == "cuda":
        return Plan("1b")
    return Plan("tiny", prompt=8, tokens=8, rounds=1, compared=8, processes=1)


def measure(plan: Plan, device: torch.device) -> Figures:
    """Every arm in fresh processes; the tokens of graphs are compared with plain ones first."""
    tokens = {}
    for arm in ("plain", "simplegraph"):
        compared = dataclasses.replace(plan, tokens=plan.compared, rounds=1)
        tokens[arm] = _in_process(compared, arm, device, "float32")["tokens"]
    if tokens["plain"] != tokens["simplegraph"]:
        raise RuntimeError("the tokens of graphs are not those of plain generate in float32.")
    arms = {arm: _measure_arm(plan, arm, device) for arm in plan.arms}
    return {"plan": dataclasses.asdict(plan), "device": device.type, "same_tokens": plan.compared, "arms": arms}


def _measure_arm(plan: Plan, arm: str, device: torch.device) -> Figures:
    compiles = arm == "static-compiled" and device.type == "cuda"
    runs = [_in_process(plan, arm, device, "bfloat16") for _ in range(1 if compiles else plan.processes)]
    medians = {name: statistics.median(run[name] for run in runs) for name in ("ms_per_token", "first_seconds")}
    return medians | {"runs": [{key: value for key, value in run.items() if key != "tokens"} for run in runs]}


def _in_process(plan: Plan, arm: str, device: torch.device, dtype: str) -> Figures:
    say(f"{arm}, {dtype}")
    options = [f"--{name}={getattr(plan, name)}" for name in ("shape", "batch", "prompt", "tokens", "rounds")]
    command = [sys.executable, "-m", "bench.transformers_generate", f"--arm={arm}", f"--dtype={dtype}", *options]
    answer = subprocess.run(
        [*command, f"--device={device.type}"], cwd=environment.ROOT, capture_output=True, text=True, timeout=SECONDS
    )
    if answer.returncode:
        raise RuntimeError(f"{arm} failed:\n{answer.stderr[-4000:]}")
    figures: Figures = json.loads(answer.stdout.splitlines()[-1])
    return figures


# In the process of an arm.


def run_arm(plan: Plan, arm: str, device: torch.device, dtype: torch.dtype) -> Figures:
    """Seconds of the first generation, milliseconds a token of the later ones, and the tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[plan.shape], dtype=dtype, eos_token_id=None, pad_token_id=0)
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype).eval()
        ids = torch.randint(1, config.vocab_size, (plan.batch, plan.prompt))
    settings: dict[str, Any] = {"max_new_tokens": plan.tokens, "do_sample": False}
    report = None
    if arm == "static-compiled":
        settings["cache_implementation"] = "static"
    elif arm in ("simplegraph", "simplegraph-own-norms"):
        from simplegraph.integrations.transformers import graph_generation

        fused = arm == "simplegraph"
        report = graph_generation(model, max_batch_size=plan.batch, max_length=2048, fused_norms=fused).report
    seconds, result = [], ids
    for _ in range(1 + plan.rounds):
        synchronize(device)
        started = time.perf_counter()
        result = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    figures: Figures = {
        "first_seconds": seconds[0],
        "ms_per_token": statistics.median(seconds[1:]) / plan.tokens * 1e3,
        "seconds": seconds,
        "tokens": result[:, plan.prompt :].tolist(),
    }
    return figures | ({"report": report().to_dict()} if report is not None else {})


def render(figures: Figures) -> str:
    """The figures as a table."""
    plan, plain = figures["plan"], figures["arms"].get("plain")
    lines = [] if figures["device"] == "cuda" else [NOT_SPEED]
    shape = "{shape} shape, batch {batch}, prompt of {prompt}, {tokens} new tokens".format(**plan)
    lines.append(f"{shape}; {figures['same_tokens']} tokens equal to plain ones in float32")
    for arm, found in figures["arms"].items():
        ratio = f", {plain['ms_per_token'] / found['ms_per_token']:.2f} times plain" if plain else ""
        lines.append(
            f"{arm:>21}  {found['ms_per_token']:.3f} ms a token{ratio}; first generation {found['first_seconds']:.2f} s"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure every arm, or, with ``--arm``, be the process of one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    defaults = default_plan(torch.device(device))
    parser = argparse.ArgumentParser(prog="python -m bench.transformers_generate", description=__doc__)
    for name in ("shape", "batch", "prompt", "tokens", "rounds"):
        default = getattr(defaults, name)
        parser.add_argument(f"--{name}", type=type(default), default=default)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(defaults.arms), help="these alone")
    parser.add_argument("--processes", type=int, default=defaults.processes, help="of each arm that compiles nothing")
    parser.add_argument("--arm", choices=ARMS, help="be the process of one arm")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default=device)
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(argv)
    changed = {name: getattr(given, name) for name in ("shape", "batch", "prompt", "tokens", "rounds", "processes")}
    changed["arms"] = tuple(given.arms)
    plan = dataclasses.replace(defaults, **changed)
    if given.arm:
        print(json.dumps(run_arm(plan, given.arm, torch.device(given.device), getattr(torch, given.dtype))))
        return
    figures = measure(plan, torch.device(given.device))
    print(render(figures))
    if given.json:
        given.json.write_text(json.dumps(figures | {"environment": environment.describe()}, indent=2))


if __name__ == "__main__":
    main()
