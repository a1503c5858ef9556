"""An acceptance that is set, for timing where drafts mean nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from simplegraph.spec_decode import Accepted


class MeanLength:
    """As many tokens a round as asked for on average, whatever the drafts are; on the device, and safe in graphs.

    Args:
        mean_length: tokens a round, the target's own included.
        max_num_seqs: requests that run at once.
        device: where.
    """

    def __init__(self, mean_length: float, max_num_seqs: int, device: torch.device) -> None:
        self._extra = mean_length - 1
        # What each slot has to its credit; begun apart, so that requests do not grow in step.
        self._due = torch.arange(max_num_seqs + 1, device=device) * 0.618 % 1

    def accept(self, drafts: Tensor, targets: Tensor, slots: Tensor) -> Accepted:
        """A round.

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
