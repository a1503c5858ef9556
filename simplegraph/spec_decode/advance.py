"""Where the next tokens of each request go, worked out on the device from where its last ones are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simplegraph.attention.metadata.batch_state import CommonMetadata


class Upcoming(NamedTuple):
    """The steps that follow, the row of a step contiguous.

    Attributes:
        positions: (steps, R) int64.
        slots: (steps, R) int64, page * page_size + offset; -1 past a request's limit, and for padding.
        seq_lens: (steps, R) int32, tokens in the cache, the step's own included; at most the limit.
    """

    positions: Tensor
    slots: Tensor
    seq_lens: Tensor


def upcoming(
    positions: Tensor, limits: Tensor, block_table: Tensor, page_size: int, steps: int, max_model_len: int
) -> Upcoming:
    """Positions, slots and lengths of the next steps of one token for each request.

    A request may not go beyond the length that was set for it on the host, which is what it has pages for. A token
    past that is computed for nothing, and its key and value are not written.

    Args:
        positions: (R,) int64, of each request's last token.
        limits: (R,) int32, tokens of each request that there are pages for; 0 for padding.
        block_table: (R, n) int32, the pages up to them.
        page_size: tokens in a page.
        steps: how many.
        max_model_len: positions are below this.
    """
    ahead = torch.arange(1, steps + 1, device=positions.device)
    after = positions + ahead[:, None]
    column = (after // page_size).clamp(max=block_table.shape[1] - 1)
    page = block_table.gather(1, column.T).T.long()
    slots = torch.where(after < limits, page * page_size + after % page_size, -1)
    seq_lens = torch.minimum(after + 1, limits).int()
    return Upcoming(after.clamp(max=max_model_len - 1), slots, seq_lens)


def advance_step(live: CommonMetadata, grown: Tensor, query_len: int, page_size: int) -> Tensor:
    """Make of a step the one after it, where `BatchMetadata.advance` announced that; graph-safe.

    Args:
        live: the step, of `query_len` tokens for each request; its lengths and slots are written.
        grown: (R,) int64, tokens by which each request has become longer; 0 where length and slots stay: of a step that
            the host has set, and for padding.
        query_len: tokens of each request.
        page_size: tokens in a page.

    Returns:
        (R, query_len) int64, the positions of the step's tokens; from 0 on for padding.
    """
    live.seq_lens.add_(grown)
    place = torch.arange(-query_len, 0, device=grown.device)
    positions = (live.seq_lens[:, None] + place).clamp_(min=0)
    column = (positions // page_size).clamp_(max=live.block_table.shape[1] - 1)
    slots = live.block_table.gather(1, column) * page_size + positions % page_size
    known = live.slot_mapping.view(-1, query_len)
    torch.where(grown[:, None] > 0, slots, known, out=known)
    return positions


def follow(live: CommonMetadata, step: CommonMetadata, steps: int, max_model_len: int) -> Tensor:
    """Write the pages and query starts of steps of one token that follow another step.

    Args:
        live: where they are written.
        step: what is followed, seen with as many requests.
        steps: tokens that each request may grow by.
        max_model_len: no request grows beyond this.

    Returns:
        (R,) int32, tokens of each request that there are pages for; 0 for padding.
    """
    real = step.seq_lens > 0
    live.block_table.copy_(step.block_table)
    count = torch.arange(live.num_reqs + 1, dtype=torch.int32, device=real.device)
    live.query_start_loc.copy_(torch.minimum(count, real.sum(dtype=torch.int32)))
    return torch.where(real, (step.seq_lens + steps).clamp(max=max_model_len), 0)
