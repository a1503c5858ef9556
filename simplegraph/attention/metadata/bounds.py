"""The bounds of a step: the sizes that its buffers are made for, and checks that a step fits them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simplegraph.base.errors import CaptureSizeError, ConfigError, InputError


def check_counts(**counts: int) -> None:
    """Refuse counts that are not whole numbers of at least 1.

    Raises:
        ConfigError: a count is invalid.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1.")


def check_layer(layer: int, known: Sequence[int]) -> None:
    """Refuse a layer that a cache does not have.

    Raises:
        InputError: it is not among the cache's layers.
    """
    if layer not in known:
        found = f"0 to {len(known) - 1}" if isinstance(known, range) else ", ".join(map(str, known))
        raise InputError(f"layer is {layer}; the cache has layers {found}.")


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The most that a step can hold; see `BatchMetadata`.

    Attributes:
        page_size: tokens in a page of the block table, over all context parallel ranks.
        page_starts: (max_blocks,) int64, the first position of each of a request's pages.
        numbers: (max_num_tokens or max_num_reqs,) int64, 0, 1, 2, ...

    Raises:
        ConfigError: a bound is below 1.
    """

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    page_size: int
    page_starts: npt.NDArray[np.int64] = dataclasses.field(init=False, repr=False, compare=False)
    numbers: npt.NDArray[np.int64] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_counts(max_num_tokens=self.max_num_tokens, max_num_reqs=self.max_num_reqs)
        check_counts(max_model_len=self.max_model_len, page_size=self.page_size)
        object.__setattr__(self, "page_starts", np.arange(self.max_blocks) * self.page_size)
        object.__setattr__(self, "numbers", np.arange(max(self.max_num_tokens, self.max_num_reqs)))

    @property
    def max_blocks(self) -> int:
        """The most pages a request can have."""
        return -(-self.max_model_len // self.page_size)

    def of_window(self, window: int | None) -> Bounds:
        """Return the bounds of a step whose requests begin with the first page of which a token sees a key.

        Raises:
            ConfigError: the window is below 1.
        """
        if window is None:
            return self
        check_counts(window=window)
        longest = window - 1 + self.max_num_tokens + self.page_size - 1
        return dataclasses.replace(self, max_model_len=min(self.max_model_len, longest))

    def check_shape(self, num_tokens: int, num_reqs: int) -> None:
        """Refuse a shape that the buffers cannot hold.

        Raises:
            CaptureSizeError: the shape is out of bounds, or empty.
            InputError: a value is no whole number.
        """
        if not type(num_tokens) is type(num_reqs) is int:
            for name, value in (("num_tokens", num_tokens), ("num_reqs", num_reqs)):
                if type(value) is not int and not isinstance(value, np.integer):
                    raise InputError(f"{name} is {value!r}; expected a whole number.")
        if not (1 <= num_tokens <= self.max_num_tokens and 1 <= num_reqs <= self.max_num_reqs):
            raise CaptureSizeError(
                f"{num_tokens} tokens and {num_reqs} requests; expected 1 to {self.max_num_tokens} tokens and 1 to "
                f"{self.max_num_reqs} requests. Split the batch, or build BatchMetadata with higher limits."
            )

    def check_ahead(self, ahead: int) -> int:
        """Return `ahead`, a number of tokens beyond each request's length, clipped to max_model_len.

        Raises:
            InputError: `ahead` is no whole number, or below 0.
        """
        if (type(ahead) is not int and not isinstance(ahead, np.integer)) or ahead < 0:
            raise InputError(f"ahead is {ahead!r}; expected a whole number of 0 or more.")
        return int(min(ahead, self.max_model_len))

    def padded(self, tokens: int, reqs: int, num_tokens: int | None, num_reqs: int | None) -> tuple[int, int]:
        """Find the shape that a step of `tokens` and `reqs` is padded to; see `BatchMetadata.set`.

        Raises:
            CaptureSizeError: the shape is out of bounds, or smaller than the step.
            InputError: a value is no whole number.
        """
        rows = tokens if num_tokens is None else num_tokens
        self.check_shape(rows, 1 if num_reqs is None else num_reqs)
        if num_reqs is None:  # a graph whose key has no requests reads the most that its rows could be
            num_reqs = reqs if num_tokens is None else max(reqs, min(rows, self.max_num_reqs))
        if rows < tokens or num_reqs < reqs:
            raise CaptureSizeError(
                f"the batch has {tokens} tokens and {reqs} requests, more than the {rows} and {num_reqs} of the graph "
                "that is to run it; take the shape from the dispatcher's descriptor."
            )
        return rows, num_reqs
