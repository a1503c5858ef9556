"""``python -m bench.serve.decode_steps``: the engine's decode step beside the same model eager and compiled.

The time per token of a generation comes with it.

All arms have the same weights in one process. The compiled ones run the plain layers, which a compiler
fuses itself, with their own cache and the same attention kernels. Every step computes logits and the most likely token.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable

import torch

from bench.arms import ARMS, load_arm
from bench.arms.base import Arm, Setup
from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.config import BACKENDS
from bench.engine.repeated import RepeatedStep
from bench.engine.start import replays_of, start
from bench.models.llama import Llama
from bench.models.workload import PAGE_SIZE, Workload
from bench.tools import command, text
from bench.tools.measure import Figures, Timeline, in_turn, say, synchronize
from bench.tools.options import Options, name_list, numbers
from bench.tools.replays import Served
from bench.tools.tables import in_line


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The model, batches and counts of a measurement.

    Args:
        model: as for `Workload`; batches: requests of a step; context: tokens in each one's cache.
        prompt, output: tokens of each request of the generation.
        attention: the engine's backends.
        beside: further arms whose decode step is measured.
        launches: tokens that a graph of the generation makes; each number is measured.
        rounds: of all arms in turn; steps: calls that a round is the median of.
    """

    model: str
    batches: tuple[int, ...]
    attention: tuple[str, ...]
    beside: tuple[str, ...] = ()
    launches: tuple[int, ...] = (1,)
    context: int = 200
    prompt: int = 128
    output: int = 64
    rounds: int = 3
    steps: int = 30


def default_plan(device: torch.device) -> DecodePlan:
    """Return the 8B shape on a GPU; a tiny one on a CPU, whose timings do not measure performance."""
    if device.type == "cuda":
        return DecodePlan(
            "8b", (1, 8, 64, 256), ("fa3", "flashinfer", "triton"), ("eager", "compiled-piecewise", "compiled-full")
        )
    return DecodePlan("tiny", (1, 4), ("sdpa",), context=20, prompt=12, output=6, rounds=1, steps=3)


def measure(plan: DecodePlan, device: torch.device) -> Figures:
    """Measure decode steps and generation of every arm, after comparing the engine's tokens with its eager ones."""
    workload = Workload(plan.model, plan.batches, device, context=plan.context, lm_head=True)
    llama = workload.build()
    setup = Setup(llama, workload)
    engines = {name: _engine(llama, plan, name) for name in plan.attention}
    figures: Figures = {"decode": [], "generation": []}
    for name in plan.attention:
        for tokens in plan.launches:
            engine = engines[name] if tokens == 1 else _engine(llama, plan, name, tokens)
            figures["generation"] += [_generation(engine, plan, name, count) for count in plan.batches]
    arms = {name: _started(name, setup) for name in plan.beside}
    for count in plan.batches:
        say(f"decode steps of {count}")
        figures["decode"].append(_decode(plan, setup, engines, arms, count))
        say(in_line(figures["decode"][-1]["ms"], ".3f", "ms"))
    for engine in engines.values():
        engine.runner.manager.reset()
    return figures


def _engine(llama: Llama, plan: DecodePlan, attention: str, tokens: int = 1) -> Engine:
    most = max(plan.batches)
    length = max(plan.context, plan.prompt + plan.output)
    config = EngineConfig(
        attention=attention,
        max_num_seqs=most,
        max_num_tokens=max(2048, most),
        max_model_len=length,
        num_pages=1 + most * -(-length // PAGE_SIZE),
        page_size=PAGE_SIZE,
        tokens_per_launch=tokens,
    )
    say(f"engine with {attention}, {tokens} tokens a launch")
    return start(config, llama)


def _started(name: str, setup: Setup) -> Arm:
    say(f"starting: {name}")
    kind = load_arm(name)
    kind.check_available(setup.device)
    kind.load(setup)
    torch._dynamo.reset()
    arm = kind(setup)
    with torch.inference_mode():
        arm.start(setup.batch(1), Timeline(setup.device))
    return arm


def _generation(engine: Engine, plan: DecodePlan, attention: str, count: int) -> Figures:
    """Measure one generation: ms between steps while all requests decode, when the caller gets the tokens."""
    vocab = engine.runner.llama.config.vocab_size
    for index in range(count):
        prompt = text.token_ids(plan.prompt, vocab, start=37 * index).tolist()
        engine.add(prompt, SamplingParams(max_tokens=plan.output))
    device, tokens = engine.runner.device, engine.config.tokens_per_launch
    replays = replays_of(engine, f"{attention}, generation")
    synchronize(device)
    started = time.perf_counter()
    marks, first = [], None
    while not engine.idle:
        outputs = engine.step()
        now = time.perf_counter()
        first = first or (now if outputs else None)
        if len(outputs) == count * tokens:
            marks.append(now)
    ended = time.perf_counter()
    replays.end(len(marks))
    steps = [(after - before) * 1e3 / tokens for before, after in itertools.pairwise(marks)]
    return {
        "attention": attention,
        "batch": count,
        "tokens_per_launch": tokens,
        "ms_per_token": statistics.mean(steps),
        "median_ms": statistics.median(steps),
        "steps": len(steps),
        "first_token_ms": ((first or ended) - started) * 1e3,
        "tokens_per_second": count * plan.output / (ended - started),
    } | replays.figures()


@torch.inference_mode()
def _decode(plan: DecodePlan, setup: Setup, engines: dict[str, Engine], arms: dict[str, Arm], count: int) -> Figures:
    calls: dict[str, Callable[[], object]] = {}
    for name, engine in engines.items():
        steps = RepeatedStep(engine, count, plan.context)
        graph, eager = steps.tokens().clone(), steps.eager_tokens()
        agreeing = float((graph == eager).double().mean())
        if agreeing < 0.9:  # random weights make near ties, which rounding decides
            raise RuntimeError(f"{name}, batch {count}: {agreeing:.0%} of the graph's tokens are eager's.")
        calls |= {f"{name} graph": Served(steps.tokens, replays_of(engine, name)), f"{name} eager": steps.eager_tokens}
    batch = setup.batch(count)
    for name, arm in arms.items():
        calls[name] = lambda arm=arm: arm(*batch).argmax(dim=-1)  # type: ignore[misc]
    if setup.device.type == "cuda":
        calls["GEMMs alone"] = _gemms(setup.model, count)
    times = in_turn(calls, setup.device, rounds=plan.rounds, steps=plan.steps)
    gc.collect()
    return {"batch": count, "ms": times}


def _gemms(llama: Llama, count: int) -> Callable[[], object]:
    """Capture the model's matrix products and nothing else."""
    linears = [
        linear
        for layer in llama.model.layers
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)
    ] + ([] if llama.lm_head is None else [llama.lm_head])
    # One input for all of as many features: it stays in the GPU's cache, as what a step has just computed does.
    rows = {
        inputs: torch.randn(count, inputs).to(linears[0].weight)
        for inputs in {linear.weight.shape[1] for linear in linears}
    }

    def run() -> None:
        for linear in linears:
            linear(rows[linear.weight.shape[1]])

    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def render(figures: Figures) -> str:
    """Format the figures as two tables."""
    steps = [
        f"{row['batch']:>6}  " + "  ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
        for row in figures["decode"]
    ]
    tokens = [
        f"{row['attention']:>12} {row['batch']:>5} x {row.get('tokens_per_launch', 1)}  "
        f"{row['ms_per_token']:.3f} ms a token (median "
        f"{row['median_ms']:.3f}), first token after {row['first_token_ms']:.1f} ms, "
        f"{row['tokens_per_second']:.0f} tokens a second"
        for row in figures["generation"]
    ]
    return "\n".join(["decode step, ms", *steps, "generation", *tokens])


OPTIONS: Options = {
    "--attention": name_list(BACKENDS, "by default all that the machine has"),
    "--beside": name_list(ARMS, "arms beside the engine"),
    "--batches": {"type": numbers, "help": "requests of a step, such as 1,8"},
    "--launches": {"type": numbers, "help": "tokens that a graph of the generation makes, such as 1,4,8"},
}
main = command.of("bench.serve.decode_steps", __doc__, OPTIONS, default_plan, measure, render)


if __name__ == "__main__":
    main()
