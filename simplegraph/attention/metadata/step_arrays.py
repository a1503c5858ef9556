"""Reads an engine's description of a step into arrays, and checks it against its bounds before anything is written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from simplegraph.base.errors import CaptureSizeError, ConfigError, InputError

Ints = Sequence[int] | Tensor | npt.NDArray[Any]
Pages = Sequence[Ints] | Tensor | npt.NDArray[Any]

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]
_INT64 = np.dtype(np.int64)
_INT32_MAX = int(np.iinfo(np.int32).max)


def check_counts(**counts: int) -> None:
    """Refuse counts that are not whole numbers of at least 1.

    Raises:
        ConfigError: a count is invalid.
    """
    for name, value in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1.")


def check_layer(layer: int, layers: Sequence[int]) -> None:
    """Refuse a layer that a cache does not have.

    Raises:
        InputError: it is not among the cache's layers.
    """
    if layer not in layers:
        listed = f"0 to {len(layers) - 1}" if isinstance(layers, range) else ", ".join(map(str, layers))
        raise InputError(f"layer is {layer}; the cache has layers {listed}.")


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


class StepArrays(NamedTuple):
    """One step on the host, without padding.

    Attributes:
        slots: (num_tokens,) int64, the slot that each token's key and value are written to.
        query_start_loc: (num_reqs + 1,) int32, where each request's tokens begin.
        seq_lens: (num_reqs,) int32, tokens in each request's KV cache, this step's included.
        pages: (num_reqs, width) int32, page ids; 0 where a request needs no page.
        max_query_len: the most tokens of a request.
        dropped: (num_reqs,) int32, pages that were left out in front of each row of `pages`; None for none.
    """

    slots: _Int64s
    query_start_loc: _Int32s
    seq_lens: _Int32s
    pages: _Int32s
    max_query_len: int
    dropped: _Int32s | None = None

    def from_window(self, window: int | None, page_size: int) -> StepArrays:
        """Return the step as if each request began with the first page of which one of its tokens sees a key.

        Slots stay. Distances between tokens stay too, which are all that attention with a window depends on.
        """
        if window is None:
            return self
        first = self.seq_lens - np.diff(self.query_start_loc) - np.int32(window - 1)
        dropped = np.maximum(first, 0) // np.int32(page_size)
        lengths = self.seq_lens - dropped * np.int32(page_size)
        columns = np.arange(-(-int(np.maximum.reduce(lengths)) // page_size)) + dropped[:, None]
        inside = columns < self.pages.shape[1]  # rows with fewer pages than the longest are filled up with 0
        pages = np.take_along_axis(self.pages, np.where(inside, columns, 0), 1) * inside
        return self._replace(seq_lens=lengths, pages=pages, dropped=dropped)

    def check_pages(self, num_pages: int | None) -> None:
        """Refuse page ids that the cache does not have.

        Raises:
            InputError: a page id is out of range.
        """
        pages, end = self.pages, _INT32_MAX if num_pages is None else num_pages
        # Viewed as unsigned, negatives are huge, so one comparison catches both.
        if np.maximum.reduce(pages.view(np.uint32), axis=None) >= end:
            row, column = (int(i) for i in np.argwhere((pages < 0) | (pages >= end))[0])
            last = "the cache's last" if num_pages is None else num_pages - 1
            place = column if self.dropped is None else column + int(self.dropped[row])
            raise InputError(
                f"block_table[{row}][{place}] is {pages[row, column]}; expected a page id from 0 to {last}."
            )

    def check_single_tokens(self) -> None:
        """Refuse requests of several tokens: each token would see a different part of a rank's share.

        Raises:
            InputError: a request has several tokens.
        """
        if self.max_query_len > 1:
            raise InputError(
                f"query_lens[{int(np.argmax(np.diff(self.query_start_loc)))}] is {self.max_query_len}; context "
                "parallel ranks take one token per request. Pass a prompt's tokens as separate requests with the same "
                "pages, each with the length up to itself: keys and values are written before any of them attends."
            )


def read_step(query_lens: int | Ints, seq_lens: Ints, block_table: Pages, bounds: Bounds, ahead: int = 0) -> StepArrays:
    """Read an engine's description of a step into new arrays; see `BatchMetadata.set`.

    Raises:
        CaptureSizeError: there is no request, or more tokens or requests than the bounds.
        InputError: the lengths or pages do not match.
    """
    # Uses as few numpy calls as possible: each takes a microsecond or two, and thirty would be a tenth of a step.
    lengths = int64s("seq_lens", seq_lens)
    if type(query_lens) is int and 1 <= query_lens <= bounds.max_model_len:
        reqs, most, before = len(lengths), query_lens, lengths - query_lens
        # Viewed as unsigned, negatives are huge, so one comparison catches them and lengths that are too long.
        most_before = int(np.maximum.reduce(before.view(np.uint64))) if reqs else 0
        if reqs == 0 or most_before > bounds.max_model_len - most:
            _check_lengths(np.full(reqs, most, np.int64), lengths, bounds)
        longest, num_tokens = most_before + most, reqs * most
        bounds.check_shape(num_tokens, reqs)
        starts = np.arange(0, num_tokens + 1, most, dtype=np.int32)
    else:
        # A single invalid number gets the same errors as a sequence.
        queries = int64s("query_lens", [query_lens] * len(lengths) if isinstance(query_lens, int) else query_lens)
        before, longest = _check_lengths(queries, lengths, bounds)
        reqs, most = len(queries), int(np.maximum.reduce(queries))
        ends = np.add.accumulate(queries)
        num_tokens = int(ends[-1])
        bounds.check_shape(num_tokens, reqs)
        starts = np.zeros(reqs + 1, np.int32)
        starts[1:] = ends
    pages = _needed_pages(block_table, lengths, longest, bounds, ahead)
    rows = bounds.numbers[:reqs] * pages.shape[1]
    if most * reqs == num_tokens:
        rows, position = rows[:, None], before[:, None] + bounds.numbers[:most]
    else:
        rows = np.repeat(rows, queries)
        position = bounds.numbers[:num_tokens] + np.repeat(lengths - ends, queries)
    page, slots = np.divmod(position, bounds.page_size)
    page += rows
    slots += np.multiply(pages.take(page), bounds.page_size, dtype=np.int64)
    return StepArrays(slots.ravel(), starts, lengths.astype(np.int32), pages, most)


def dummy_step(num_tokens: int, num_reqs: int, query_len: int | None, bounds: Bounds, ranks: int) -> StepArrays:
    """Make a step that reads page 0 and writes nothing; see `BatchMetadata.set_dummy`.

    Raises:
        CaptureSizeError: the shape is out of bounds.
        InputError: the requests do not fit into the rows, or `query_len` into max_model_len.
    """
    bounds.check_shape(num_tokens, num_reqs)
    most = bounds.max_model_len
    if num_reqs > num_tokens or (query_len is not None and not 1 <= query_len <= min(most, num_tokens // num_reqs)):
        raise InputError(
            f"a dummy batch of {num_reqs} requests, query_len={query_len}, in {num_tokens} rows; expected "
            f"num_reqs * query_len up to num_tokens, and query_len from 1 to max_model_len={most}."
        )
    even, remainder = divmod(num_tokens, num_reqs) if query_len is None else (query_len, 0)
    queries = np.full(num_reqs, even, np.int64)
    queries[:remainder] += 1
    # A length above the model's limit would be scheduled out of bounds (vLLM #53658).
    np.minimum(queries, most, out=queries)
    starts = np.zeros(num_reqs + 1, np.int32)
    np.cumsum(queries, out=starts[1:])
    longest = int(queries[0])
    return StepArrays(
        slots=np.full(int(starts[-1]), -1, np.int64),
        query_start_loc=starts,
        # At least one token on every context parallel rank, and no more than its pages hold.
        seq_lens=(-(-queries // ranks)).astype(np.int32),
        pages=np.zeros((num_reqs, -(-longest // bounds.page_size)), np.int32),
        max_query_len=longest,
    )


def _check_lengths(queries: _Int64s, lengths: _Int64s, bounds: Bounds) -> tuple[_Int64s, int]:
    """Check lengths; return the tokens that each request had in the cache before this step, and the longest length."""
    if len(queries) == 0:
        raise CaptureSizeError("the batch is empty; a step needs at least one request (set_dummy needs none).")
    if len(queries) != len(lengths):
        raise InputError(
            f"query_lens has {len(queries)} entries and seq_lens {len(lengths)}; expected one for each request."
        )
    if np.minimum.reduce(queries) < 1:
        worst = int(queries.argmin())
        raise InputError(
            f"query_lens[{worst}] is {queries[worst]}; a request in a batch has at least one token. Leave it out."
        )
    if np.logical_or.reduce(lengths < queries):
        worst = int((lengths < queries).argmax())
        raise InputError(
            f"seq_lens[{worst}] is {lengths[worst]}, below query_lens[{worst}]={queries[worst]}; "
            "seq_lens counts this step's tokens too."
        )
    longest = int(np.maximum.reduce(lengths))
    if longest > bounds.max_model_len:
        raise InputError(
            f"seq_lens[{int(lengths.argmax())}] is {longest}, above max_model_len={bounds.max_model_len}; "
            "end the request, or build BatchMetadata with a higher limit."
        )
    return lengths - queries, longest


def _needed_pages(block_table: Pages, lengths: _Int64s, longest: int, bounds: Bounds, ahead: int) -> _Int32s:
    """Copy the pages that each request needs, `ahead` included: (num_reqs, the most needed) int32, 0 elsewhere."""
    table, counts = _table(block_table)
    reqs, width = len(lengths), -(-min(longest + ahead, bounds.max_model_len) // bounds.page_size)
    if len(table) != reqs:
        raise InputError(f"block_table has {len(table)} rows for {reqs} requests; expected one for each.")
    reach = lengths + ahead if ahead else lengths
    if table.shape[1] < width or counts is not None:
        counts = np.full(reqs, table.shape[1]) if counts is None else counts
        missing = -(-np.minimum(reach, bounds.max_model_len) // bounds.page_size) - counts
        if (missing > 0).any():
            worst = int((missing > 0).argmax())
            raise InputError(
                f"request {worst} needs {counts[worst] + missing[worst]} pages of {bounds.page_size} tokens, but its "
                f"row in block_table has {counts[worst]}; allocate pages before the step."
            )
    needed = table[:, :width]
    if table.dtype.itemsize > 4 and (needed.astype(np.int32) != needed).any():
        raise InputError("block_table has page ids beyond int32; expected ids of the cache's pages.")
    # Zero the rest: engines leave -1 or old page ids there, and some kernels read a row to its end.
    used = bounds.page_starts[:width] < reach[:, None]
    pages: _Int32s = np.multiply(needed, used, dtype=np.int32, order="C", casting="unsafe")
    return pages


def int64s(name: str, values: Ints) -> _Int64s:
    """Convert integers to a one-dimensional int64 array; may return the caller's own.

    Raises:
        InputError: the values are not integers, not one-dimensional, or on a GPU.
    """
    if isinstance(values, np.ndarray) and values.dtype is _INT64 and values.ndim == 1:
        return values
    array = _array(name, values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(f"{name} is {array.dtype} of shape {array.shape}; expected one whole number per request.")
    return array.astype(np.int64, copy=False)


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, Tensor) and values.device.type != "cpu":
        raise InputError(f"{name} is on {values.device}; keep it on the host, since reading it would synchronize.")
    try:
        return np.asarray(values.detach() if isinstance(values, Tensor) else values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} is no array of whole numbers: {error}.") from None


def _table(block_table: Pages) -> tuple[npt.NDArray[Any], _Int64s | None]:
    """Convert a block table to (num_reqs, n), and count the pages of each row; None if all have n."""
    counts = None
    if isinstance(block_table, (Tensor, np.ndarray)):
        table = _array("block_table", block_table)
    else:
        try:
            rows: list[Any] = [_array("block_table", row) if isinstance(row, Tensor) else row for row in block_table]
            counts = np.fromiter(map(len, rows), np.int64, len(rows))
            pages = np.array(list(itertools.chain.from_iterable(rows)))
        except (TypeError, ValueError, OverflowError) as error:
            raise InputError(f"block_table does not consist of rows of page ids: {error}.") from None
        if pages.size and pages.dtype.kind not in "iu":
            raise InputError(f"block_table holds {pages.dtype} where page ids are expected.")
        table = np.zeros((len(rows), int(counts.max(initial=0))), np.int64)
        table[np.arange(table.shape[1]) < counts[:, None]] = pages.astype(np.int64)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise InputError(
            f"block_table has shape {table.shape} and dtype {table.dtype}; expected page ids, (num_reqs, n) or a "
            "sequence for each request."
        )
    return table, counts
