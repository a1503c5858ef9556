"""Which requests a round of drafting and verification is of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from bench.engine.pages import PageAllocator
from bench.engine.request import Request
from bench.engine.scheduler import Int64s, Scheduler, StepPlan
from bench.engine.spec_config import SpecConfig


class RoundPlan(NamedTuple):
    """A round of requests whose prompts are computed, K drafts each.

    Attributes:
        num_draft_tokens: K.
        last_tokens: (num_reqs,) int64, each request's last token, which is not in the cache yet.
        starts: (num_reqs,) int64, tokens in the cache.
        slots: (num_reqs,) int64.
        block_table: (num_reqs, n) int32, with pages for 2 K tokens more.
    """

    requests: list[Request]
    num_draft_tokens: int
    last_tokens: Int64s
    starts: Int64s
    slots: Int64s
    block_table: Any


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

    def schedule(self) -> StepPlan | None:
        """The next step of prompts; None, without a look at any request, where everyone who runs has drafts."""
        if len(self.drafted) == len(self.running) and not (self.waiting and self._slots):
            return None
        return super().schedule()

    def _scheduled_elsewhere(self, request: Request) -> bool:
        return request in self.drafted

    def schedule_round(self, num_draft_tokens: int) -> RoundPlan | None:
        """A round of everyone who has drafts; None if there is nobody."""
        count = num_draft_tokens + 1 + self._ahead
        drafted, page_size = self.drafted, self._page_size
        requests = [
            request
            for request in list(self.running)
            if request in drafted
            and (request.num_computed + count <= request.num_pages * page_size or self._make_room(request, count))
        ]
        if not requests:
            return None
        # Three lists are quicker to read into arrays than one of tuples.
        slots = np.array([request.slot for request in requests], np.int64)
        last_tokens = np.array([request.output[-1] for request in requests], np.int64)
        starts = np.array([request.num_computed for request in requests], np.int64)
        width = max([request.num_pages for request in requests])
        return RoundPlan(requests, num_draft_tokens, last_tokens, starts, slots, self.pages.table[slots, :width])

    def _release(self, request: Request) -> None:
        super()._release(request)
        self.drafted.discard(request)
