"""The device buffers of one step, and the host memory that they are filled from with one copy per step."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from simplegraph.attention.metadata.bounds import Bounds

_RING = 4  # copies that may be in flight before a write waits for the oldest one
_ALIGNED = 4  # int32 words, so that every field begins on 16 bytes


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
