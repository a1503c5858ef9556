"""Computes the positions and slots of each request's next tokens on the device, from those of its last ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simplegraph.attention.metadata.batch_state import CommonMetadata


class Upcoming(NamedTuple):
    """The next steps, with the row of each step contiguous.

    Attributes:
        positions: (steps, R) int64.
        slots: (steps, R) int64, page * page_size + offset; -1 past a request's limit, and for padding.
        seq_lens: (steps, R) int32, tokens in the cache, that step's token included; at most the limit.
    """

    positions: Tensor
    slots: Tensor
    seq_lens: Tensor


def upcoming(
    positions: Tensor, limits: Tensor, block_table: Tensor, page_size: int, steps: int, max_model_len: int
) -> Upcoming:
    """Compute positions, slots and lengths of the next steps, which have one token for each request.

    A request has pages up to its limit only. The keys and values of tokens past it are not written, and their results
    are meaningless.

    Args:
        positions: (R,) int64, of each request's last token.
        limits: (R,) int32, tokens of each request that there are pages for; 0 for padding.
        block_table: (R, n) int32, page ids up to the limits.
        page_size: tokens in a page.
        steps: number of steps.
        max_model_len: positions are clipped below this.
    """
    ahead = torch.arange(1, steps + 1, device=positions.device)
    after = positions + ahead[:, None]
    column = (after // page_size).clamp(max=block_table.shape[1] - 1)
    page = block_table.gather(1, column.T).T.long()
    slots = torch.where(after < limits, page * page_size + after % page_size, -1)
    seq_lens = torch.minimum(after + 1, limits).int()
    return Upcoming(after.clamp(max=max_model_len - 1), slots, seq_lens)


def advance_step(live: CommonMetadata, grown: Tensor, query_len: int, page_size: int) -> Tensor:
    """Turn a step into the next one, after `BatchMetadata.advance` has announced it; graph-safe.

    Args:
        live: the step, with `query_len` tokens for each request; its lengths and slots are written.
        grown: (R,) int64, tokens by which each request has become longer; 0 leaves length and slots unchanged, for
            padding and for steps that the host has set.
        query_len: tokens of each request.
        page_size: tokens in a page.

    Returns:
        (R, query_len) int64, the positions of the step's tokens; starting at 0 for padding.
    """
    live.seq_lens.add_(grown)
    place = torch.arange(-query_len, 0, device=grown.device)
    positions = (live.seq_lens[:, None] + place).clamp_(min=0)
    column = (positions // page_size).clamp_(max=live.block_table.shape[1] - 1)
    slots = live.block_table.gather(1, column) * page_size + positions % page_size
    slot_mapping = live.slot_mapping.view(-1, query_len)
    torch.where(grown[:, None] > 0, slots, slot_mapping, out=slot_mapping)
    return positions


def follow(live: CommonMetadata, step: CommonMetadata, steps: int, max_model_len: int) -> Tensor:
    """Write the pages and query starts of the one-token steps that follow another step.

    Args:
        live: the metadata to write.
        step: the step to follow, viewed with the same number of requests.
        steps: tokens that each request may grow by.
        max_model_len: the most tokens of a request.

    Returns:
        (R,) int32, tokens of each request that there are pages for; 0 for padding.
    """
    real = step.seq_lens > 0
    live.block_table.copy_(step.block_table)
    count = torch.arange(live.num_reqs + 1, dtype=torch.int32, device=real.device)
    live.query_start_loc.copy_(torch.minimum(count, real.sum(dtype=torch.int32)))
    return torch.where(real, (step.seq_lens + steps).clamp(max=max_model_len), 0)
