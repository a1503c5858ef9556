"""A fixed acceptance rate, for timing with drafts of random weights."""

from __future__ import annotations

import torch
from torch import Tensor

from simplegraph.spec_decode import Accepted


class MeanLength:
    """Accepts a given average number of tokens per round, regardless of the drafts; on the device, safe in graphs.

    Args:
        mean_length: tokens per round, the target's own included.
        max_num_seqs: requests that run at once.
        device: where.
    """

    def __init__(self, mean_length: float, max_num_seqs: int, device: torch.device) -> None:
        self._extra = mean_length - 1
        # Each slot's fraction of a token that is due; they start apart, so that requests do not grow in lockstep.
        self._due = torch.arange(max_num_seqs + 1, device=device) * 0.618 % 1

    def accept(self, drafts: Tensor, targets: Tensor, slots: Tensor) -> Accepted:
        """Accept drafts in one round.

        Args:
            drafts: (R, K) int64.
            targets: (R, K + 1) int64, the target's tokens.
            slots: (R,) int64.
        """
        due = self._due.index_select(0, slots) + self._extra
        counts = due.floor()
        self._due.index_copy_(0, slots, due - counts)
        place = torch.arange(drafts.shape[1], device=drafts.device)
        return Accepted.of(drafts, place < counts[:, None], targets)
