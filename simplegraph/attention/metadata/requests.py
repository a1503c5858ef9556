"""A step as the engine describes it, read and checked on the host before anything is written."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from simplegraph.attention.metadata.staging import Step
from simplegraph.errors import CaptureSizeError, ConfigError, InputError

Ints = Sequence[int] | Tensor | npt.NDArray[Any]
QueryLens = int | Ints  # one number where all requests have as many tokens
Pages = Sequence[Ints] | Tensor | npt.NDArray[Any]

_Int32s = npt.NDArray[np.int32]
_Int64s = npt.NDArray[np.int64]
_INT64 = np.dtype(np.int64)
_INT32_MAX = int(np.iinfo(np.int32).max)


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a step can be at most; see `BatchMetadata`.

    Attributes:
        page_starts: the first position of each of a request's pages; tokens: the numbers of a step's tokens.

    Raises:
        ConfigError: one is below 1.
    """

    max_num_tokens: int
    max_num_reqs: int
    max_model_len: int
    page_size: int
    page_starts: _Int64s = dataclasses.field(init=False, repr=False, compare=False)
    tokens: _Int64s = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("max_num_tokens", "max_num_reqs", "max_model_len", "page_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} is {value!r}; expected a whole number of at least 1.")
        object.__setattr__(self, "page_starts", np.arange(self.max_blocks) * self.page_size)
        object.__setattr__(self, "tokens", np.arange(max(self.max_num_tokens, self.max_num_reqs)))

    @property
    def max_blocks(self) -> int:
        """The most pages a request can have."""
        return -(-self.max_model_len // self.page_size)

    def check_shape(self, num_tokens: int, num_reqs: int) -> None:
        """Refuse a shape that the buffers do not hold.

        Raises:
            CaptureSizeError: it is above the limits, or empty.
            InputError: it is no pair of whole numbers.
        """
        for name, value in (("num_tokens", num_tokens), ("num_reqs", num_reqs)):
            if type(value) is not int and not isinstance(value, np.integer):
                raise InputError(f"{name} is {value!r}; expected a whole number.")
        if not (1 <= num_tokens <= self.max_num_tokens and 1 <= num_reqs <= self.max_num_reqs):
            raise CaptureSizeError(
                f"{num_tokens} tokens and {num_reqs} requests; expected 1 to {self.max_num_tokens} tokens and 1 to "
                f"{self.max_num_reqs} requests. Split the batch, or build BatchMetadata with higher limits."
            )

    def check_ahead(self, ahead: int) -> int:
        """Tokens beyond each request's, no more than there can be.

        Raises:
            InputError: it is no whole number, or below 0.
        """
        if (type(ahead) is not int and not isinstance(ahead, np.integer)) or ahead < 0:
            raise InputError(f"ahead is {ahead!r}; expected a whole number of 0 or more.")
        return int(min(ahead, self.max_model_len))


class ContextShare(NamedTuple):
    """Which tokens of every sequence are in this rank's cache, where context parallel ranks share them.

    Every ``size``-th token, beginning with token ``rank``: no rank has more than one token more than another. A page of
    the block table has ``page_size * size`` tokens, ``page_size`` of them in the page of that id on each rank, so that
    one block table serves all ranks.

    Args:
        rank: this one's number.
        size: how many ranks there are.
    """

    rank: int = 0
    size: int = 1

    def check(self) -> None:
        """Refuse a share of nothing.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"share is {self}; expected a rank from 0 to size - 1.")

    def of(self, step: Step) -> Step:
        """A step of whole sequences as this rank's cache sees it: fewer tokens, and none to write of other ranks."""
        lengths = (step.seq_lens + np.int32(self.size - 1 - self.rank)) // np.int32(self.size)
        slots = np.where(step.slots % self.size == self.rank, step.slots // self.size, -1)
        return step._replace(seq_lens=lengths, slots=slots)


class Request:
    """The requests of a step, checked.

    Attributes:
        step: what goes to the device.
        num_reqs, num_tokens: how many.
        max_query_len: the longest.
    """

    def __init__(self, step: Step, queries: int | _Int64s, max_query_len: int, limits: Limits) -> None:
        self.step = step
        self.num_reqs, self.num_tokens = len(step.seq_lens), len(step.slots)
        self.max_query_len = max_query_len
        self._queries, self._limits = queries, limits

    def check_pages(self, num_pages: int | None) -> None:
        """Refuse page ids that the cache does not have.

        Raises:
            InputError: there is one.
        """
        pages = self.step.pages
        end = _INT32_MAX if num_pages is None else num_pages
        # Read without a sign, ids below 0 are the largest: one pass finds both.
        if np.maximum.reduce(pages.view(np.uint32), axis=None) >= end:
            row, column = (int(i) for i in np.argwhere((pages < 0) | (pages >= end))[0])
            last = "the cache's last" if num_pages is None else num_pages - 1
            raise InputError(
                f"block_table[{row}][{column}] is {pages[row, column]}; expected a page id from 0 to {last}."
            )

    def check_single_tokens(self) -> None:
        """Refuse requests of several tokens: each of these sees another part of a rank's share.

        Raises:
            InputError: there is one.
        """
        if self.max_query_len > 1:
            raise InputError(
                f"query_lens[{int(np.argmax(self._queries))}] is {self.max_query_len}; context parallel ranks take one "
                "token a request. Give a prompt's tokens as requests of their own, each with the length up to itself "
                "and the same pages: keys and values are written before any of them attends."
            )

    def check_places(self) -> None:
        """Refuse two requests of one token each that write to the same place; a prompt's may share their pages.

        Raises:
            InputError: there are two.
        """
        order = np.argsort(self.step.slots, kind="stable")
        slots = self.step.slots[order]
        twice = np.flatnonzero(slots[1:] == slots[:-1])
        if len(twice):
            first, second = order[twice[0]], order[twice[0] + 1]
            page, place = divmod(int(slots[twice[0]]), self._limits.page_size)
            raise InputError(
                f"requests {first} and {second} both write to place {place} of page {page}. Give each request pages of "
                "its own, or each token of a prompt the length up to itself."
            )

    def check_written_once(self, ahead: int = 0) -> None:
        """Refuse pages that two requests write to, and a request that has one twice, in this step or those ahead.

        Args:
            ahead: tokens beyond the step's that each request has pages for.

        Raises:
            InputError: there is one.
        """
        step, limits = self.step, self._limits
        starts = limits.page_starts[: step.pages.shape[1]]
        begun = starts + limits.page_size > (step.seq_lens - self._queries)[:, None]
        owners, columns = np.nonzero(begun & (starts < (step.seq_lens + ahead)[:, None]))
        pages = step.pages[owners, columns]
        order = np.argsort(pages, kind="stable")
        twice = np.flatnonzero(pages[order][1:] == pages[order][:-1])
        if len(twice) == 0:
            return
        page, first, second = pages[order[twice[0]]], owners[order[twice[0]]], owners[order[twice[0] + 1]]
        if first == second:
            raise InputError(f"a request has page {page} twice in its row of block_table; give it another one.")
        raise InputError(
            f"requests {first} and {second} both write to page {page}; pages may be shared for reading only. "
            "Give each request pages of its own for what it writes."
        )


def read_requests(query_lens: QueryLens, seq_lens: Ints, block_table: Pages, limits: Limits, ahead: int = 0) -> Request:
    """What an engine says of a step, as arrays of its own; see `BatchMetadata.set`.

    Raises:
        CaptureSizeError: there is no request, or more tokens or requests than the limits.
        InputError: the lengths or pages do not fit each other.
    """
    # The least number of numpy calls: each costs a microsecond or two, thirty would be a tenth of a step.
    if isinstance(query_lens, int):
        lengths = int64s("seq_lens", seq_lens)
        if type(query_lens) is int and 1 <= query_lens <= limits.max_model_len:
            return _uniform_requests(query_lens, lengths, block_table, limits, ahead)
        queries = int64s("query_lens", [query_lens] * len(lengths))  # what is wrong with it is said below
    else:
        queries, lengths = int64s("query_lens", query_lens), int64s("seq_lens", seq_lens)
    before, longest = _check_lengths(queries, lengths, limits)
    most = int(np.maximum.reduce(queries))
    starts = np.zeros(len(queries) + 1, np.int64)
    np.add.accumulate(queries, out=starts[1:])
    num_tokens = int(starts[-1])
    limits.check_shape(num_tokens, len(queries))
    pages = _needed_pages(block_table, lengths, longest, limits, ahead)
    if most * len(queries) == num_tokens:
        slots = _uniform_slots(before, most, pages, limits)
    else:
        slots = _slots(queries, before, starts, pages, limits)
    step = Step(slots, starts.astype(np.int32), lengths.astype(np.int32), pages)
    return Request(step, queries, most, limits)


def _uniform_requests(query_len: int, lengths: _Int64s, block_table: Pages, limits: Limits, ahead: int) -> Request:
    """As `read_requests`, of requests with as many tokens each."""
    reqs = len(lengths)
    before = lengths - query_len
    # Read without a sign, numbers below 0 are the largest: one pass finds them and what is too long.
    most_before = int(np.maximum.reduce(before.view(np.uint64))) if reqs else 0
    if reqs == 0 or most_before > limits.max_model_len - query_len:
        _check_lengths(np.full(reqs, query_len, np.int64), lengths, limits)
    longest, num_tokens = most_before + query_len, reqs * query_len
    limits.check_shape(num_tokens, reqs)
    pages = _needed_pages(block_table, lengths, longest, limits, ahead)
    starts = np.arange(0, num_tokens + 1, query_len, dtype=np.int32)
    step = Step(_uniform_slots(before, query_len, pages, limits), starts, lengths.astype(np.int32), pages)
    return Request(step, query_len, query_len, limits)


def _check_lengths(queries: _Int64s, lengths: _Int64s, limits: Limits) -> tuple[_Int64s, int]:
    """Tokens that each request has in the cache already, and the most that one has with this step."""
    if len(queries) == 0:
        raise CaptureSizeError("the batch is empty; a step needs at least one request (set_dummy runs without).")
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
    if longest > limits.max_model_len:
        raise InputError(
            f"seq_lens[{int(lengths.argmax())}] is {longest}, above max_model_len={limits.max_model_len}; "
            "end the request, or build BatchMetadata with a higher limit."
        )
    return lengths - queries, longest


def _slots(queries: _Int64s, before: _Int64s, starts: _Int64s, pages: _Int32s, limits: Limits) -> _Int64s:
    """Where each token's key and value go: its page's first slot, and its place in the page."""
    rows = limits.tokens[: len(queries)] * pages.shape[1]
    position = limits.tokens[: starts[-1]] + np.repeat(before - starts[:-1], queries)
    return _placed(position, np.repeat(rows, queries), pages, limits.page_size)


def _uniform_slots(before: _Int64s, query_len: int, pages: _Int32s, limits: Limits) -> _Int64s:
    """As `_slots`, of requests with as many tokens each."""
    rows = limits.tokens[: len(before), None] * pages.shape[1]
    position = before[:, None] + limits.tokens[:query_len]
    return _placed(position, rows, pages, limits.page_size).ravel()


def _placed(position: _Int64s, rows: _Int64s, pages: _Int32s, page_size: int) -> _Int64s:
    page, place = np.divmod(position, page_size)
    page += rows
    place += np.multiply(pages.take(page), page_size, dtype=np.int64)
    return place


def _needed_pages(block_table: Pages, lengths: _Int64s, longest: int, limits: Limits, ahead: int) -> _Int32s:
    """The pages of each request's tokens and `ahead`, (num_reqs, as many as the longest needs), 0 elsewhere."""
    table, counts = _table(block_table)
    reqs, width = len(lengths), -(-min(longest + ahead, limits.max_model_len) // limits.page_size)
    if len(table) != reqs:
        raise InputError(f"block_table has {len(table)} rows for {reqs} requests; expected one for each.")
    reach = lengths + ahead if ahead else lengths
    if table.shape[1] < width or counts is not None:
        _check_counts(counts, reach, table.shape[1], limits)
    needed = table[:, :width]
    if table.dtype.itemsize > 4 and (needed.astype(np.int32) != needed).any():
        raise InputError("block_table has page ids beyond int32; expected ids of the cache's pages.")
    # Engines keep -1 or what is left of other requests there, and some kernels read a row to its end.
    used = limits.page_starts[:width] < reach[:, None]
    pages: _Int32s = np.multiply(needed, used, dtype=np.int32, order="C", casting="unsafe")
    return pages


def _check_counts(counts: _Int64s | None, reach: _Int64s, columns: int, limits: Limits) -> None:
    """Refuse requests that need more pages than their rows have."""
    needed = -(-np.minimum(reach, limits.max_model_len) // limits.page_size)
    counts = np.full(len(reach), columns) if counts is None else counts
    if (counts < needed).any():
        worst = int((counts < needed).argmax())
        raise InputError(
            f"request {worst} needs {needed[worst]} pages of {limits.page_size} tokens, but its row in block_table "
            f"has {counts[worst]}; allocate pages before the step."
        )


def int64s(name: str, values: Ints) -> _Int64s:
    """Whole numbers as int64, which may be the caller's own array.

    Raises:
        InputError: they are none, or not a single row of them, or on a GPU.
    """
    if isinstance(values, np.ndarray) and values.dtype is _INT64 and values.ndim == 1:
        return values
    array = _array(name, values)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(f"{name} is {array.dtype} of shape {array.shape}; expected one whole number a request.")
    return array.astype(np.int64, copy=False)


def _array(name: str, values: Any) -> npt.NDArray[Any]:
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise InputError(f"{name} is on {values.device}; keep it on the host, so that no device is waited for.")
        if values.is_floating_point():
            raise InputError(f"{name} is {values.dtype}; expected whole numbers.")
        array: npt.NDArray[Any] = values.detach().numpy()
        return array
    try:
        return np.asarray(values)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{name} is no array of whole numbers: {error}.") from None


def _table(block_table: Pages) -> tuple[npt.NDArray[Any], _Int64s | None]:
    """A block table as (num_reqs, n), and how many pages each row has; None where all have n.

    Raises:
        InputError: it is no table of whole numbers.
    """
    if isinstance(block_table, (Tensor, np.ndarray)):
        table, counts = _array("block_table", block_table), None
    else:
        table, counts = _padded_rows(block_table)
    if table.ndim != 2 or table.dtype.kind not in "iu":
        raise InputError(
            f"block_table has shape {table.shape} and dtype {table.dtype}; expected page ids, (num_reqs, n) or a "
            "sequence for each request."
        )
    return table, counts


def _padded_rows(block_table: Sequence[Ints]) -> tuple[_Int64s, _Int64s]:
    try:
        rows: list[Any] = [_array("block_table", row) if isinstance(row, Tensor) else row for row in block_table]
        counts = np.fromiter(map(len, rows), np.int64, len(rows))
        found = np.array(list(itertools.chain.from_iterable(rows)))
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"block_table holds something else than rows of page ids: {error}.") from None
    if found.size and found.dtype.kind not in "iu":
        raise InputError(f"block_table holds {found.dtype} where page ids are expected.")
    flat = found.astype(np.int64)
    table = np.zeros((len(rows), int(counts.max(initial=0))), np.int64)
    table[np.arange(table.shape[1]) < counts[:, None]] = flat
    return table, counts
