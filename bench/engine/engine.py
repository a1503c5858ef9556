"""Requests in, tokens out: continuous batching with steps planned one ahead.

engine = Engine(model, EngineConfig())
engine.capture()
request = engine.add([1, 15, 7], SamplingParams(max_tokens=32))
for output in engine.stream():
    print(output.token)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from bench.engine.config import EngineConfig
from bench.engine.model_runner import Launched, ModelRunner
from bench.engine.pages import PageAllocator
from bench.engine.request import FinishReason, Request, RequestError, SamplingParams, shown, token_ids
from bench.engine.scheduler import Scheduler
from bench.models.llama import Llama
from simplegraph import CudaGraphManager, RankGroup


class Output(NamedTuple):
    """One token of one request; `finished` is the reason why it is the last, or None.

    A cancelled request has a last output without a token.
    """

    request: Request
    token: int | None
    finished: FinishReason | None


class Engine:
    """A model that serves requests.

    Args:
        llama: the model, on its device, with lm_head; see `bench.models.llama.build_llama`.
        config: the limits, and how the engine runs.
        ranks: the ranks that run the model together; each has an engine and is given the same requests.

    Attributes:
        runner: model, cache and graphs; scheduler: the running and the waiting requests.

    Raises:
        EngineError: the model or the machine cannot do what the config says.
    """

    def __init__(self, llama: Llama, config: EngineConfig | None = None, ranks: RankGroup | None = None) -> None:
        self.config = (config or EngineConfig()).with_slots(bool(llama.model.recurrences))
        self.runner = ModelRunner(llama, self.config, ranks)
        self._begin(llama, Scheduler)

    def _begin(self, llama: Llama, scheduler: type[Scheduler]) -> None:
        """Set up an engine without requests, after the config and the runner are set."""
        size, slots = self.config.page_size, self.config.max_num_seqs
        blocks = -(-self.runner.metadata.max_model_len // size)
        groups = [
            PageAllocator(backend.cache.num_pages, slots, blocks, size, backend.window)
            for backend in self.runner.backends
        ]
        self.scheduler = scheduler(groups, self.config)
        self._vocab_size = llama.config.vocab_size
        self._ids = itertools.count()
        self._under_way: Launched | None = None
        self._cancelled: list[Request] = []

    def capture(self) -> Any:
        """Capture the graphs and return a summary."""
        return self.runner.capture()

    @property
    def managers(self) -> list[CudaGraphManager]:
        """The managers of its graphs."""
        return [manager for manager in (self.runner.manager, self.runner.several) if manager is not None]

    @property
    def lookahead(self) -> int:
        """Slots in the cache that a request needs beyond its tokens."""
        return 0

    @property
    def idle(self) -> bool:
        """True if there is nothing left to do."""
        return self.scheduler.idle and self._under_way is None and not self._cancelled

    def add(self, prompt: Sequence[int], params: SamplingParams | None = None) -> Request:
        """Queue a request.

        Raises:
            RequestError: the prompt is empty, too long for model or cache, or has an unknown token id, or one that
                is no whole number; nothing is queued.
        """
        params = params or SamplingParams()
        tokens = token_ids(prompt)
        if not tokens:
            raise RequestError("the prompt is empty; expected at least one token id.")
        unknown = next((token for token in tokens if not 0 <= token < self._vocab_size), None)
        if unknown is not None:
            raise RequestError(f"the prompt has token id {shown(unknown)}; expected 0 to {self._vocab_size - 1}.")
        # The last token of an output is never run through the model, so it needs no slot in the cache.
        needed, most = len(tokens) + params.max_tokens - 1, self.config.max_model_len
        if needed > most:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {shown(params.max_tokens)}; together they may "
                f"be {most + 1} at most (max_model_len={most})."
            )
        for pages in self.scheduler.groups:
            blocks = pages.most_owned(needed + self.lookahead, self.config.max_num_tokens)
            if blocks > pages.num_pages:
                raise RequestError(
                    f"the request may need {blocks} pages of {self.config.page_size} tokens, the cache has "
                    f"{pages.num_pages}; build the engine with more num_pages, or ask for fewer tokens."
                )
        request = Request(next(self._ids), tokens, params)
        self.scheduler.waiting.append(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request now, unless it has ended already. Its last output comes with the next step."""
        if request.finished is None:
            self.scheduler.finish(request, FinishReason.CANCELLED)
            self._cancelled.append(request)

    def step(self) -> list[Output]:
        """Launch the next step, and return the tokens of the previous one (of this one, without overlap)."""
        # Whoever observes is shown the logits of every step.
        self.scheduler.steps = self.config.tokens_per_launch if self.runner.observe is None else 1
        plan = self.scheduler.schedule()
        before, self._under_way = self._under_way, None
        try:
            launched = self.runner.launch(plan) if plan is not None else None
        except BaseException:
            if plan is not None:
                self.scheduler.undo(plan)
                if self.runner.states is not None:  # they may have advanced, in some layers or in all
                    self.scheduler.restart(plan.requests)
            self._under_way = before
            raise
        outputs = [Output(request, None, FinishReason.CANCELLED) for request in self._cancelled]
        self._cancelled = []
        if before is not None:
            outputs += self._collect(before)
        if launched is not None and not self.config.overlap:
            return outputs + self._collect(launched)
        self._under_way = launched
        return outputs

    def stream(self) -> Iterator[Output]:
        """Yield tokens as they come, until every request has ended; requests may be added meanwhile."""
        while not self.idle:
            yield from self.step()

    def generate(
        self,
        prompts: Iterable[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[list[int]]:
        """Generate and return the tokens of each prompt's output.

        Args:
            prompts: token ids.
            params: sampling parameters of all prompts, or of each.
            progress: show a progress bar.

        Raises:
            RequestError: a prompt cannot be served; then none is queued.
        """
        prompts = list(prompts)
        each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(each)} sampling parameters for {len(prompts)} prompts; expected one for each.")
        requests: list[Request] = []
        try:
            for prompt, one in zip(prompts, each, strict=True):
                requests.append(self.add(prompt, one))
        except RequestError:
            for request in requests:
                self.scheduler.finish(request, FinishReason.CANCELLED)
            raise
        with tqdm(total=sum(request.params.max_tokens for request in requests), disable=not progress) as bar:
            for output in self.stream():
                bar.update(output.token is not None)
        return [request.output for request in requests]

    def _collect(self, launched: Launched) -> list[Output]:
        """Read a step's tokens, and end the requests that are finished."""
        plan, outputs = launched.plan, []
        for request, tokens, samples in zip(plan.requests, launched.wait(), plan.samples, strict=True):
            if not samples:
                continue
            request.pending -= len(tokens)
            for token in tokens:
                if request.finished is not None:
                    break  # the request ended while this step was running, or in it
                request.output.append(token)
                reason = self._reason_to_end(request, token)
                if reason is not None:
                    self.scheduler.finish(request, reason)
                outputs.append(Output(request, token, reason))
        return outputs

    @staticmethod
    def _reason_to_end(request: Request, token: int) -> FinishReason | None:
        if token in request.params.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(request.output) >= request.params.max_tokens else None
