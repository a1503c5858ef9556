"""The current step on the host, its padded view on the device, and a context parallel rank's share of it."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from simplegraph.base.errors import ConfigError, InputError, ReplayError

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]


@dataclasses.dataclass(eq=False)
class BatchState:
    """The current step on the host. Its arrays are never written to again; a new step brings new ones.

    Attributes:
        num_reqs, num_tokens: real requests and tokens, without padding.
        max_query_len: the most tokens of a request in this step.
        query_start_loc: (num_reqs + 1,) int32, where each request's tokens begin.
        seq_lens: (num_reqs,) int32, tokens in each request's KV cache, this step's included; with context parallel
            ranks, those in this rank's cache; with a window, those from the first page of `block_table` on.
        block_table: (num_reqs, width) int32, page ids; 0 where a request needs no page.
        padded_tokens, padded_reqs: the shape that the buffers are padded to.
        ahead: tokens beyond `seq_lens`, up to max_model_len in all, that each request has pages for.
        version: counts the steps, so that a backend knows whether it has run this one.
        capturing: True for the dummy step of a warmup or a capture.
    """

    num_reqs: int = 0
    num_tokens: int = 0
    max_query_len: int = 0
    query_start_loc: _Int32s = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))
    seq_lens: _Int32s = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    block_table: _Int32s = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int32))
    padded_tokens: int = 0
    padded_reqs: int = 0
    ahead: int = 0
    version: int = 0
    capturing: bool = False
    # (num_reqs,): tokens that each request has pages for on the device; set by `begin`.
    _reach: _Int32s | None = dataclasses.field(default=None, init=False, repr=False)
    # The last `ahead` of `grow`; for it the most tokens of each request, and how many each may still grow by.
    _growth: tuple[int, _Int64s, _Int64s] | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def query_lens(self) -> set[int]:
        """The distinct numbers of tokens that requests have in this step; a single one in uniform decode."""
        return {int(length) for length in np.unique(np.diff(self.query_start_loc))}

    def has_query_len(self, query_len: int) -> bool:
        """True if every request has `query_len` tokens in this step."""
        return self.max_query_len == query_len and self.num_reqs * query_len == self.num_tokens

    def check_set(self) -> None:
        """Refuse to go on without a step.

        Raises:
            ReplayError: no step is set.
        """
        if self.version == 0 or self.capturing:
            raise ReplayError(
                "no batch is set: none was set yet, or a warmup or capture replaced it. "
                "Call BatchMetadata.set before every step."
            )

    def begin(
        self,
        num_tokens: int,
        query_start_loc: _Int32s,
        seq_lens: _Int32s,
        block_table: _Int32s,
        max_query_len: int,
        padded: tuple[int, int],
        ahead: int = 0,
        *,
        capturing: bool = False,
    ) -> None:
        """Switch to a new step, whose data the buffers hold."""
        self.num_reqs, self.num_tokens, self.max_query_len = len(seq_lens), num_tokens, max_query_len
        self.query_start_loc, self.seq_lens, self.block_table = query_start_loc, seq_lens, block_table
        self.padded_tokens, self.padded_reqs = padded
        self.ahead, self.capturing = ahead, capturing
        self._reach = self._growth = None
        self.version += 1

    def grow(self, lengths: _Int64s, ahead: int, max_model_len: int) -> None:
        """Switch to the step that the device derives from this one; see `BatchMetadata.advance`.

        Raises:
            InputError: the number of requests differs; a request became shorter, or longer than its pages.
        """
        if len(lengths) != self.num_reqs:
            raise InputError(f"seq_lens has {len(lengths)} entries; the step that is set has {self.num_reqs} requests.")
        if self._reach is None:
            self._reach = self.seq_lens + self.ahead
        if self._growth is None or self._growth[0] != ahead:
            most = np.where(self._reach >= max_model_len, max_model_len, self._reach - ahead).astype(np.int64)
            self._growth = ahead, most, np.maximum(most - self.seq_lens, 0)
        _, most, room_before = self._growth
        room = most - lengths
        # Viewed as unsigned, negatives are huge, so one comparison catches requests that are too long or shrank.
        wrong = room.view(np.uint64) > room_before.view(np.uint64)
        if np.logical_or.reduce(wrong):
            row = int(wrong.argmax())
            raise InputError(
                f"seq_lens[{row}] is {lengths[row]} after {self.seq_lens[row]}; expected no less, and at most "
                f"{most[row]}, which its pages on the device hold with ahead={ahead}. Call BatchMetadata.set with "
                "more pages."
            )
        self._growth = ahead, most, room
        self.seq_lens, self.ahead = lengths.astype(np.int32), ahead
        self.version += 1


@dataclasses.dataclass(frozen=True, eq=False)
class CommonMetadata:
    """A step's metadata on the device, viewed in one padded shape.

    Attributes:
        num_reqs, num_tokens: the padded shape.
        query_start_loc: (num_reqs + 1,) int32, where each request's tokens begin; for padding the number of real
            tokens.
        seq_lens: (num_reqs,) int32, tokens in each request's KV cache, this step's included; 0 for padding. With
            context parallel ranks those in this rank's cache, possibly 0 (vLLM's ``dcp_local_seq_lens``); with a window
            those from the first page of `block_table` on.
        block_table: (num_reqs, max_blocks) int32, page ids; 0 for padding and entries past a request's pages. With a
            window a row begins with the first page of which one of the request's tokens sees a key.
        slot_mapping: (num_tokens,) int64, the slot that each token's key and value are written to; -1 for padding and
            for tokens of other ranks.
        batch: the current step on the host, shared by all views.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    batch: BatchState


class ContextShare(NamedTuple):
    """The tokens of every sequence that are in this rank's cache when context parallel ranks share them.

    The rank holds every ``size``-th token, beginning with token ``rank``, so that ranks differ by one token at most. A
    page of the block table has ``page_size * size`` tokens, ``page_size`` of them in the page of that id on each rank:
    one block table serves all ranks.

    Args:
        rank: this rank's number.
        size: the number of ranks.
    """

    rank: int = 0
    size: int = 1

    def check(self, window: int | None = None) -> None:
        """Refuse a rank outside 0 to size - 1, and several ranks with a window.

        Raises:
            ConfigError: there is no such rank, or a window would be cut between ranks.
        """
        if window is not None and self.size > 1:
            raise ConfigError(f"{self.size} context parallel ranks with window={window}; expected window=None.")
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"share is {self}; expected a rank from 0 to size - 1.")

    def lengths(self, seq_lens: _Int32s) -> _Int32s:
        """Count the tokens of each sequence that are in this rank's cache."""
        lengths: _Int32s = (seq_lens + np.int32(self.size - 1 - self.rank)) // np.int32(self.size)
        return lengths

    def slots(self, slots: _Int64s) -> _Int64s:
        """Find where this rank writes each token; -1 for those of other ranks."""
        return np.where(slots % self.size == self.rank, slots // self.size, -1)
