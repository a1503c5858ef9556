"""The lengths, pages and slots of one step, which attention reads from buffers whose addresses never change.

The buffers hold one step at a time, so only one thread at a time may set and run steps.

metadata = BatchMetadata(max_num_tokens=8192, max_num_reqs=256, max_model_len=4096, page_size=16, device="cuda")
metadata.set([1, 1, 5], [312, 77, 5], [[3, 9, ...], ...], num_tokens=8, num_reqs=4)   # padded to the graph's shape
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from simplegraph.attention.metadata.batch_state import BatchState, CommonMetadata, ContextShare
from simplegraph.attention.metadata.step_arrays import Bounds, Ints, Pages, StepArrays, dummy_step, int64s, read_step
from simplegraph.base.errors import CaptureSizeError, InputError, ReplayError
from simplegraph.device.select import graph_device

_MAX_VIEWS = 4096  # views kept before the cache is cleared: eager batches come in any shape
_RING = 4  # copies that may be in flight before a write waits for the oldest one
_ALIGNED = 4  # int32 words, so that every field begins on 16 bytes


class BatchMetadata:
    """Persistent buffers for the metadata of one step at a time.

    Args:
        max_num_tokens: the most tokens a step can have, padding included.
        max_num_reqs: the most requests, padding included.
        max_model_len: the most tokens a request's KV cache can hold.
        page_size: tokens in a page.
        device: where attention runs.
        num_pages: pages of the cache; set by the backend.
        share: with context parallel ranks, the part of every sequence that is in this rank's cache. A page of the block
            table then has `page_size` tokens on each rank.
        window: the keys that a token sees, its own included (``sliding_window`` of models' configs); None if it sees
            all before it. Pages outside of the windows of a step's tokens are not in the buffers, where a request's
            length counts from its first page inside: no kernel reads them, and the engine may give them to others.

    Attributes:
        max_blocks: the most pages that a step reads of a request.
        max_seq_len: the most tokens that `CommonMetadata.seq_lens` can have; max_model_len without a window.
        batch: the current step on the host.
        graphs: the graph device of the buffers.

    Raises:
        ConfigError: a limit or the window is below 1, or context parallel ranks have a window.
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
        window: int | None = None,
    ) -> None:
        self.share = share or ContextShare()
        self.share.check(window)
        self._bounds = Bounds(max_num_tokens, max_num_reqs, max_model_len, page_size * self.share.size)
        self.max_num_tokens, self.max_num_reqs, self.max_model_len = max_num_tokens, max_num_reqs, max_model_len
        self.page_size, self.num_pages = page_size, num_pages
        buffered, self.window = self._bounds.of_window(window), window and min(window, max_model_len)
        self.max_blocks, self.max_seq_len = buffered.max_blocks, buffered.max_model_len
        self.batch = BatchState()
        self.graphs = graph_device(device)
        self.device = self.graphs.torch_device
        self._one_each = np.arange(max_num_reqs + 1, dtype=np.int32)
        self._longest = np.array(max_model_len, np.int32)  # an array, which numpy reads quicker than a number
        self._buffers = StepBuffers(buffered, self.device)
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
        """Write a step to the device, in the current stream's order; call before every step, outside the graph.

        Args:
            query_lens: (num_reqs,) integers, tokens of each request in this step; at least 1. A single int, which is
                faster, if all requests have the same number.
            seq_lens: (num_reqs,) integers, tokens in each request's KV cache, this step's included.
            block_table: the page ids of each request, in order: a sequence of sequences, or a (num_reqs, n) array or
                CPU tensor, which is much faster for many pages. Entries past a request's `seq_lens` plus `ahead`, and
                before its window, are ignored.
            num_tokens: rows of the graph that will run; by default the step's tokens.
            num_reqs: requests of the graph that will run; None if its descriptor has None.
            ahead: tokens beyond `seq_lens`, up to max_model_len, whose pages are copied to the device as well, for
                steps that are advanced there, such as those of a draft model.

        Returns:
            The buffers, viewed in the padded shape.

        Raises:
            CaptureSizeError: the batch is empty, or larger than the limits or the padded shape.
            InputError: the lengths or pages do not match; a request has several tokens with context parallel ranks;
                `ahead` is below 0, or above 0 with those or a window; called inside a capture. After an error the
                previous step is still in place.
        """
        if self.graphs.is_capturing():
            raise InputError("the batch was set inside a capture; set it before capture and before every replay.")
        ahead = self._bounds.check_ahead(ahead)
        step = read_step(query_lens, seq_lens, block_table, self._bounds, ahead)
        shape = self._bounds.padded(len(step.slots), len(step.seq_lens), num_tokens, num_reqs)
        if ahead:
            self._check_advances()
        step = step.from_window(self.window, self.page_size)
        step.check_pages(self.num_pages)
        if self.share.size > 1:
            step.check_single_tokens()
            step = step._replace(slots=self.share.slots(step.slots), seq_lens=self.share.lengths(step.seq_lens))
        return self._put(step, shape, ahead)

    def advance(self, seq_lens: Ints, *, ahead: int = 0) -> None:
        """Announce a step that the device derives from the current one: same requests, query lengths, pages and shape.

        This updates the host's record and copies nothing. The graph or forward that runs advances the lengths and slots
        on the device, by `simplegraph.spec_decode.advance_step`.

        Args:
            seq_lens: (num_reqs,) integers, tokens in each request's KV cache, this step's included.
            ahead: tokens beyond `seq_lens` that must have pages as well.

        Raises:
            InputError: the number of requests differs; a request became shorter, or with `ahead` longer than the pages
                it was set with; `ahead` is below 0; there are context parallel ranks or a window; called inside a
                capture. After an error the step is unchanged.
            ReplayError: no step is set.
        """
        if self.graphs.is_capturing():
            raise InputError("the batch was advanced inside a capture; advance it before the capture or replay.")
        self.batch.check_set()
        ahead = self._bounds.check_ahead(ahead)
        self._check_advances()
        self.batch.grow(int64s("seq_lens", seq_lens), ahead, self.max_model_len)

    def follow(self, step: BatchState, num_reqs: int, ahead: int) -> None:
        """Announce a step that the device writes itself: one more token for each request of another metadata's step.

        This updates the host's record alone, with the largest lengths and pages possible. The graph or forward that
        runs writes the buffers from those of the other step.

        Args:
            step: the step to follow; it was set with at least as much `ahead`.
            num_reqs: rows, and requests, of the graph that will run.
            ahead: the most tokens that each request may grow by.

        Raises:
            CaptureSizeError: num_reqs is above the limits, or below the step's requests.
            InputError: `ahead` is below 0, or above the `ahead` that the step was set with; ranks are context parallel,
                or there is a window.
        """
        self._check_advances()
        ahead = self._bounds.check_ahead(ahead)
        self._bounds.check_shape(num_reqs, num_reqs)
        if num_reqs < step.num_reqs:
            raise CaptureSizeError(f"the step to follow has {step.num_reqs} requests, the graph only {num_reqs}.")
        if ahead > step.ahead:
            raise InputError(f"the step to follow was set with ahead={step.ahead}; expected at least {ahead}.")
        lengths, starts = np.minimum(step.seq_lens + ahead, self._longest), self._one_each[: step.num_reqs + 1]
        self.batch.begin(step.num_reqs, starts, lengths, step.block_table, 1, (num_reqs, num_reqs))

    def set_dummy(
        self, num_tokens: int, num_reqs: int | None = None, query_len: int | None = None, *, capturing: bool = False
    ) -> CommonMetadata:
        """Write a dummy step of this shape, which reads page 0 and writes nothing to the cache.

        A rank without requests runs it, so that it takes part in the other ranks' collectives.

        Args:
            num_tokens: rows of the graph.
            num_reqs: requests, whose caches are empty before this step; by default the most possible.
            query_len: tokens of each request; None spreads the rows evenly, up to max_model_len each.
            capturing: True for a warmup or a capture: a replay is then refused until a step is set.

        Returns:
            The buffers, viewed in that shape.

        Raises:
            CaptureSizeError: the shape is above the limits.
            InputError: the requests do not fit into the rows, or `query_len` into max_model_len, or called inside a
                capture.
        """
        if self.graphs.is_capturing():
            raise InputError("a dummy batch was set inside a capture; set it before the capture.")
        if num_reqs is None:
            num_reqs = min(num_tokens, self.max_num_reqs)
        step = dummy_step(num_tokens, num_reqs, query_len, self._bounds, self.share.size)
        return self._put(step, (num_tokens, num_reqs), capturing=capturing)

    def repeat(self) -> None:
        """Allow the current step to run once more, for a benchmark's next round or a retry.

        Raises:
            ReplayError: no step is set.
        """
        self.batch.check_set()
        self.batch.version += 1

    def view(self, num_tokens: int, num_reqs: int) -> CommonMetadata:
        """Return the buffers, viewed in one padded shape; the addresses never change.

        Raises:
            CaptureSizeError: the shape is above the limits.
        """
        view = self._views.get((num_tokens, num_reqs))
        if view is not None:
            return view
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
        """Return the view of this shape if the current step can run in it.

        Args:
            num_tokens: rows that are about to run.
            num_reqs: requests; by default those that the step was padded to.

        Raises:
            ReplayError: no step was set, or it was set for another shape.
        """
        batch = self.batch
        reqs = batch.padded_reqs if num_reqs is None else num_reqs
        self.batch.check_set()
        if not (batch.num_tokens <= num_tokens <= batch.padded_tokens and batch.num_reqs <= reqs <= batch.padded_reqs):
            raise ReplayError(
                f"{num_tokens} tokens and {reqs} requests are about to run, but the batch was set as "
                f"{batch.num_tokens} tokens and {batch.num_reqs} requests, padded to {batch.padded_tokens} and "
                f"{batch.padded_reqs}. Pass the shape that will run to BatchMetadata.set, as num_tokens and num_reqs."
            )
        return self.view(num_tokens, reqs)

    def _check_advances(self) -> None:
        if self.share.size > 1 or self.window is not None:
            kind = "context parallel ranks" if self.window is None else "metadata with a window"
            raise InputError(f"{kind} cannot advance a step; expected ahead=0, and BatchMetadata.set for every step.")

    def _put(
        self, step: StepArrays, shape: tuple[int, int], ahead: int = 0, *, capturing: bool = False
    ) -> CommonMetadata:
        slots, starts, lengths, pages, most = step[:5]
        self._buffers.put((slots, starts, lengths, pages), *shape)
        self.batch.begin(len(slots), starts, lengths, pages, most, shape, ahead, capturing=capturing)
        return self.view(*shape)


@dataclasses.dataclass(eq=False)
class _Stage:
    """Host memory of one step, page-locked for a GPU.

    Attributes:
        fields: its slots, query starts, lengths and table.
        copied: the event of its last copy; None on a CPU.
        written: rows and columns of the table that are not 0.
        copies: number of requests -> target and source of the copy.
    """

    words: Tensor
    fields: list[npt.NDArray[Any]]
    copied: Any
    written: tuple[int, int] = (0, 0)
    copies: dict[int, tuple[Tensor, Tensor]] = dataclasses.field(default_factory=dict)


class StepBuffers:
    """The buffers of one step on the device, and a ring of host memory to copy from.

    Args:
        bounds: of the step.
        device: the device of the buffers.

    Attributes:
        slot_mapping: (max_num_tokens,) int64; query_start_loc: (max_num_reqs + 1,) int32; seq_lens: (max_num_reqs,)
            int32; block_table: (max_num_reqs, max_blocks) int32. All on the device, at addresses that never change.
    """

    def __init__(self, bounds: Bounds, device: torch.device) -> None:
        reqs, blocks = bounds.max_num_reqs, bounds.max_blocks
        lengths = (2 * bounds.max_num_tokens, reqs + 1, reqs)
        # The table comes last, so that one copy can leave out its unused rows.
        sizes = [*(-(-length // _ALIGNED) * _ALIGNED for length in lengths), reqs * blocks]
        self._table_start, self._max_blocks = sum(sizes[:3]), blocks
        on_gpu = device.type == "cuda"

        def fields(words: Tensor) -> list[Tensor]:
            parts = torch.split(words, sizes)
            rows = [part[:length] for part, length in zip(parts, lengths, strict=False)]
            return [rows[0].view(torch.int64), *rows[1:], parts[3].view(reqs, blocks)]

        def stage() -> _Stage:
            words = torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=on_gpu)
            copied = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
            return _Stage(words, [field.numpy() for field in fields(words)], copied)

        # Not inference tensors, even if built in inference mode: those refuse writes outside of it.
        with torch.inference_mode(False):
            self._words = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
            self.slot_mapping, self.query_start_loc, self.seq_lens, self.block_table = fields(self._words)
            self._ring = itertools.cycle([stage() for _ in range(_RING if on_gpu else 1)])

    def put(self, fields: Sequence[npt.NDArray[Any]], num_tokens: int, num_reqs: int) -> None:
        """Copy a step to the device, with its padding filled, in the current stream's order.

        Args:
            fields: the step's slots, query starts, lengths and pages; see `StepArrays`.
            num_tokens: rows of the padded shape.
            num_reqs: requests of the padded shape.
        """
        stage = next(self._ring)
        if stage.copied is not None:
            # Reusing memory whose copy is in flight is a race (mini-sglang #103).
            stage.copied.synchronize()
        slots, starts, lengths, table = stage.fields
        tokens, (reqs, width), (rows, columns) = len(fields[0]), fields[3].shape, stage.written
        if rows > reqs or columns > width:
            table[:rows, :columns] = 0
        slots[:tokens], starts[: reqs + 1], lengths[:reqs], table[:reqs, :width] = fields
        stage.written = (reqs, width)
        if tokens < num_tokens:
            slots[tokens:num_tokens] = -1
        if reqs < num_reqs:
            starts[reqs + 1 : num_reqs + 1] = tokens
            lengths[reqs:num_reqs] = 0
        if num_reqs not in stage.copies:
            end = self._table_start + num_reqs * self._max_blocks
            stage.copies[num_reqs] = (self._words[:end], stage.words[:end])
        target, source = stage.copies[num_reqs]
        target.copy_(source, non_blocking=True)
        if stage.copied is not None:
            stage.copied.record()
