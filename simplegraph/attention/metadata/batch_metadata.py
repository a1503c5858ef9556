"""What attention reads of a step: lengths, pages and slots, in buffers whose addresses never change.

They hold one step at a time, so one thread at a time sets and runs steps.

metadata = BatchMetadata(max_num_tokens=8192, max_num_reqs=256, max_model_len=4096, page_size=16, device="cuda")
metadata.set([1, 1, 5], [312, 77, 5], [[3, 9, ...], ...], num_tokens=8, num_reqs=4)   # padded to the graph's shape
"""

from __future__ import annotations

import numpy as np
import torch

from simplegraph.attention.metadata.batch_state import BatchState, CommonMetadata
from simplegraph.attention.metadata.growth import Growth
from simplegraph.attention.metadata.requests import ContextShare, Ints, Limits, Pages, QueryLens, Request, read_requests
from simplegraph.attention.metadata.staging import Extent, Staging, Step
from simplegraph.errors import CaptureSizeError, InputError, ReplayError
from simplegraph.graph.select import graph_device

_MAX_VIEWS = 4096  # shapes remembered before starting over: eager batches come in any shape


class BatchMetadata:
    """Persistent buffers for the metadata of one step at a time.

    Args:
        max_num_tokens: the most tokens a step can have, padding included.
        max_num_reqs: the most requests, padding included.
        max_model_len: the most tokens a request's KV cache can hold.
        page_size: tokens in a page.
        device: where attention runs.
        num_pages: how many pages the cache has; a backend fills it in.
        share: of context parallel ranks, which part of every sequence is in this rank's cache; the block table's pages
            then have `page_size` tokens of each rank.
        debug: check every step's pages, those of tokens `ahead` included: none is written by two requests, or twice by
            one. Where ranks share a context, a prompt's tokens are requests with the same pages, and no place in them
            is.

    Attributes:
        max_blocks: the most pages a request can have.
        batch: the present step on the host.
        graphs: what captures on the device.

    Raises:
        ConfigError: a limit is below 1.
    """

    def __init__(
        self,
        *,
        max_num_tokens: int,
        max_num_reqs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device | str,
        num_pages: int | None = None,
        share: ContextShare | None = None,
        debug: bool = False,
    ) -> None:
        self.share = share or ContextShare()
        self.share.check()
        self._limits = Limits(max_num_tokens, max_num_reqs, max_model_len, page_size * self.share.size)
        self.max_num_tokens = max_num_tokens
        self.max_num_reqs = max_num_reqs
        self.max_model_len = max_model_len
        self.page_size = page_size
        self.max_blocks = self._limits.max_blocks
        self.num_pages = num_pages
        self.debug = debug
        self.batch = BatchState()
        self.graphs = graph_device(device)
        self.device = self.graphs.torch_device
        self._one_each = np.arange(max_num_reqs + 1, dtype=np.int32)
        self._longest = np.array(max_model_len, np.int32)  # an array, which numpy reads quicker than a number
        self._growth: Growth | None = None  # since the last step that was set
        self._staging = Staging(Extent(max_num_tokens, max_num_reqs, self.max_blocks), self.device)
        self._views: dict[tuple[int, int], CommonMetadata] = {}

    def set(
        self,
        query_lens: QueryLens,
        seq_lens: Ints,
        block_table: Pages,
        *,
        num_tokens: int | None = None,
        num_reqs: int | None = None,
        ahead: int = 0,
    ) -> CommonMetadata:
        """Write a step, in the order of the current stream; call once a step, outside the graph, before it runs.

        Args:
            query_lens: (num_reqs,) whole numbers, tokens of each request in this step; at least 1. One number, which
                is quicker, where all have as many.
            seq_lens: (num_reqs,) whole numbers, tokens in each request's KV cache, this step's included.
            block_table: the page ids of each request, in order: a sequence of sequences, or, much quicker for
                many pages, a (num_reqs, n) array or CPU tensor. What lies past a request's `seq_lens`, and `ahead`, is
                ignored.
            num_tokens: rows of the graph that will run; by default as many as there are tokens.
            num_reqs: requests of the graph that will run; None as in its descriptor, for a graph that leaves them open.
            ahead: tokens beyond `seq_lens`, up to max_model_len, whose pages reach the device, too: for steps that
                follow there, as a draft's do.

        Returns:
            The buffers, seen in that shape.

        Raises:
            CaptureSizeError: the batch is empty, or larger than the limits or the padded shape.
            InputError: the lengths or pages do not fit each other; a request has several tokens where ranks share its
                context; `ahead` is below 0. After an error the previous step is still in place.
        """
        if self.graphs.is_capturing():
            raise InputError("the batch was set inside a capture; set it before the graph is captured or replayed.")
        ahead = self._limits.check_ahead(ahead)
        request = read_requests(query_lens, seq_lens, block_table, self._limits, ahead)
        shape = self._padded(request, num_tokens, num_reqs)
        request.check_pages(self.num_pages)
        step = request.step
        if self.share.size > 1:
            request.check_single_tokens()
            if ahead:
                raise InputError(f"ahead is {ahead}; no steps follow on the device where ranks share a context.")
            if self.debug:
                request.check_places()
            step = self.share.of(step)
        elif self.debug:
            request.check_written_once(ahead)
        self._put(step, *shape, request.max_query_len, ahead=ahead)
        return self.view(*shape)

    def advance(self, seq_lens: Ints, *, ahead: int = 0) -> None:
        """Expect a step that the device makes of the one that is set: the same requests, tokens each, pages and shape.

        Only what the host knows of it is set here; nothing is sent. The graph that runs, or the forward, moves lengths
        and slots on: `simplegraph.spec_decode.advance_step`.

        Args:
            seq_lens: (num_reqs,) whole numbers, tokens in each request's KV cache, this step's included.
            ahead: tokens beyond `seq_lens` that have to have pages, too.

        Raises:
            InputError: there are other numbers of requests; a request has become shorter, or longer than the pages that
                it was set with, `ahead` included; `ahead` is below 0; ranks share the context. The step is then what
                it was.
            ReplayError: no step is set.
        """
        if self.graphs.is_capturing():
            raise InputError("the batch was moved on inside a capture; do so before the graph is captured or replayed.")
        self._check_set()
        ahead = self._limits.check_ahead(ahead)
        batch = self.batch
        if self.share.size > 1:
            raise InputError("steps are set one by one where ranks share a context; call BatchMetadata.set.")
        if self._growth is None or self._growth.ahead != ahead:
            reach = self._growth.reach if self._growth else batch.seq_lens + batch.ahead
            self._growth = Growth(batch.seq_lens, reach, ahead, self.max_model_len)
        batch.seq_lens, batch.ahead, batch.behind = self._growth.checked(seq_lens), ahead, True
        batch.version += 1

    def follow(self, step: BatchState, num_reqs: int, ahead: int) -> None:
        """Expect a step that the device writes itself: one more token of each request of another metadata's step.

        Only what the host knows of it is set here, lengths and pages as far as they may go. The graph that runs, or the
        forward, writes the buffers from those of the other step.

        Args:
            step: what is followed; it was set with at least as much `ahead`.
            num_reqs: rows, and requests, of the graph that will run.
            ahead: how many tokens each request may grow by.

        Raises:
            CaptureSizeError: num_reqs is above the limits, or below the step's requests.
            InputError: the step was set with less `ahead`, or it is below 0.
        """
        ahead = self._limits.check_ahead(ahead)
        self._limits.check_shape(num_reqs, num_reqs)
        if num_reqs < step.num_reqs:
            raise CaptureSizeError(f"{step.num_reqs} requests are to be followed in a graph of {num_reqs}.")
        if ahead > step.ahead:
            raise InputError(f"the step that is followed was set with ahead={step.ahead}; {ahead} are needed.")
        batch, self._growth = self.batch, None
        batch.num_reqs = batch.num_tokens = step.num_reqs
        batch.max_query_len = 1
        batch.query_start_loc = self._one_each[: step.num_reqs + 1]
        batch.seq_lens = np.minimum(step.seq_lens + ahead, self._longest)
        batch.block_table = step.block_table
        batch.padded_tokens = batch.padded_reqs = num_reqs
        batch.ahead, batch.capturing, batch.behind = 0, False, True
        batch.version += 1

    def set_dummy(
        self, num_tokens: int, num_reqs: int | None = None, query_len: int | None = None, *, capturing: bool = False
    ) -> CommonMetadata:
        """Write a stand-in for a step of this shape: it reads page 0 and writes nothing.

        What a rank without requests runs, so that the collectives of the others find it.

        Args:
            num_tokens: rows of the graph.
            num_reqs: requests, with nothing in the cache before this step; as many as there can be by default.
            query_len: tokens of each; None spreads the rows as evenly as they go, up to max_model_len.
            capturing: it is for a warmup or a capture only: a replay after it is refused until a step is set.

        Returns:
            The buffers, seen in that shape.

        Raises:
            CaptureSizeError: the shape is above the limits.
            InputError: the requests do not fit into the rows, or `query_len` into max_model_len.
        """
        if self.graphs.is_capturing():
            raise InputError("a dummy batch was set inside a capture; set it before.")
        if num_reqs is None:
            num_reqs = min(num_tokens, self.max_num_reqs)
        self._limits.check_shape(num_tokens, num_reqs)
        most = self.max_model_len
        if num_reqs > num_tokens or (query_len is not None and not 1 <= query_len <= min(most, num_tokens // num_reqs)):
            raise InputError(
                f"a dummy batch of {num_reqs} requests, query_len={query_len}, in {num_tokens} rows; expected "
                f"num_reqs * query_len up to num_tokens, and query_len from 1 to max_model_len={most}."
            )
        even, rest = divmod(num_tokens, num_reqs)
        queries = np.full(num_reqs, query_len or even, np.int64)
        queries[: 0 if query_len else rest] += 1
        # A length above the model's limit would be scheduled out of bounds (vLLM #53658).
        np.minimum(queries, most, out=queries)
        starts = np.zeros(num_reqs + 1, np.int32)
        np.cumsum(queries, out=starts[1:])
        longest = int(queries.max())
        step = Step(
            slots=np.full(int(starts[-1]), -1, np.int64),
            query_start_loc=starts,
            # Something on every rank that shares the context, and no more than its pages hold.
            seq_lens=(-(-queries // self.share.size)).astype(np.int32),
            pages=np.zeros((num_reqs, -(-longest // self._limits.page_size)), np.int32),
        )
        self._put(step, num_tokens, num_reqs, longest, capturing=capturing)
        return self.view(num_tokens, num_reqs)

    def repeat(self) -> None:
        """Let the step that is set run once more: a benchmark's next round, or a second try.

        Raises:
            ReplayError: no step is set.
        """
        self._check_set()
        self.batch.version += 1

    def view(self, num_tokens: int, num_reqs: int) -> CommonMetadata:
        """The buffers seen in one padded shape; the same object each time, and the same addresses always.

        Raises:
            CaptureSizeError: the shape is above the limits.
        """
        known = self._views.get((num_tokens, num_reqs))
        if known is not None:
            return known
        self._limits.check_shape(num_tokens, num_reqs)
        fields = self._staging.fields
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        view = self._views[num_tokens, num_reqs] = CommonMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_start_loc=fields.query_start_loc[: num_reqs + 1],
            seq_lens=fields.seq_lens[:num_reqs],
            block_table=fields.block_table[:num_reqs],
            slot_mapping=fields.slot_mapping[:num_tokens],
            batch=self.batch,
        )
        return view

    def live(self, num_tokens: int, num_reqs: int | None = None) -> CommonMetadata:
        """The view of this shape, if the present step can run in it.

        Args:
            num_tokens: rows that are about to run.
            num_reqs: requests; by default those that the step was padded to.

        Raises:
            ReplayError: no step was set, or it was set for another shape.
        """
        batch = self.batch
        reqs = batch.padded_reqs if num_reqs is None else num_reqs
        self._check_set()
        if not (batch.num_tokens <= num_tokens <= batch.padded_tokens and batch.num_reqs <= reqs <= batch.padded_reqs):
            raise ReplayError(
                f"{num_tokens} tokens and {reqs} requests are about to run, but the batch was set as "
                f"{batch.num_tokens} tokens and {batch.num_reqs} requests, padded to {batch.padded_tokens} and "
                f"{batch.padded_reqs}. Pass the shape that will run to BatchMetadata.set, as num_tokens and num_reqs."
            )
        return self.view(num_tokens, reqs)

    def _check_set(self) -> None:
        if self.batch.version == 0 or self.batch.capturing:
            raise ReplayError(
                "no batch is set: there is none yet, or a warmup or a capture came after it. "
                "Call BatchMetadata.set before every step."
            )

    def _padded(self, request: Request, num_tokens: int | None, num_reqs: int | None) -> tuple[int, int]:
        """The padded shape, checked."""
        tokens, reqs = request.num_tokens, request.num_reqs
        padded_tokens = tokens if num_tokens is None else num_tokens
        self._limits.check_shape(padded_tokens, 1 if num_reqs is None else num_reqs)
        padded_reqs = num_reqs
        if padded_reqs is None:  # a graph that leaves them open reads as many as its rows could be
            padded_reqs = reqs if num_tokens is None else max(reqs, min(padded_tokens, self.max_num_reqs))
        if padded_tokens < tokens or padded_reqs < reqs:
            raise CaptureSizeError(
                f"the batch has {tokens} tokens and {reqs} requests, more than the {padded_tokens} and {padded_reqs} "
                "of the graph that is to run it; take the shape from the dispatcher's descriptor."
            )
        return padded_tokens, padded_reqs

    def _put(
        self,
        step: Step,
        num_tokens: int,
        num_reqs: int,
        max_query_len: int,
        *,
        ahead: int = 0,
        capturing: bool = False,
    ) -> None:
        self._staging.put(step, num_tokens, num_reqs)
        batch, self._growth = self.batch, None
        batch.num_reqs, batch.num_tokens = len(step.seq_lens), len(step.slots)
        batch.max_query_len = max_query_len
        batch.query_start_loc, batch.seq_lens, batch.block_table = step.query_start_loc, step.seq_lens, step.pages
        batch.padded_tokens, batch.padded_reqs = num_tokens, num_reqs
        batch.version += 1
        batch.ahead, batch.capturing, batch.behind = ahead, capturing, False
