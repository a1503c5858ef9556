"""Serves loads of requests with every arm: the engine's modes, the compiler, and speculation."""

from __future__ import annotations

import dataclasses
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bench.engine import Engine, EngineConfig
from bench.engine.spec import Acceptance, SpecEngine
from bench.engine.spec_config import SpecConfig
from bench.engine.start import drop_graphs, replays_of, start
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama
from bench.serve import load
from bench.tools import torchrun
from bench.tools.measure import Figures, say
from simplegraph import RankGroup

# How the engine runs in each arm.
ARMS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "NONE"},
    "full": {"mode": "FULL"},
    "full-decode-only": {"mode": "FULL_DECODE_ONLY"},
    "full-and-piecewise": {"mode": "FULL_AND_PIECEWISE"},
    "compiled-piecewise": {"mode": "PIECEWISE", "compiled": True},
    "speculation, draft eager": {"mode": "FULL_AND_PIECEWISE", "draft_mode": "NONE"},
    "speculation, draft piecewise": {"mode": "FULL_AND_PIECEWISE", "draft_mode": "PIECEWISE"},
    "speculation, draft full": {"mode": "FULL_AND_PIECEWISE", "draft_mode": "FULL_AND_PIECEWISE"},
}


@dataclasses.dataclass(frozen=True)
class ServePlan:
    """The loads to serve, and the engine that serves them.

    Args:
        loads: one after the other in every arm, of the same requests.
        requests: how many in each load.
        seed: of arrival times and lengths.
        longest: the most tokens of a request, to which all are scaled down; None for the lengths as drawn.
        batch: requests that run at once.
        step_tokens: tokens of a step.
        num_draft_tokens: K, in arms with speculation.
        mean_length: tokens of a round; None for the draft's real acceptance.
        limit: seconds after which no other load begins.
    """

    loads: Sequence[load.Load]
    requests: int
    seed: int
    longest: int | None
    batch: int
    step_tokens: int
    num_draft_tokens: int
    mean_length: float | None
    limit: float

    def arrivals(self, one: load.Load, vocab_size: int) -> list[load.Arrival]:
        """Make the requests of a load."""
        return load.arrivals(self.requests, one.rate, vocab_size, seed=self.seed, longest=self.longest)

    def config(self, arm: str, attention: str, arrivals: Sequence[load.Arrival]) -> EngineConfig:
        """Make the config of an engine that never runs out of pages."""
        ahead = 2 * self.num_draft_tokens
        tokens = sorted(len(one.prompt) + one.max_tokens for one in arrivals)
        settings: dict[str, Any] = {
            "attention": attention,
            "max_num_seqs": self.batch,
            "max_num_tokens": self.step_tokens,
            "max_model_len": tokens[-1],
            "num_pages": 1 + sum(-(-(length + ahead) // 16) for length in tokens[-self.batch :]),
            **ARMS[arm],
        }
        if "draft_mode" not in settings:
            return EngineConfig(**settings)
        settings["max_num_tokens"] = max(self.step_tokens, self.batch * (self.num_draft_tokens + 1))
        return SpecConfig(**settings, num_draft_tokens=self.num_draft_tokens, mean_length=self.mean_length)


def default_arms(tp: int) -> list[str]:
    """All; on several ranks those that capture a collective as it is called, and do not speculate."""
    return [name for name, settings in ARMS.items() if tp == 1 or not {"compiled", "draft_mode"} & settings.keys()]


def served(
    plan: ServePlan,
    llama: Llama,
    draft: Eagle | Eagle3 | None,
    arms: Sequence[str],
    backends: Sequence[str],
    ranks: RankGroup | None,
) -> Iterator[tuple[str, Figures]]:
    """Serve every load with every arm, and yield the name and the figures of each."""
    clock = torchrun.clock()  # all ranks stop at the same load
    until = clock() + plan.limit
    for attention, arm in itertools.product(backends, arms):
        name = arm if attention == "auto" else f"{arm}, {attention}"
        if clock() > until:
            say(f"{name}: not begun; {plan.limit:g} s have passed")
            continue
        say(f"serving: {name}")
        arrivals = plan.arrivals(plan.loads[0], llama.config.vocab_size)
        engine = start(plan.config(arm, attention, arrivals), llama, draft, ranks)
        warmup = [load.Arrival(0.0, one.prompt, min(4, one.max_tokens)) for one in arrivals[: plan.batch]]
        load.serve(engine, warmup, clock)  # libraries load here
        for one in plan.loads:
            full_name = name if len(plan.loads) == 1 else f"{name}, {one}"
            if clock() > until:
                say(f"{full_name}: not begun; {plan.limit:g} s have passed")
                continue
            figures = {"arm": arm, "load": str(one)} | figures_of(engine, plan, one, clock)
            rate, ttft, tpot = (figures[key] for key in ("requests_per_second", "ttft_median_ms", "tpot_median_ms"))
            say(f"served: {full_name}: {rate:.1f} requests/s, TTFT {ttft:.1f} ms, TPOT {tpot:.2f} ms")
            yield full_name, figures
        drop_graphs(engine)
        del engine  # with its cache, before the next arm makes one
        gc.collect()


def figures_of(engine: Engine, plan: ServePlan, one: load.Load, clock: Callable[[], float]) -> Figures:
    """Serve one load, and return its figures."""
    if isinstance(engine, SpecEngine):
        engine.acceptance = Acceptance()
    arrivals = plan.arrivals(one, engine.runner.llama.config.vocab_size)
    replays = replays_of(engine, str(one))
    timings, requests = load.serve(engine, arrivals, clock, one.in_flight)
    replays.end(load.count_steps(timings))
    figures = load.summary(timings, requests) | replays.figures()
    if isinstance(engine, SpecEngine):
        figures |= {"mean_length": engine.acceptance.mean_length, "per_position": engine.acceptance.rates}
    return figures
