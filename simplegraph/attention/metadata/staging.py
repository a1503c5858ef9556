"""How a step's metadata travels to the device: one buffer there, a ring of them here, one copy a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_RING = 4  # steps that may be on their way at once before a write waits for the oldest copy
_ALIGNED = 4  # int32 words, so that every field begins on 16 bytes


class Extent(NamedTuple):
    """How much the buffers hold."""

    max_num_tokens: int
    max_num_reqs: int
    max_blocks: int

    @property
    def table_start(self) -> int:
        """Where the block table begins, in int32 words; it comes last, since a step uses some of its rows."""
        return 2 * _aligned(self.max_num_tokens) + _aligned(self.max_num_reqs + 1) + _aligned(self.max_num_reqs)

    @property
    def words(self) -> int:
        return self.table_start + self.max_num_reqs * self.max_blocks


class Fields(NamedTuple):
    """The parts of a buffer of int32 words.

    Attributes:
        slot_mapping: (max_num_tokens,) int64.
        query_start_loc: (max_num_reqs + 1,) int32.
        seq_lens: (max_num_reqs,) int32.
        block_table: (max_num_reqs, max_blocks) int32.
    """

    slot_mapping: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor

    @classmethod
    def of(cls, words: Tensor, extent: Extent) -> Fields:
        tokens, reqs, blocks = extent
        first = 2 * _aligned(tokens)
        second = first + _aligned(reqs + 1)
        return cls(
            words[: 2 * tokens].view(torch.int64),
            words[first : first + reqs + 1],
            words[second : second + reqs],
            words[extent.table_start :].view(reqs, blocks),
        )


class Step(NamedTuple):
    """One step's values, of real length.

    Attributes:
        slots: (num_tokens,) int64.
        query_start_loc: (num_reqs + 1,) int32.
        seq_lens: (num_reqs,) int32.
        pages: (num_reqs, width) int32, 0 where a request needs no page.
    """

    slots: npt.NDArray[np.int64]
    query_start_loc: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    pages: npt.NDArray[np.int32]


class Stage:
    """Host memory for one step, page-locked for a GPU.

    Args:
        extent: how much it holds.
        device: where it is copied to.
    """

    def __init__(self, extent: Extent, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._words = torch.zeros(extent.words, dtype=torch.int32, pin_memory=on_gpu)
        self._extent = extent
        fields = Fields.of(self._words, extent)
        self._slots, self._starts, self._lengths, self._table = (field.numpy() for field in fields)
        self._written = (0, 0)  # rows and columns of the table that are not 0
        self._copied: Any = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, step: Step, num_tokens: int, num_reqs: int) -> None:
        """Write a step padded to a shape, every padded place included."""
        if self._copied is not None:
            # Reusing memory whose copy is in flight is a race (mini-sglang #103).
            self._copied.synchronize()
        tokens, reqs = len(step.slots), len(step.seq_lens)
        self._slots[:tokens] = step.slots
        self._starts[: reqs + 1] = step.query_start_loc
        self._lengths[:reqs] = step.seq_lens
        if tokens < num_tokens:
            self._slots[tokens:num_tokens] = -1
        if reqs < num_reqs:
            self._starts[reqs + 1 : num_reqs + 1] = step.query_start_loc[-1]
            self._lengths[reqs:num_reqs] = 0
        (rows, columns), width = self._written, step.pages.shape[1]
        if rows > reqs or columns > width:
            self._table[:rows, :columns] = 0
        self._table[:reqs, :width] = step.pages
        self._written = (reqs, width)

    def send(self, words: Tensor, num_reqs: int) -> None:
        """Copy everything up to the last row of the table that is used, in one go."""
        copy = self._copies.get(num_reqs)
        if copy is None:
            end = self._extent.table_start + num_reqs * self._extent.max_blocks
            copy = self._copies[num_reqs] = (words[:end], self._words[:end])
        target, source = copy
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class Staging:
    """The device's buffer and the ring of host memory it is filled from.

    Attributes:
        fields: the parts of the device's buffer, at addresses that never change.
    """

    def __init__(self, extent: Extent, device: torch.device) -> None:
        # Not inference tensors, wherever this is made: those refuse writes from other modes.
        with torch.inference_mode(False):
            self._words = torch.zeros(extent.words, dtype=torch.int32, device=device)
            self.fields = Fields.of(self._words, extent)
            self._stages = [Stage(extent, device) for _ in range(_RING if device.type == "cuda" else 1)]
        self._next = 0

    def put(self, step: Step, num_tokens: int, num_reqs: int) -> None:
        """Bring a step to the device, padded to a shape, in the order of the current stream."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % len(self._stages)
        stage.write(step, num_tokens, num_reqs)
        stage.send(self._words, num_reqs)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
