"""Speculative decoding on the reference engine: prompts first, then rounds of drafting and verification.

engine = SpecEngine(model, draft, SpecConfig(num_draft_tokens=5))
engine.capture()
outputs = engine.generate([[1, 15, 7]], SamplingParams(max_tokens=32))
print(engine.acceptance)
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.engine.engine import Engine, Output
from bench.engine.pages import PageAllocator
from bench.engine.request import FinishReason, Request, RequestError, SamplingParams
from bench.engine.runner import require
from bench.engine.scheduler import Scheduler, StepPlan
from bench.engine.spec_runner import RoundPlan, SpecConfig, SpecRunner
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama


@dataclasses.dataclass
class Acceptance:
    """What became of the drafts.

    Attributes:
        drafts: rounds of all requests; draft_tokens: tokens drafted; accepted: how many of them were taken.
        per_position: how often the draft in each place was taken.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: list[int] = dataclasses.field(default_factory=list)

    def count(self, drafted: int, taken: int) -> None:
        """Add one request's round."""
        self.drafts += 1
        self.draft_tokens += drafted
        self.accepted += taken
        self.per_position += [0] * (drafted - len(self.per_position))
        for place in range(taken):
            self.per_position[place] += 1

    @property
    def mean_length(self) -> float:
        """Tokens a round, the target's own included; 0 before the first."""
        return 1 + self.accepted / self.drafts if self.drafts else 0.0

    @property
    def rates(self) -> list[float]:
        """The share of rounds in which the draft in each place was taken."""
        return [taken / self.drafts for taken in self.per_position]


class SpecScheduler(Scheduler):
    """Prompts as the base class schedules them, and rounds of the requests whose prompts are computed.

    Args:
        pages: the cache's.
        config: of the engine.

    Attributes:
        drafted: requests that have drafts.
    """

    def __init__(self, pages: PageAllocator, config: SpecConfig) -> None:
        super().__init__(pages, config.page_size, config.max_num_seqs, config.max_num_tokens)
        self.drafted: set[Request] = set()
        # Drafts are written behind what is verified.
        self._ahead = max(config.drafts) - 1

    def _scheduled_elsewhere(self, request: Request) -> bool:
        return request in self.drafted

    def schedule_round(self, num_draft_tokens: int) -> RoundPlan | None:
        """A round of everyone who has drafts; None if there is nobody."""
        requests = [
            request
            for request in list(self.running)
            if request in self.drafted and self._make_room(request, num_draft_tokens + 1 + self._ahead)
        ]
        if not requests:
            return None
        slots = np.array([request.slot for request in requests], np.int64)
        width = max(request.num_pages for request in requests)
        return RoundPlan(
            requests,
            num_draft_tokens,
            np.array([request.output[-1] for request in requests], np.int64),
            np.array([request.num_computed for request in requests], np.int64),
            slots,
            self.pages.table[slots, :width],
        )

    def _release(self, request: Request) -> None:
        super()._release(request)
        self.drafted.discard(request)


class SpecEngine(Engine):
    """An engine whose requests grow by several tokens a round.

    Args:
        llama: the target, on its device, with lm_head.
        draft: made for it; see `bench.models.eagle`.
        config: what it can hold, and how it runs.

    Attributes:
        acceptance: what became of the drafts.
        num_draft_tokens: K of the next rounds; one of the config's.

    Raises:
        EngineError: the models or the machine cannot do what the config says.
    """

    config: SpecConfig
    runner: SpecRunner  # type: ignore[assignment]
    scheduler: SpecScheduler

    def __init__(self, llama: Llama, draft: Eagle | Eagle3, config: SpecConfig | None = None) -> None:
        self.config = config or SpecConfig()
        self.runner = SpecRunner(llama, draft, self.config)
        blocks = self.runner.metadata.max_blocks
        pages = PageAllocator(self.config.num_pages, self.config.max_num_seqs, blocks)
        self.scheduler = SpecScheduler(pages, self.config)
        self.acceptance = Acceptance()
        self._vocab_size = llama.config.vocab_size
        self._ids = itertools.count()
        self._under_way = None
        self._cancelled: list[Request] = []
        self._num_draft_tokens = self.config.drafts[0]

    @property
    def num_draft_tokens(self) -> int:
        """K of the next rounds."""
        return self._num_draft_tokens

    @num_draft_tokens.setter
    def num_draft_tokens(self, count: int) -> None:
        known = self.config.drafts
        require(count in known, "num_draft_tokens", count, f"one of {', '.join(map(str, known))}")
        self._num_draft_tokens = count

    @property
    def lookahead(self) -> int:
        """Verified and drafted tokens behind a request's last."""
        return 2 * max(self.config.drafts)

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a request; see `Engine.add`.

        Raises:
            RequestError: also where a request samples in a way that rounds cannot.
        """
        params = params or SamplingParams()
        if not params.greedy:
            if self.config.acceptance == "greedy":
                raise RequestError(f"temperature is {params.temperature}; this engine accepts greedily: expected 0.")
            if params.top_k or params.top_p < 1 or params.seed is not None:
                raise RequestError("top_k, top_p and seed are not for speculative rounds; expected a temperature only.")
        return super().add(prompt, params)

    def step(self) -> list[Output]:
        """One step of prompts if there is any, else a round; its tokens."""
        outputs = [Output(request, None, FinishReason.CANCELLED) for request in self._cancelled]
        self._cancelled = []
        plan = self.scheduler.schedule()
        if plan is not None:
            return outputs + self._prompts(plan)
        drafted = self.scheduler.schedule_round(self.num_draft_tokens)
        return outputs + (self._round(drafted) if drafted is not None else [])

    def _prompts(self, plan: StepPlan) -> list[Output]:
        try:
            tokens = self.runner.wait(self.runner.launch_prompts(plan))
        except BaseException:
            self.scheduler.undo(plan)
            raise
        outputs = []
        for request, row, samples in zip(plan.requests, tokens, plan.samples, strict=True):
            if samples:
                request.pending -= 1
                self.scheduler.drafted.add(request)
                outputs += self._grow(request, row.tolist())
        return outputs

    def _round(self, plan: RoundPlan) -> list[Output]:
        tokens = self.runner.wait(self.runner.launch_round(plan))[:, : plan.num_draft_tokens + 1]
        outputs = []
        for request, row in zip(plan.requests, tokens.tolist(), strict=True):
            found = [token for token in row if token >= 0]
            self.acceptance.count(plan.num_draft_tokens, len(found) - 1)
            request.num_computed += len(found)
            outputs += self._grow(request, found)
        return outputs

    def _grow(self, request: Request, tokens: Sequence[int]) -> list[Output]:
        """Give a request its tokens, up to where it ends."""
        outputs: list[Output] = []
        for token in tokens:
            request.output.append(token)
            reason = self._reason_to_end(request, token)
            outputs.append(Output(request, token, reason))
            if reason is not None:
                self.scheduler.finish(request, reason)
                break
        return outputs

    def capture(self) -> Any:
        """Capture the graphs; summaries of what was captured."""
        return self.runner.capture()
