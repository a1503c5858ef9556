"""What a step is: on the host, and seen on the device in one padded shape."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclasses.dataclass(eq=False)
class BatchState:
    """What the present step is, on the host. Its arrays are the step's own: they are not written to again.

    Attributes:
        num_reqs, num_tokens: how many there really are.
        max_query_len: the longest.
        query_start_loc: (num_reqs + 1,) int32, where each request's tokens begin.
        seq_lens: (num_reqs,) int32, tokens in each request's KV cache, this step's included; of context parallel ranks
            those that are in this rank's.
        block_table: (num_reqs, width) int32, page ids; 0 where a request needs no page.
        padded_tokens, padded_reqs: the shape that the buffers are padded to.
        ahead: tokens beyond `seq_lens` that each request has pages for, or up to max_model_len.
        version: counts the steps, so that a backend can tell whether it planned for this one.
        capturing: whether it only stands in for a step, in a warmup or a capture.
        behind: whether lengths and slots on the device are those of the step before, until the graph moves them on.
    """

    num_reqs: int = 0
    num_tokens: int = 0
    max_query_len: int = 0
    query_start_loc: npt.NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))
    seq_lens: npt.NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    block_table: npt.NDArray[np.int32] = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.int32))
    padded_tokens: int = 0
    padded_reqs: int = 0
    ahead: int = 0
    version: int = 0
    capturing: bool = False
    behind: bool = False

    @property
    def max_seq_len(self) -> int:
        """The longest of `seq_lens`."""
        return int(self.seq_lens.max(initial=0))

    @property
    def query_lens(self) -> set[int]:
        """The different numbers of tokens that requests have in this step; one in uniform decode."""
        if self.num_reqs * self.max_query_len == self.num_tokens:
            return {self.max_query_len}
        return {int(length) for length in np.unique(np.diff(self.query_start_loc))}

    def has_query_len(self, query_len: int) -> bool:
        """Whether every request has so many tokens in this step."""
        return self.max_query_len == query_len and self.num_reqs * query_len == self.num_tokens


@dataclasses.dataclass(frozen=True, eq=False)
class CommonMetadata:
    """A step's metadata on the device, seen in one padded shape.

    Attributes:
        num_reqs, num_tokens: the padded shape.
        query_start_loc: (num_reqs + 1,) int32; from the last real request on, the number of real tokens.
        seq_lens: (num_reqs,) int32, tokens in each request's KV cache, this step's included; 0 where padded. Of context
            parallel ranks those that are in this rank's, which may be none (vLLM's ``dcp_local_seq_lens``).
        block_table: (num_reqs, max_blocks) int32, page ids; 0 where padded or not needed.
        slot_mapping: (num_tokens,) int64, where each token's key and value go; -1 where padded, or another rank's.
        batch: the present step on the host, shared by all views.
    """

    num_reqs: int
    num_tokens: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    batch: BatchState
