"""Lengths of steps that the device makes of one another, checked on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from simplegraph.attention.metadata.requests import Ints, int64s
from simplegraph.errors import InputError


class Growth:
    """The lengths of steps that the device makes of one another; see `BatchMetadata.advance`.

    Args:
        seq_lens: (num_reqs,) int32, of the step that they follow.
        reach: (num_reqs,), tokens that each request has pages for on the device, or max_model_len and more.
        ahead: tokens beyond each step's that need pages, up to max_model_len.
        max_model_len: no request is longer.
    """

    def __init__(
        self, seq_lens: npt.NDArray[np.int32], reach: npt.NDArray[Any], ahead: int, max_model_len: int
    ) -> None:
        self.reach, self.ahead = reach, ahead
        most = np.where(reach >= max_model_len, max_model_len, reach - ahead)
        self._most: npt.NDArray[np.int64] = most.astype(np.int64)
        self._lengths = seq_lens
        self._room = np.maximum(self._most - seq_lens, 0)

    def checked(self, seq_lens: Ints) -> npt.NDArray[np.int32]:
        """The next step's lengths.

        Raises:
            InputError: there are other numbers of requests; one has become shorter, or longer than its pages.
        """
        lengths = int64s("seq_lens", seq_lens)
        if len(lengths) != len(self._room):
            raise InputError(
                f"seq_lens has {len(lengths)} entries; the step that is set has {len(self._room)} requests."
            )
        room = self._most - lengths
        # Read without a sign, less than no room is more than there was before: one pass finds that, and what shrinks.
        wrong = room.view(np.uint64) > self._room.view(np.uint64)
        if np.logical_or.reduce(wrong):
            row = int(wrong.argmax())
            raise InputError(
                f"seq_lens[{row}] is {lengths[row]} after {self._lengths[row]}; expected no less, and at most "
                f"{self._most[row]}: its pages on the device hold so many with ahead={self.ahead}. Call "
                "BatchMetadata.set with more."
            )
        taken = lengths.astype(np.int32)
        self._room, self._lengths = room, taken
        return taken
