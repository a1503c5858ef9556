"""Steps of an engine, whole and in halves, in turn in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from bench.engine import Engine, EngineConfig
from bench.engine.repeated import RepeatedStep
from bench.engine.start import drop_graphs, replays_of, start
from bench.models.llama import Llama
from bench.tools.measure import Figures, in_turn, say
from bench.tools.replays import Served
from bench.tools.tables import in_line
from simplegraph import CudaGraphMode, RankGroup

PAGE = 16


@dataclasses.dataclass(frozen=True)
class Steps:
    """Steps that one engine takes.

    Args:
        shapes: requests of a step, and tokens of each.
        context: tokens in each request's cache, the step's included; a prompt has its own.
        mode: of the graphs.
        attention: backend, by name.
        rounds: of both arms in turn; repeats: calls that a round is the median of.
    """

    shapes: tuple[tuple[int, int], ...]
    context: int
    mode: str
    attention: str
    rounds: int = 5
    repeats: int = 20

    def config(self, overlap: Any) -> EngineConfig:
        """Return an engine's configuration with just these graphs."""
        sizes = tuple(sorted({count * query for count, query in self.shapes}))
        requests = max(count for count, _ in self.shapes)
        return EngineConfig(
            mode=self.mode,
            attention=self.attention,
            max_num_seqs=requests,
            max_num_tokens=sizes[-1],
            max_model_len=self.context,
            num_pages=1 + requests * -(-self.context // PAGE),
            page_size=PAGE,
            capture_sizes=sizes,
            two_batch_overlap=overlap,
        )


def decode_steps(batches: tuple[int, ...], device: torch.device) -> Steps:
    """Return decode steps of so many requests, with contexts of 200 tokens on a GPU."""
    shapes = tuple((count, 1) for count in batches)
    if device.type == "cuda":
        return Steps(shapes, 200, "FULL_DECODE_ONLY", "auto")
    return Steps(shapes, 20, "FULL_DECODE_ONLY", "sdpa", rounds=1, repeats=2)


def prompt_steps(tokens: int, device: torch.device) -> Steps:
    """Return steps of prompts with so many tokens: one prompt, and eight."""
    shapes = tuple((count, tokens // count) for count in (1, 8))
    if device.type == "cuda":
        return Steps(shapes, tokens, "FULL", "fa3", repeats=10)
    return Steps(shapes, tokens, "FULL", "sdpa", rounds=1, repeats=2)


@torch.inference_mode()
def measure(llama: Llama, ranks: RankGroup | None, steps: Steps) -> Iterator[Figures]:
    """Yield ms of each step whole and in halves, after comparing their logits."""
    engines = {"whole": _engine(llama, ranks, steps, "off"), "halves": _engine(llama, ranks, steps, "on")}
    try:
        for count, query in steps.shapes:
            length = steps.context if query == 1 else query
            arms = {name: RepeatedStep(engine, count, length, query) for name, engine in engines.items()}
            if any(arm.batch.mode is not CudaGraphMode.FULL for arm in arms.values()):
                raise RuntimeError(f"a step of {count} x {query} tokens has no full graph.")
            whole, halves = (arm.logits().double() for arm in arms.values())
            calls: dict[str, Callable[[], object]] = {
                name: Served(arm.run, replays_of(engines[name], name)) for name, arm in arms.items()
            }
            if ranks is not None:
                calls["collectives alone, eagerly"] = _collectives(llama, count * query)
            times = in_turn(calls, engines["whole"].runner.device, rounds=steps.rounds, steps=steps.repeats)
            say(f"{count} x {query}: {in_line(times, '.3f', 'ms')}")
            yield {
                "requests": count,
                "tokens": count * query,
                "ms": times,
                "gain": 1 - times["halves"] / times["whole"],
                "relative_error": float((halves - whole).norm() / whole.norm()),
                "tokens_equal": float((halves.argmax(-1) == whole.argmax(-1)).double().mean()),
                "attention": engines["whole"].runner.backends[0].name,
            }
    finally:
        for engine in engines.values():
            drop_graphs(engine)


def _engine(llama: Llama, ranks: RankGroup | None, steps: Steps, overlap: str) -> Engine:
    say(f"capturing {steps.mode} with two_batch_overlap={overlap}")
    engine = start(steps.config(overlap), llama, ranks=ranks)
    generator = torch.Generator(engine.runner.device).manual_seed(5)
    for backend in engine.runner.backends:
        backend.cache._memory.normal_(generator=generator)  # equal in all engines
    return engine


def _collectives(llama: Llama, rows: int) -> Callable[[], object]:
    """Return a call that sums as often, and as much, as a step of so many rows does."""
    weight = llama.model.embed_tokens.weight
    summed = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)

    def run() -> None:
        for _ in range(2 * len(llama.model.layers)):
            dist.all_reduce(summed)

    return run
