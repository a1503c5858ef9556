"""Measures speculative decoding: the acceptance of drafts, and the time of drafting, of a round and of a token.

All arms have the same weights, prompts and attention kernels in one process; an arm sets the graph modes of target and
draft.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.spec import Acceptance, SpecEngine
from bench.engine.spec_config import SpecConfig
from bench.engine.spec_scheduler import RoundPlan
from bench.engine.start import drop_graphs, replays_of, start
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama
from bench.tools import text
from bench.tools.measure import (
    Call,
    Figures,
    host_microseconds,
    kernel_milliseconds,
    say,
    step_milliseconds,
    synchronize,
)
from bench.tools.replays import Served
from bench.tools.tables import cell, grid


class GraphModes(NamedTuple):
    """Names of the graph modes of target and draft; a draft of None means no speculation."""

    target: str
    draft: str | None


ARMS = {
    "no speculation": GraphModes("FULL_AND_PIECEWISE", None),
    "eager": GraphModes("NONE", "NONE"),
    "target full, draft eager": GraphModes("FULL_AND_PIECEWISE", "NONE"),
    "target full, draft piecewise": GraphModes("FULL_AND_PIECEWISE", "PIECEWISE"),
    "piecewise": GraphModes("PIECEWISE", "PIECEWISE"),
    "full": GraphModes("FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
}


@dataclasses.dataclass(frozen=True)
class SpecPlan:
    """The batches and counts of a measurement.

    Args:
        batches: requests that decode at once.
        num_draft_tokens: K.
        attention: the engine's backend.
        mean_length: tokens per round, regardless of the drafts; None for the draft's real acceptance.
        prompt, output: tokens of each request.
        max_num_tokens: of a step, at least.
        generations: number of generations of which a token's time is the median.
        steps: calls that a draft round's time is the median of.
    """

    batches: tuple[int, ...] = (1, 8, 32)
    num_draft_tokens: int = 5
    attention: str = "auto"
    mean_length: float | None = None
    prompt: int = 128
    output: int = 128
    max_num_tokens: int = 2048
    generations: int = 3
    steps: int = 50

    @property
    def length(self) -> int:
        """Tokens of a request, prompt and output."""
        return self.prompt + self.output

    def config(self, arm: GraphModes) -> EngineConfig:
        """Make the config of an engine for the largest batch."""
        most, page_size = max(self.batches), 16
        ahead = 2 * self.num_draft_tokens
        settings: dict[str, Any] = {
            "mode": arm.target,
            "attention": self.attention,
            "max_num_seqs": most,
            "max_num_tokens": max(self.max_num_tokens, most * (self.num_draft_tokens + 1)),
            "max_model_len": self.length,
            "num_pages": 1 + most * -(-(self.length + ahead) // page_size),
            "page_size": page_size,
        }
        if arm.draft is None:
            return EngineConfig(**settings)
        drafting = {"num_draft_tokens": self.num_draft_tokens, "draft_mode": arm.draft}
        return SpecConfig(**settings, **drafting, mean_length=self.mean_length)


def measure(
    plan: SpecPlan, target: Llama, draft: Eagle | Eagle3, names: tuple[str, ...] = tuple(ARMS)
) -> list[Figures]:
    """Measure every arm at every batch.

    Raises:
        RuntimeError: a graph could not be captured, or greedy tokens differ from those of another arm in float32.
    """
    found: list[Figures] = []
    tokens: dict[int, list[list[int]]] = {}
    exact = plan.mean_length is None and target.model.embed_tokens.weight.dtype is torch.float32
    for name in names:
        say(name)
        arm = ARMS[name]
        engine = start(plan.config(arm), target, draft)
        for count in plan.batches:
            figures, outputs = _generation(engine, plan, count)
            found.append({"arm": name, "batch": count} | figures)
            if isinstance(engine, SpecEngine):
                with _drafting(engine, plan, count) as call:
                    found[-1] |= _draft_times(call, engine.runner.device, plan)
            draft_ms = cell(found[-1], "draft_ms", ".3f")
            say(f"  batch {count}: TPOT {found[-1]['tpot_ms']:.3f} ms, a draft round {draft_ms} ms")
            if exact and tokens.setdefault(count, outputs) != outputs:
                raise RuntimeError(f"{name}, batch {count}: the greedy tokens differ from another arm's.")
        drop_graphs(engine)
    if target.model.embed_tokens.weight.is_cuda:
        _add_kernels(found, plan, target, draft)
    return found


def _add_kernels(found: list[Figures], plan: SpecPlan, target: Llama, draft: Eagle | Eagle3) -> None:
    """Add the times of a draft's kernels in graphs; done last, since CUDA calls stay slower after profiling."""
    for name in dict.fromkeys(row["arm"] for row in found):
        if ARMS[name].draft in (None, "NONE"):
            continue
        engine = start(plan.config(ARMS[name]), target, draft)
        for row in found:
            if row["arm"] == name:
                with _drafting(engine, plan, row["batch"]) as call:
                    row["draft_kernels_ms"] = kernel_milliseconds(call)
        drop_graphs(engine)


def _requests(engine: Engine, plan: SpecPlan, count: int, output: int) -> list[Any]:
    vocab = engine.runner.llama.config.vocab_size
    prompts = [text.token_ids(plan.prompt, vocab, start=211 * index).tolist() for index in range(count)]
    return [engine.add(prompt, SamplingParams(max_tokens=output)) for prompt in prompts]


def _generation(engine: Engine, plan: SpecPlan, count: int) -> tuple[Figures, list[list[int]]]:
    """Measure generations, after a short one that loads libraries; times are those when the caller gets tokens."""
    speculating = isinstance(engine, SpecEngine)
    _requests(engine, plan, count, min(8, plan.output))
    _finish(engine)
    if speculating:
        engine.acceptance = Acceptance()
    hosts: list[float] = []
    replays = replays_of(engine, f"generations of {count}")
    tpots, outputs = zip(*(_timed(engine, plan, count, hosts) for _ in range(plan.generations)), strict=True)
    replays.end(plan.generations * (plan.output // (plan.num_draft_tokens + 1) if speculating else plan.output - 1))
    figures: Figures = {"tpot_ms": statistics.median(tpots) * 1e3} | replays.figures()
    if speculating:
        acceptance = engine.acceptance
        figures |= {
            "drafts": acceptance.drafts,
            "draft_tokens": acceptance.draft_tokens,
            "accepted_tokens": acceptance.accepted,
            "mean_length": acceptance.mean_length,
            "per_position": acceptance.rates,
            "round_host_ms": statistics.median(hosts) * 1e3,
        }
    return figures, outputs[-1]


def _timed(engine: Engine, plan: SpecPlan, count: int, hosts: list[float]) -> tuple[float, list[list[int]]]:
    """Return seconds per token, and the tokens; append the host's seconds per round, without waiting, to `hosts`."""
    requests = _requests(engine, plan, count, plan.output)
    times: dict[Any, list[float]] = {request: [] for request in requests}
    synchronize(engine.runner.device)
    while not engine.idle:
        decoding, waited = all(times.values()), getattr(engine.runner, "waited", 0.0)
        started = time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            times[output.request].append(now)
        if isinstance(engine, SpecEngine) and decoding:
            hosts.append(now - started - (engine.runner.waited - waited))
    tpot = statistics.mean((taken[-1] - taken[0]) / (len(taken) - 1) for taken in times.values())
    return tpot, [request.output for request in requests]


def _finish(engine: Engine) -> None:
    for _ in engine.stream():
        pass


@contextlib.contextmanager
def _drafting(engine: Engine, plan: SpecPlan, count: int) -> Iterator[Call]:
    """Yield a function that drafts after a round of `count` requests, and can be called repeatedly."""
    if not isinstance(engine, SpecEngine):
        raise TypeError("this engine drafts nothing.")
    requests = _requests(engine, plan, count, plan.output)
    while len(engine.scheduler.drafted) < count:
        engine.step()
    drafted = engine.scheduler.schedule_round(plan.num_draft_tokens)
    if drafted is None:
        raise RuntimeError("no request has drafts to time.")
    with torch.inference_mode():
        engine.runner.launch_round(drafted).wait()
        yield _draft_of(engine, drafted)
    for request in requests:
        engine.cancel(request)
    _finish(engine)


def _draft_of(engine: SpecEngine, drafted: RoundPlan) -> Call:
    runner, count, reqs = engine.runner, drafted.num_draft_tokens, len(drafted.requests)
    drafter = runner.drafters[count]

    def draft() -> None:
        runner.metadata.repeat()
        drafter.draft(reqs * (count + 1), reqs, count + 1)

    return draft if engine.config.draft_mode == "NONE" else Served(draft, replays_of(engine, "a draft round"))


def _draft_times(draft: Call, device: torch.device, plan: SpecPlan) -> Figures:
    return {
        "draft_ms": step_milliseconds(draft, device, steps=plan.steps),
        "draft_host_ms": host_microseconds(draft, device, calls=plan.steps) / 1e3,
    }


def ratios(found: list[Figures]) -> list[Figures]:
    """Compute ratios of full graphs by batch: drafting to eager drafting and its kernels, a token to other arms."""
    by_key = {(row["arm"], row["batch"]): row for row in found}
    results = []
    for batch in sorted({row["batch"] for row in found}):
        full = by_key.get(("full", batch))
        if full is None:
            continue
        row: Figures = {"batch": batch, "round_host_ms": full["round_host_ms"]}
        others = {name: by_key.get((name, batch)) for name in ARMS if name != "full"}
        eager = others["target full, draft eager"]
        if eager is not None:
            row["eager_draft_over_full"] = eager["draft_ms"] / full["draft_ms"]
        if "draft_kernels_ms" in full:
            row["draft_over_its_kernels"] = full["draft_ms"] / full["draft_kernels_ms"]
        row |= {
            f"tpot, {name} over full": other["tpot_ms"] / full["tpot_ms"] for name, other in others.items() if other
        }
        results.append(row)
    return results


COLUMNS = (
    ("drafts", "drafts", "d"),
    ("draft tokens", "draft_tokens", "d"),
    ("accepted", "accepted_tokens", "d"),
    ("tokens a round", "mean_length", ".2f"),
    ("TPOT ms", "tpot_ms", ".3f"),
    ("draft ms", "draft_ms", ".3f"),
    ("its kernels ms", "draft_kernels_ms", ".3f"),
    ("draft host ms", "draft_host_ms", ".3f"),
    ("round host ms", "round_host_ms", ".3f"),
)


def render(found: list[Figures]) -> str:
    """Format the figures as a table, with the ratios below."""
    lines = [("batch", "arm", *(name for name, _, _ in COLUMNS), "accepted in each position")]
    for row in sorted(found, key=lambda row: row["batch"]):
        cells = [cell(row, key, kind) for _, key, kind in COLUMNS]
        rates = " ".join(f"{rate:.3f}" for rate in row.get("per_position", ())) or "-"
        lines.append((str(row["batch"]), row["arm"], *cells, rates))
    table = [grid(lines)]
    for row in ratios(found):
        parts = [f"{name} {value:.2f}" for name, value in itertools.islice(row.items(), 1, None)]
        table.append(f"batch {row['batch']}: {'; '.join(parts)}")
    return "\n".join(table)
