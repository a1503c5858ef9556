"""The shape of a batch, which is the key of its graph, and the sizes that graphs are captured for."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import CaptureSizeError, InputError

DEFAULT_LARGEST = 512


@functools.total_ordering
@dataclasses.dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The shape of a batch, and the key of the graph captured for it. Orders by size.

    Attributes:
        num_tokens: rows of the batch, or tokens of all its requests together.
        num_reqs: requests in the batch; None if their number is unknown or does not matter. A graph for another number
            can hang in attention, so the number is part of the key (vLLM #35918).
        uniform_query_len: tokens of each request in a uniform decode batch; None for a mixed batch.
        num_active_loras: LoRA adapters in use.

    Raises:
        CaptureSizeError: the batch is empty.
        InputError: the numbers do not fit each other.
    """

    num_tokens: int
    num_reqs: int | None = None
    uniform_query_len: int | None = None
    num_active_loras: int = 0

    def __post_init__(self) -> None:
        if _int(self, "num_tokens") < 1:
            raise CaptureSizeError(f"num_tokens is {self.num_tokens}; a batch needs at least one token.")
        if _int(self, "num_active_loras") < 0:
            raise InputError(f"num_active_loras is {self.num_active_loras}; expected 0 or more.")
        if self.num_reqs is not None and not 1 <= _int(self, "num_reqs") <= self.num_tokens:
            raise InputError(
                f"num_reqs is {self.num_reqs} with num_tokens={self.num_tokens}; "
                "expected from 1 up to num_tokens, since a request in a batch has at least one token."
            )
        query_len = None if self.uniform_query_len is None else _int(self, "uniform_query_len")
        if query_len is not None and self.num_tokens != (self.num_reqs or 0) * query_len:
            raise InputError(
                f"uniform_query_len={query_len} with num_tokens={self.num_tokens} and num_reqs={self.num_reqs}; "
                "expected num_tokens == num_reqs * uniform_query_len. Leave uniform_query_len out for a mixed batch."
            )

    def __lt__(self, other: object) -> bool:
        return self._order() < other._order() if isinstance(other, BatchDescriptor) else NotImplemented

    def _order(self) -> tuple[int, int, int, int]:
        return self.num_tokens, self.num_reqs or 0, self.uniform_query_len or 0, self.num_active_loras

    def __str__(self) -> str:
        parts = [f"{self.num_tokens} tokens"]
        if self.num_reqs is not None:
            parts.append(f"{self.num_reqs} requests")
        if self.uniform_query_len is not None:
            parts.append(f"uniform decode of {self.uniform_query_len}")
        if self.num_active_loras:
            parts.append(f"{self.num_active_loras} LoRAs")
        return ", ".join(parts)


def _int(descriptor: BatchDescriptor, name: str) -> int:
    """Convert a field to a Python int, also from NumPy's integers, and return it."""
    value = getattr(descriptor, name)
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InputError(f"{name} is {value!r}; expected a whole number.")
        value = operator.index(value)
        object.__setattr__(descriptor, name, value)
    return value


def default_sizes(largest: int) -> tuple[int, ...]:
    """Return the default capture sizes: 1, 2, 4, multiples of 8 up to 256, multiples of 16 above.

    Args:
        largest: the largest size, in rows or tokens; it is in the list even if it is not on the grid.

    Raises:
        CaptureSizeError: `largest` is below 1.

    Source: the grid that vLLM and SGLang capture; 512 gives 51 sizes.
    """
    if not isinstance(largest, int) or isinstance(largest, bool) or largest < 1:
        raise CaptureSizeError(f"the batch size is {largest!r}; expected a whole number of at least 1.")
    grid = (1, 2, 4, *range(8, 257, 8), *range(272, largest + 1, 16))
    return (*(size for size in grid if size < largest), largest)


def mixed_sizes(config: CudaGraphConfig) -> tuple[int, ...]:
    """Return the sizes, in tokens, of graphs that serve any batch; ascending.

    These are the configuration's `capture_sizes`, or the default list up to 512 or `max_num_tokens`. With
    `exact_shapes` every call counts as one row.
    """
    if config.exact_shapes:
        return (1,)
    if config.capture_sizes is not None:
        return tuple(config.capture_sizes)
    return default_sizes(min(DEFAULT_LARGEST, config.max_num_tokens or DEFAULT_LARGEST))


def uniform_decode_sizes(config: CudaGraphConfig) -> tuple[int, ...]:
    """Return the sizes, in tokens, of graphs for uniform decode only; ascending multiples of `uniform_query_len`.

    Sizes above the largest possible decode batch are replaced by the size of that batch, even if it is not on the grid:
    otherwise batches just below the limit would have no graph.

    Source: vLLM #57355.
    """
    sizes: Iterable[int] | None = config.decode_capture_sizes
    if sizes is None:  # rounded up
        sizes = (-(-size // config.uniform_query_len) * config.uniform_query_len for size in mixed_sizes(config))
    limit = _largest_decode(config)
    return tuple(sorted({size if limit is None else min(size, limit) for size in sizes}))


def _largest_decode(config: CudaGraphConfig) -> int | None:
    """Return the number of tokens of the largest possible uniform decode batch; None if it has no bound."""
    query_len = config.uniform_query_len
    limits: list[int] = []
    if config.max_num_seqs is not None:
        limits.append(config.max_num_seqs * query_len)
    if config.max_num_tokens is not None:
        limits.append(config.max_num_tokens // query_len * query_len)
    return min(limits, default=None)


def padded_size(sizes: Sequence[int], size: int) -> int | None:
    """Return the smallest captured size that is at least `size`; None if there is none.

    >>> padded_size([1, 2, 4, 8], 3)
    4

    Args:
        sizes: the captured sizes, in rows or tokens, ascending.
        size: at least 1.
    """
    index = bisect.bisect_left(sizes, size)
    return sizes[index] if index < len(sizes) else None
