"""The shape of a batch, which is the key of its graph."""

from __future__ import annotations

import dataclasses
import functools
import operator

from simplegraph.base.errors import CaptureSizeError, InputError


@functools.total_ordering
@dataclasses.dataclass(frozen=True, slots=True)
class BatchDescriptor:
    """The shape of a batch, and the key of the graph captured for it. Orders by size.

    Attributes:
        num_tokens: rows of the batch, or tokens of all its requests together.
        num_reqs: requests in it; None where they are unknown or do not matter. A graph captured for another
            count can hang in attention, so the count is part of the key (vLLM #35918).
        uniform_query_len: tokens of each request in a uniform decode batch; None for a mixed one.
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
    """Store the field as a Python int, from numpy's too, and return it."""
    value = getattr(descriptor, name)
    if type(value) is not int:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise InputError(f"{name} is {value!r}; expected a whole number.")
        value = operator.index(value)
        object.__setattr__(descriptor, name, value)
    return value
