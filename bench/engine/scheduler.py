"""Plans the next step: the requests that decode, the prompts that continue, and the requests that wait.

Steps are planned before earlier results are known: a token that a launched step will sample is counted in the
request already (`Request.pending`), and its value is passed from sampler to next step on the device.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bench.engine.config import EngineConfig
from bench.engine.pages import PageAllocator
from bench.engine.request import FinishReason, Request

Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class StepPlan:
    """One step.

    Attributes:
        requests: the requests that take part.
        query_lens: tokens of each in this step.
        samples: True if a new token is sampled after the request's last token of the step; False within a prompt.
        slots: (num_reqs,) int64; seq_lens: (num_reqs,) int64, this step's tokens included.
        ids: (num_tokens,) int64, token ids; -1 - slot stands for the last token sampled for that slot.
        positions: (num_tokens,) int64.
        block_tables: (num_reqs, n) int32 for each group of layers.
        steps: decode steps that follow each other on the device, of which this is the first.
    """

    requests: list[Request]
    query_lens: list[int]
    samples: list[bool]
    slots: Int64s
    seq_lens: Int64s
    ids: Int64s
    positions: Int64s
    block_tables: Sequence[npt.NDArray[np.int32]]
    steps: int = 1

    @property
    def uniform_query_len(self) -> int | None:
        """1 if every request has one token, else None."""
        return 1 if len(self.ids) == len(self.requests) else None


class Scheduler:
    """First come, first served; running requests before waiting ones; the youngest is preempted if pages run out.

    Args:
        groups: the pages of the cache of each group of layers.
        config: of the engine.

    Attributes:
        pages: those of the first group.
        steps: decode steps to take together where that is possible.
    """

    def __init__(self, groups: Sequence[PageAllocator], config: EngineConfig) -> None:
        self.groups, self.pages = groups, groups[0]
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._page_size = config.page_size
        self._max_num_tokens = config.max_num_tokens
        self._slots = list(range(config.max_num_seqs - 1, -1, -1))
        self.steps = config.tokens_per_launch
        self._ahead = 0  # tokens beyond those of the step that get pages

    @property
    def idle(self) -> bool:
        """True if no request is left."""
        return not self.waiting and not self.running

    def schedule(self, spent: int = 0) -> StepPlan | None:
        """Plan the next step and count its tokens as computed; None if there is nothing to compute now.

        Args:
            spent: tokens of the step that are something else's.
        """
        several = self._ready_for_several()
        if several:
            return self._plan([(request, 1) for request in several], self.steps)
        taken: list[tuple[Request, int]] = []
        left = self._max_num_tokens - spent
        running = list(self.running)
        for request in running:
            count = min(request.num_left, left)
            if request.slot is None or count < 1 or self._scheduled_elsewhere(request):
                continue
            if self._make_room(request, count + self._ahead):
                taken.append((request, count))
                left -= count
        preempted = any(request.slot is None for request in running)
        while self.waiting and left > 0 and not preempted:
            request = self.waiting[0]
            count = min(request.num_left, left)
            if not self._admit(request, count + self._ahead):
                break
            taken.append((request, count))
            left -= count
        return self._plan(taken) if taken else None

    def _ready_for_several(self) -> list[Request]:
        """Return the running requests if all can take `steps` decode steps together, with the pages for them."""
        if self.steps == 1 or self.waiting:
            return []
        active = [request for request in self.running if request.num_left]
        ready = all(
            request.params.greedy and request.num_left == 1 and request.num_to_sample >= self.steps
            for request in active
        )
        return active if ready and all(self._grow(request, self.steps) for request in active) else []

    def _scheduled_elsewhere(self, request: Request) -> bool:
        """True if a subclass runs this request in steps of another kind."""
        return False

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request; its pages are free at once, since the steps of others come later on the same stream."""
        request.finished = reason
        if request.slot is None:
            self.waiting.remove(request)
        else:
            self._release(request)
            self.running.remove(request)

    def undo(self, plan: StepPlan) -> None:
        """Undo the plan of a step that was not run."""
        for request, count, samples in zip(plan.requests, plan.query_lens, plan.samples, strict=True):
            request.num_computed -= count + plan.steps - 1
            request.pending -= samples * plan.steps

    def restart(self, requests: Sequence[Request]) -> None:
        """Move running requests back to the front of the queue; all their tokens will be computed again."""
        for request in reversed([one for one in self.running if one in requests]):
            self._preempt(request)

    def _make_room(self, request: Request, count: int) -> bool:
        """Get pages for `count` more tokens of a running request, from younger ones if necessary."""
        while not self._grow(request, count):
            youngest = self.running[-1]
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _grow(self, request: Request, count: int) -> bool:
        if request.slot is None:
            return False
        needed, owned = -(-(request.num_computed + count) // self._page_size), request.num_pages
        for pages in self.groups:
            pages.give_back(request.slot, request.num_computed)
        if needed > owned:
            if any(needed - owned > pages.num_free for pages in self.groups):
                return False
            for pages in self.groups:
                pages.grow(request.slot, owned, needed)
            request.num_pages = needed
        return True

    def _admit(self, request: Request, count: int) -> bool:
        """Start a waiting request, unless a token from before its preemption is still pending."""
        if not self._slots or request.pending:
            return False
        request.slot = self._slots.pop()
        if not self._grow(request, count):
            self._release(request)
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _preempt(self, request: Request) -> None:
        """Move a request back to the front of the queue; its tokens will be computed again."""
        self.running.remove(request)
        self._release(request)
        request.num_computed = 0
        request.preemptions += 1
        self.waiting.appendleft(request)

    def _release(self, request: Request) -> None:
        if request.slot is not None:
            for pages in self.groups:
                pages.free(request.slot, request.num_pages)
            self._slots.append(request.slot)
        request.slot, request.num_pages = None, 0

    def _plan(self, taken: list[tuple[Request, int]], steps: int = 1) -> StepPlan:
        requests, counts = [request for request, _ in taken], [count for _, count in taken]
        slots = np.array([request.slot for request in requests], np.int64)
        starts = np.array([request.num_computed for request in requests], np.int64)
        seq_lens = starts + counts
        ids = np.array([token for request, count in taken for token in _token_ids(request, count)], np.int64)
        positions = seq_lens - 1 if len(ids) == len(taken) else _positions(starts, counts)
        samples = [request.num_computed + count == request.num_tokens for request, count in taken]
        for request, count, sample in zip(requests, counts, samples, strict=True):
            request.num_computed += count + steps - 1
            request.pending += sample * steps
        width = max(request.num_pages for request in requests)
        tables = [pages.table[slots, :width] for pages in self.groups]
        return StepPlan(requests, counts, samples, slots, seq_lens, ids, positions, tables, steps)


def _token_ids(request: Request, count: int) -> list[int]:
    """Return the next tokens of a request; -1 - slot for one that only the device knows."""
    first, prompt = request.num_computed, len(request.prompt)
    unknown = -1 - (request.slot or 0)
    if first >= prompt:
        known = request.output[first - prompt : first - prompt + count]
    else:
        known = (request.prompt + request.output)[first : first + count]
    return known + [unknown] * (count - len(known))


def _positions(starts: Int64s, counts: list[int]) -> Int64s:
    return np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
