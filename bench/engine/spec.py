"""Speculative decoding on the reference engine: rounds of drafting and verification, with prompts beside them.

engine = SpecEngine(model, draft, SpecConfig(num_draft_tokens=5))
engine.capture()
outputs = engine.generate([[1, 15, 7]], SamplingParams(max_tokens=32))
print(engine.acceptance)
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from bench.engine.config import require
from bench.engine.engine import Engine, Output
from bench.engine.request import FinishReason, Request, RequestError, SamplingParams
from bench.engine.scheduler import Int64s, StepPlan
from bench.engine.spec_config import SpecConfig
from bench.engine.spec_runner import SpecRunner
from bench.engine.spec_scheduler import RoundPlan, SpecScheduler
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Llama
from simplegraph import CudaGraphManager
from simplegraph.device.protocol import GraphPool

# Three times faster than calling the class: a round of a large batch makes a hundred of them.
_output = functools.partial(tuple.__new__, Output)


@dataclasses.dataclass
class Acceptance:
    """Counts drafted and accepted tokens.

    Attributes:
        draft_tokens: drafted tokens of all requests; width: the most drafts per request in a round.
        rounds: number of tokens, the target's own included -> number of rounds that gave as many.
    """

    draft_tokens: int = 0
    width: int = 0
    rounds: Counter[int] = dataclasses.field(default_factory=Counter)

    def count(self, drafted: int, lengths: Sequence[int]) -> None:
        """Add a round.

        Args:
            drafted: drafts for each request; lengths: new tokens of each, one more than its accepted drafts.
        """
        self.draft_tokens += drafted * len(lengths)
        self.width = max(self.width, drafted)
        self.rounds.update(lengths)

    @property
    def drafts(self) -> int:
        """Number of rounds, summed over requests."""
        return self.rounds.total()

    @property
    def accepted(self) -> int:
        """Number of accepted drafts."""
        return sum((length - 1) * rounds for length, rounds in self.rounds.items())

    @property
    def per_position(self) -> list[int]:
        """For each position in a round, how often its draft was accepted."""
        places = range(1, self.width + 1)
        return [sum(rounds for length, rounds in self.rounds.items() if length > place) for place in places]

    @property
    def mean_length(self) -> float:
        """Average tokens per round, the target's own included; 0 before the first round."""
        return 1 + self.accepted / self.drafts if self.rounds else 0.0

    @property
    def rates(self) -> list[float]:
        """For each position in a round, the share of its drafts that were accepted."""
        return [taken / self.drafts for taken in self.per_position]


class SpecEngine(Engine):
    """An engine whose requests grow by several tokens per round.

    Args:
        llama: the target, on its device, with lm_head.
        draft: its draft model; see `bench.models.eagle`.
        config: the limits, and how the engine runs.
        pool: memory to share with other engines of this process, whose steps then never run at the same time.

    Attributes:
        acceptance: counts of drafted and accepted tokens.
        num_draft_tokens: K of the next rounds; one of the config's.

    Raises:
        EngineError: the models or the machine do not support the config.
    """

    config: SpecConfig
    runner: SpecRunner  # type: ignore[assignment]
    scheduler: SpecScheduler

    def __init__(
        self,
        llama: Llama,
        draft: Eagle | Eagle3,
        config: SpecConfig | None = None,
        pool: GraphPool | None = None,
    ) -> None:
        self.config = config or SpecConfig()
        self.runner = SpecRunner(llama, draft, self.config, pool)
        self._begin(llama, SpecScheduler)
        self.acceptance = Acceptance()
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
    def managers(self) -> list[CudaGraphManager]:
        drafts = self.runner.drafters.values()
        every = (each for drafter in drafts for each in (drafter.prefill_manager, drafter.decode_manager))
        return [*self.runner.managers.values(), *(manager for manager in every if manager is not None)]

    @property
    def lookahead(self) -> int:
        """Slots for verified and drafted tokens after a request's last one."""
        return 2 * max(self.config.drafts)

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a request; see `Engine.add`.

        Raises:
            RequestError: as `Engine.add`, or the sampling parameters are not supported in rounds.
        """
        params = params or SamplingParams()
        if not params.greedy:
            if self.config.acceptance == "greedy":
                raise RequestError(f"temperature is {params.temperature}; this engine accepts greedily: expected 0.")
            if params.top_k or params.top_p < 1 or params.seed is not None:
                raise RequestError("top_k, top_p and seed are not for speculative rounds; expected a temperature only.")
        return super().add(prompt, params)

    def step(self) -> list[Output]:
        """Run one round, with the prompts that there are beside it; return the tokens of both."""
        outputs = [Output(request, None, FinishReason.CANCELLED) for request in self._cancelled]
        self._cancelled = []
        plan, drafted = self.scheduler.schedule_step(self.num_draft_tokens)
        if plan is not None:
            return outputs + self._prompts(plan, drafted)
        return outputs + (self._round(drafted) if drafted is not None else [])

    def _prompts(self, plan: StepPlan, drafted: RoundPlan | None) -> list[Output]:
        try:
            arriving, verified = self.runner.launch_prompts(plan, drafted)
            tokens, rows = self.runner.wait(arriving), None if verified is None else self.runner.wait(verified)
        except BaseException:
            self.scheduler.undo(plan)
            raise
        grown: list[tuple[Request, list[int]]] = []
        if drafted is not None and rows is not None:
            grown, _ = self._verified(drafted, rows)
        for request, row, samples in zip(plan.requests, tokens, plan.samples, strict=True):
            if samples:
                request.pending -= 1
                self.scheduler.drafted.add(request)
                grown.append((request, row.tolist()))
        return self._grow(grown)

    def _round(self, plan: RoundPlan) -> list[Output]:
        grown, counts = self._verified(plan, self.runner.wait(self.runner.launch_round(plan)))
        self.scheduler.ran(plan, counts)
        return self._grow(grown)

    def _verified(self, plan: RoundPlan, rows: Int64s) -> tuple[list[tuple[Request, list[int]]], list[int]]:
        """Count a round's tokens, and return those of each request, and how many they are."""
        grown, counts = [], []
        for request, row in zip(plan.requests, rows.tolist(), strict=True):
            tokens = row if row[-1] >= 0 else row[: row.index(-1)]
            count = len(tokens)
            grown.append((request, tokens))
            counts.append(count)
            request.num_computed += count
        self.acceptance.count(plan.num_draft_tokens, counts)
        return grown, counts

    def _grow(self, grown: list[tuple[Request, list[int]]]) -> list[Output]:
        """Append each request's new tokens, up to its end."""
        outputs: list[Output] = []
        for request, tokens in grown:
            params, output = request.params, request.output
            if len(output) + len(tokens) < params.max_tokens and len(params.stop_token_ids) == 0:
                output += tokens  # as in most rounds: none can be the last
                outputs += [_output((request, token, None)) for token in tokens]
            else:
                self._end(request, tokens, outputs)
        return outputs

    def _end(self, request: Request, tokens: list[int], outputs: list[Output]) -> None:
        """Append the new tokens of a request that may end in this round, up to its end."""
        for token in tokens:
            request.output.append(token)
            reason = self._reason_to_end(request, token)
            outputs.append(Output(request, token, reason))
            if reason is not None:
                self.scheduler.finish(request, reason)
                return

    def capture(self) -> Any:
        """Capture the graphs and return summaries."""
        return self.runner.capture()
