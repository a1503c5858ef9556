"""Static inputs and padding, for the arms that hold graphs of their own."""

from __future__ import annotations

import bisect

from torch import Tensor

from bench.models.workload import INPUT_NAMES, PAD_VALUES, Batch


def padded_size(sizes: list[int], count: int) -> int:
    """Return the smallest of the ascending sizes that holds `count` requests.

    Raises:
        ValueError: none does.
    """
    index = bisect.bisect_left(sizes, count)
    if index == len(sizes):
        raise ValueError(f"a batch of {count} requests is above the largest size, {sizes[-1]}.")
    return sizes[index]


def fill(static: Batch, batch: tuple[Tensor, ...]) -> None:
    """Copy a batch into static inputs of at least its size, and set the rows behind it to padding."""
    count = batch[0].shape[0]
    for name, buffer, value in zip(INPUT_NAMES, static, batch, strict=True):
        buffer[:count].copy_(value)
        if count < buffer.shape[0]:
            buffer[count:].fill_(PAD_VALUES[name])


def rows(batch: Batch, count: int) -> Batch:
    """Return the first rows of every input, as views."""
    return tuple(tensor[:count] for tensor in batch)  # type: ignore[return-value]
