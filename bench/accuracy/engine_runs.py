"""Runs a Llama or Qwen on the reference engine: eagerly, from graphs, and with speculation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.accuracy.tasks import Window
from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.scheduler import StepPlan
from bench.engine.spec import Acceptance, SpecEngine
from bench.engine.spec_config import SpecConfig
from bench.engine.start import drop_graphs, replays_of, start
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama
from bench.spec_decode.rounds import GraphModes
from bench.tools.measure import Figures

# Modes of target and draft.
WAYS = {
    "eager": GraphModes("NONE", None),
    "piecewise": GraphModes("PIECEWISE", None),
    "full": GraphModes("FULL_AND_PIECEWISE", None),
    "speculation, eager": GraphModes("NONE", "NONE"),
    "speculation, piecewise": GraphModes("PIECEWISE", "PIECEWISE"),
    "speculation, full": GraphModes("FULL_AND_PIECEWISE", "FULL_AND_PIECEWISE"),
}


@dataclasses.dataclass(frozen=True)
class EnginePlan:
    """The sizes of the engines.

    Args:
        batch: requests that run at once.
        longest: tokens of a request, prompt and output.
        num_draft_tokens: K.
        attention: the backend.
    """

    batch: int
    longest: int
    num_draft_tokens: int
    attention: str

    def config(self, modes: GraphModes) -> EngineConfig:
        """Make the config of an engine."""
        pages = 1 + self.batch * -(-(self.longest + 2 * self.num_draft_tokens + 2) // 16)
        tokens = self.batch * self.longest  # all prompts in one step
        sizes = (*(1 << power for power in range((tokens - 1).bit_length())), tokens)
        settings: dict[str, Any] = {
            "mode": modes.target,
            "attention": self.attention,
            "max_num_seqs": self.batch,
            "max_num_tokens": tokens,
            "max_model_len": self.longest,
            "num_pages": pages,
            "overlap": False,  # a token is known before the next step, which may then be given another one
        }
        if modes.draft is None:
            return EngineConfig(**settings, capture_sizes=sizes)
        drafting: dict[str, Any] = {
            "mixed_capture_sizes": sizes,
            "num_draft_tokens": self.num_draft_tokens,
            "draft_mode": modes.draft,
        }
        return SpecConfig(**settings, **drafting, keep_logits=True)


class EngineRun:
    """An engine that decodes, for `bench.accuracy.scores`."""

    engine: Engine

    def __init__(self, engine: Engine) -> None:
        self.engine, self.replays = engine, replays_of(engine, "an engine")

    def generate(self, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        return self.engine.generate(prompts, SamplingParams(max_tokens=count))

    def losses(self, windows: Sequence[Window]) -> list[float]:
        """Decode each window's tail token by token, whatever the model would have chosen."""
        engine = self.engine
        found: list[list[Tensor]] = [[] for _ in windows]
        tails = {
            engine.add(window.context, SamplingParams(max_tokens=len(window.tail))): (losses, window.tail)
            for losses, window in zip(found, windows, strict=True)
        }

        def observe(plan: StepPlan, logits: Tensor) -> None:
            for row, request in enumerate(plan.requests):
                losses, tail = tails[request]
                if request.output:  # the first token of a tail is given
                    losses.append(_loss(logits[row], tail[len(request.output)]))

        engine.runner.observe = observe
        while not engine.idle:
            for request, _, _ in engine.step():
                request.output[-1] = tails[request][1][len(request.output) - 1]
        engine.runner.observe = None
        return [float(loss) for losses in found for loss in losses]

    def acceptance(self) -> Figures:
        return {}

    def close(self) -> None:
        """Drop the graphs.

        Raises:
            NotReplayed: graphs did not serve the steps that they were captured for.
        """
        self.replays.end(1)
        drop_graphs(self.engine)


class SpeculativeRun(EngineRun):
    """An engine that speculates, for `bench.accuracy.scores`."""

    engine: SpecEngine

    def losses(self, windows: Sequence[Window]) -> list[float]:
        """Verify each window's tail in one round, in the place of drafts."""
        batch = self.engine.config.max_num_seqs
        groups = [windows[at : at + batch] for at in range(0, len(windows), batch)]
        return [loss for group in groups for loss in self._verified(group)]

    def _verified(self, windows: Sequence[Window]) -> list[float]:
        engine, width = self.engine, self.engine.num_draft_tokens + 1
        params = SamplingParams(max_tokens=2 * width)
        requests = [engine.add(window.context, params) for window in windows]
        engine.step()  # all prompts
        for request, window in zip(requests, windows, strict=True):
            request.output[-1] = window.tail[0]
            drafts = torch.tensor(window.tail[1:width], device=engine.runner.device)
            engine.runner.proposals.tokens[request.slot].copy_(drafts)
        engine.step()  # one round
        losses = [
            _loss(engine.runner.logits[row, place], window.tail[place + 1])
            for row, window in enumerate(windows)
            for place in range(width)
        ]
        for request in requests:
            engine.cancel(request)
        engine.step()
        return [float(loss) for loss in losses]

    def acceptance(self) -> Figures:
        counted, self.engine.acceptance = self.engine.acceptance, Acceptance()
        if not counted.drafts:
            return {}
        return {"rounds": counted.drafts, "mean_length": counted.mean_length, "per_position": counted.rates}


def _loss(logits: Tensor, token: int) -> Tensor:
    """Compute -log p of a token; the device is not waited for."""
    return -logits.double().log_softmax(dim=-1)[token]


def engine_run(target: Llama, draft: Eagle | Eagle3 | None, way: str, plan: EnginePlan) -> EngineRun:
    """Start an engine that runs in one of `WAYS`."""
    engine = start(plan.config(WAYS[way]), target, draft)
    return SpeculativeRun(engine) if isinstance(engine, SpecEngine) else EngineRun(engine)
