"""What attention reads of a step: lengths, pages and slots, in buffers whose addresses never change.

They hold one step at a time, so one thread at a time sets and runs steps.

metadata = BatchMetadata(max_num_tokens=8192, max_num_reqs=256, max_model_len=4096, page_size=16, device="cuda")
metadata.set([1, 1, 5], [312, 77, 5], [[3, 9, ...], ...], num_tokens=8, num_reqs=4)   # padded to the graph's shape
"""

from __future__ import annotations

import numpy as np
import torch

from simplegraph.attention.metadata.batch_state import BatchState, CommonMetadata, ContextShare
from simplegraph.attention.metadata.bounds import Bounds
from simplegraph.attention.metadata.reading import Ints, Pages, StepArrays, dummy_step, int64s, read_step
from simplegraph.attention.metadata.step_buffers import StepBuffers
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
        self._bounds = Bounds(max_num_tokens, max_num_reqs, max_model_len, page_size * self.share.size)
        self.max_num_tokens, self.max_num_reqs, self.max_model_len = max_num_tokens, max_num_reqs, max_model_len
        self.page_size, self.max_blocks, self.num_pages = page_size, self._bounds.max_blocks, num_pages
        self.debug = debug
        self.batch = BatchState()
        self.graphs = graph_device(device)
        self.device = self.graphs.torch_device
        self._one_each = np.arange(max_num_reqs + 1, dtype=np.int32)
        self._longest = np.array(max_model_len, np.int32)  # an array, which numpy reads quicker than a number
        self._buffers = StepBuffers(self._bounds, self.device)
        self._views: dict[tuple[int, int], CommonMetadata] = {}

    def set(
        self,
        query_lens: int | Ints,
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
        ahead = self._bounds.check_ahead(ahead)
        step = read_step(query_lens, seq_lens, block_table, self._bounds, ahead)
        shape = self._bounds.padded(len(step.slots), len(step.seq_lens), num_tokens, num_reqs)
        step.check_pages(self.num_pages)
        if self.share.size > 1:
            step.check_single_tokens()
            if ahead:
                raise InputError(f"ahead is {ahead}; no steps follow on the device where ranks share a context.")
            if self.debug:
                step.check_places(self._bounds.page_size)
            share = self.share
            step = step._replace(slots=share.slots(step.slots), seq_lens=share.lengths(step.seq_lens))
        elif self.debug:
            step.check_written_once(self._bounds, ahead)
        return self._put(step, shape, ahead)

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
        ahead = self._bounds.check_ahead(ahead)
        if self.share.size > 1:
            raise InputError("steps are set one by one where ranks share a context; call BatchMetadata.set.")
        self.batch.grow(int64s("seq_lens", seq_lens), ahead, self.max_model_len)

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
        ahead = self._bounds.check_ahead(ahead)
        self._bounds.check_shape(num_reqs, num_reqs)
        if num_reqs < step.num_reqs:
            raise CaptureSizeError(f"{step.num_reqs} requests are to be followed in a graph of {num_reqs}.")
        if ahead > step.ahead:
            raise InputError(f"the step that is followed was set with ahead={step.ahead}; {ahead} are needed.")
        lengths, starts = np.minimum(step.seq_lens + ahead, self._longest), self._one_each[: step.num_reqs + 1]
        self.batch.begin(step.num_reqs, starts, lengths, step.block_table, 1, (num_reqs, num_reqs), behind=True)

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
        step = dummy_step(num_tokens, num_reqs, query_len, self._bounds, self.share.size)
        return self._put(step, (num_tokens, num_reqs), capturing=capturing)

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
        self._bounds.check_shape(num_tokens, num_reqs)
        if len(self._views) >= _MAX_VIEWS:
            self._views.clear()
        view = self._views[num_tokens, num_reqs] = CommonMetadata(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            query_start_loc=self._buffers.query_start_loc[: num_reqs + 1],
            seq_lens=self._buffers.seq_lens[:num_reqs],
            block_table=self._buffers.block_table[:num_reqs],
            slot_mapping=self._buffers.slot_mapping[:num_tokens],
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

    def _put(
        self, step: StepArrays, shape: tuple[int, int], ahead: int = 0, *, capturing: bool = False
    ) -> CommonMetadata:
        slots, starts, lengths, pages, most = step
        self._buffers.put((slots, starts, lengths, pages), *shape)
        self.batch.begin(len(slots), starts, lengths, pages, most, shape, ahead, capturing=capturing)
        return self.view(*shape)
