"""Plans rounds of drafting and verification, and the prompts beside them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from bench.engine.pages import PageAllocator
from bench.engine.request import Request
from bench.engine.scheduler import Int64s, Scheduler, StepPlan
from bench.engine.spec_config import SpecConfig

_SPARE_TOKENS = 64  # further tokens of each request that get pages at once if there are plenty


class RoundPlan(NamedTuple):
    """A round of requests whose prompts are computed, with K drafts each.

    Attributes:
        num_draft_tokens: K.
        starts: (num_reqs,) int64, tokens in the cache.
        slots: (num_reqs,) int64.
        block_table: (num_reqs, n) int32.
        reach: (num_reqs,) int64, tokens that each request has pages for, at least.
        number: of this plan; follows: number of the plan before it, if that had the same requests, pages and K and ran.
    """

    requests: list[Request]
    num_draft_tokens: int
    starts: Int64s
    slots: Int64s
    block_table: Any
    reach: Int64s
    number: int
    follows: int | None = None

    @property
    def last_tokens(self) -> Int64s:
        """Return each request's last token, (num_reqs,) int64, which is not in the cache yet."""
        return np.array([request.output[-1] for request in self.requests], np.int64)


def join(drafted: RoundPlan, prompts: StepPlan) -> StepPlan:
    """Make one step of a round and prompts: the round's requests first, with placeholders for their drafts."""
    query_len, reqs = drafted.num_draft_tokens + 1, len(drafted.requests)
    positions = drafted.starts[:, None] + np.arange(query_len)
    ids = np.zeros((reqs, query_len), np.int64)
    ids[:, 0] = drafted.last_tokens
    width = max(drafted.block_table.shape[1], prompts.block_tables[0].shape[1])
    tables = [
        np.pad(table, ((0, 0), (0, width - table.shape[1]))) for table in (drafted.block_table, *prompts.block_tables)
    ]
    return StepPlan(
        drafted.requests + prompts.requests,
        [query_len] * reqs + prompts.query_lens,
        [False] * reqs + prompts.samples,
        np.concatenate((drafted.slots, prompts.slots)),
        np.concatenate((drafted.starts + query_len, prompts.seq_lens)),
        np.concatenate((ids.ravel(), prompts.ids)),
        np.concatenate((positions.ravel(), prompts.positions)),
        [np.concatenate(tables)],
    )


class SpecScheduler(Scheduler):
    """Schedules prompts as the base class does, beside rounds of the requests whose prompts are computed.

    Args:
        groups: the cache's pages, of one group.
        config: of the engine.

    Attributes:
        drafted: requests that have drafts.
    """

    def __init__(self, groups: Sequence[PageAllocator], config: SpecConfig) -> None:
        super().__init__(groups, config)
        self.drafted: set[Request] = set()
        # Drafts are written after the verified tokens.
        self._ahead = max(config.drafts) - 1
        self._needed = max(config.drafts) + 1 + self._ahead  # tokens that a round may add, at most
        self._next: RoundPlan | None = None
        self._numbers = itertools.count()

    def schedule(self, spent: int = 0) -> StepPlan | None:
        """Plan the next step of prompts; None at once if all running requests have drafts."""
        if len(self.drafted) == len(self.running) and not (self.waiting and self._slots):
            return None
        return super().schedule(spent)

    def schedule_step(self, num_draft_tokens: int) -> tuple[StepPlan | None, RoundPlan | None]:
        """Plan a round, and the prompts that run beside it; each is None if there is nothing to do.

        The round comes first. Where it takes another request's pages, no prompt gets any in the same step.
        """
        running = len(self.running)
        drafted = self.schedule_round(num_draft_tokens)
        if len(self.running) < running:
            return None, drafted
        rows = 0 if drafted is None else len(drafted.requests) * (num_draft_tokens + 1)
        return self.schedule(rows), drafted

    def _scheduled_elsewhere(self, request: Request) -> bool:
        return request in self.drafted

    def schedule_round(self, num_draft_tokens: int) -> RoundPlan | None:
        """Plan a round of all requests that have drafts; None if there are none."""
        count = num_draft_tokens + 1 + self._ahead
        drafted, known, self._next = self.drafted, self._next, None
        requests = [request for request in self.running if request in drafted]
        if (
            known is not None
            and requests == known.requests
            and num_draft_tokens == known.num_draft_tokens
            and not np.logical_or.reduce(known.starts + count > known.reach)
        ):
            return known
        requests = [request for request in requests if request in drafted and self._make_room(request, count)]
        if not requests:
            return None
        for request in requests:
            self._take_pages_ahead(request, count)
        return self._round(requests, num_draft_tokens)

    def ran(self, plan: RoundPlan, counts: list[int]) -> None:
        """Prepare the same round again, each request longer by its count; other events may discard it."""
        starts = plan.starts + np.array(counts, np.int64)
        self._next = plan._replace(starts=starts, number=next(self._numbers), follows=plan.number)

    def _round(self, requests: list[Request], num_draft_tokens: int) -> RoundPlan:
        # Reading three lists into arrays is faster than one list of tuples.
        slots = np.array([request.slot for request in requests], np.int64)
        starts = np.array([request.num_computed for request in requests], np.int64)
        owned = np.array([request.num_pages for request in requests], np.int64)
        reach = starts + (owned * self._page_size - starts).min()
        table, number = self.pages.table[slots, : owned.max()], next(self._numbers)
        return RoundPlan(requests, num_draft_tokens, starts, slots, table, reach, number)

    def _take_pages_ahead(self, request: Request, count: int) -> None:
        """Take pages for later rounds if many are free and no request waits: most rounds then change no pages."""
        pages = self.pages
        end = min(len(request.prompt) + request.params.max_tokens + count, pages.table.shape[1] * self._page_size)
        more = min(count + _SPARE_TOKENS, end - request.num_computed)
        if not self.waiting and 2 * pages.num_free > pages.num_pages:
            super()._grow(request, more)

    def _grow(self, request: Request, count: int) -> bool:
        return super()._grow(request, count) or (self._give_back() and super()._grow(request, count))

    def _give_back(self) -> bool:
        """Free the pages that were taken for later rounds; True if there were any."""
        before = self.pages.num_free
        for request in self.drafted:
            kept = -(-(request.num_computed + self._needed) // self._page_size)
            if request.slot is not None and kept < request.num_pages:
                self.pages.shrink(request.slot, request.num_pages, kept)
                request.num_pages, self._next = kept, None
        return self.pages.num_free > before

    def _release(self, request: Request) -> None:
        super()._release(request)
        if request in self.drafted:
            self.drafted.remove(request)
            self._next = None
