"""Forms in which an engine can describe a step, and steps that are refused before they are written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from one_step import LENGTH, PAGE, REQS, TOKENS, fields, metadata, poison

from simplegraph import CaptureSizeError, InputError, SimpleGraphError


def test_lists_arrays_and_tensors_say_the_same() -> None:
    built = metadata()
    table = [[5, 2, 1], [8, 1, 3]]
    results = []
    for kind in (list, np.array, torch.tensor):
        poison(built)
        built.set(kind([2, 1]), kind([9, 12]), kind(table), num_tokens=4, num_reqs=3)
        results.append([field.tolist() for field in fields(built, 4, 3)])
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("ahead", [0, 5])
def test_one_query_length_for_all_says_the_same_as_one_for_each(device: torch.device, ahead: int) -> None:
    draw = np.random.default_rng(0)
    for query_len, count in [(1, 1), (1, 6), (4, 4), (5, 3), (16, 1)]:
        lengths = draw.integers(query_len, LENGTH + 1, count)
        table = draw.integers(0, 50, (count, LENGTH // PAGE))
        each, one = metadata(device), metadata(device)
        for built, queries in [(each, [query_len] * count), (one, query_len)]:
            poison(built)
            built.set(queries, lengths, table, num_tokens=TOKENS, num_reqs=REQS, ahead=ahead)
        for expected, found in zip(fields(each), fields(one), strict=True):
            assert found.tolist() == expected.tolist()
        expected, found = vars(each.batch), vars(one.batch)
        assert {name: np.array(value).tolist() for name, value in found.items()} == {
            name: np.array(value).tolist() for name, value in expected.items()
        }
        assert all(value.dtype == np.int32 for value in found.values() if isinstance(value, np.ndarray))


@pytest.mark.parametrize(
    ("query_len", "seq_lens"),
    [
        *[(0, [3, 4]), (-1, [3, 4]), (3, [3, 2]), (2, [3, -1]), (2, [25, 4]), (25, [25, 25]), (9, [10, 10]), (1, [])],
        *[(2, [4, -(2**63)]), (2, [2**63 - 1, 4]), (True, [3, 4]), (10**30, [3, 4])],
    ],
)
def test_one_query_length_that_does_not_fit_is_refused_as_several_are(query_len: Any, seq_lens: list[int]) -> None:
    pages = np.ones((len(seq_lens), LENGTH // PAGE), np.int32)
    with pytest.raises(SimpleGraphError) as each:
        metadata().set([query_len] * len(seq_lens), seq_lens, pages)
    with pytest.raises(type(each.value)) as one:
        metadata().set(query_len, seq_lens, pages)
    assert str(one.value) == str(each.value)


def test_what_an_engine_keeps_behind_the_needed_pages_does_not_matter() -> None:
    built = metadata(num_pages=40)
    view = built.set([1, 1], [5, 20], torch.tensor([[3, 4, -1, 999, 7], [5, 6, 7, 8, 9]]))
    assert view.block_table[0].tolist() == [3, 4, 0, 0, 0, 0]
    built.set([1], [5], torch.ones(1, 100, dtype=torch.int32))


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (([0], [1], [[1]]), InputError, r"query_lens\[0\] is 0"),
        (([2], [1], [[1]]), InputError, "below query_lens"),
        (([1], [25], [[1] * 7]), InputError, "above max_model_len=24"),
        (([1], [5], [[1]]), InputError, "needs 2 pages .* has 1"),
        (([1], [20], torch.tensor([[3, 4]])), InputError, "needs 5 pages .* has 2"),
        (([1, 1], [1, 1], [[1]]), InputError, "1 rows for 2 requests"),
        (([1, 1], [1], [[1], [2]]), InputError, "one for each request"),
        (([], [], []), CaptureSizeError, "empty"),
        (([1] * 7, [1] * 7, [[i] for i in range(7)]), CaptureSizeError, "1 to 6 requests"),
        (([17], [17], [[1] * 6]), CaptureSizeError, "1 to 16 tokens"),
        (([1.5], [2], [[1]]), InputError, "float64"),
        (([1], [1], [["x"]]), InputError, "page ids"),
        (([1], [1], [7]), InputError, "page ids"),
        (([[1]], [1], [[1]]), InputError, "shape"),
        (([1], [5], [[39, 40]]), InputError, r"block_table\[0\]\[1\] is 40; .* 0 to 39"),
        (([1], [5], [[-1, 4]]), InputError, r"block_table\[0\]\[0\] is -1"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_step_before_stays(
    step: tuple[Any, Any, Any], error: type[SimpleGraphError], words: str
) -> None:
    built = metadata(num_pages=40)
    built.set([1, 2], [5, 6], [[1, 2], [3, 4]], num_tokens=8, num_reqs=4)
    before, state = [field.clone() for field in fields(built)], dict(vars(built.batch))
    with pytest.raises(error, match=words):
        built.set(*step)
    assert all(map(torch.equal, before, fields(built)))
    assert all(value is state[name] for name, value in vars(built.batch).items())


@pytest.mark.parametrize("page", [40, -1])
@pytest.mark.parametrize("column", [0, 1])
def test_a_page_outside_of_the_cache_is_refused(page: int, column: int) -> None:
    built = metadata(num_pages=40)
    rows = [[1, 2], [3, 4]]
    rows[1][column] = page
    with pytest.raises(InputError, match=rf"block_table\[1\]\[{column}\] is {page}; .* 0 to 39"):
        built.set([1, 1], [5, 8], rows)


@pytest.mark.parametrize(
    "table",
    [np.array([[2**32 + 1]]), [[2**32 + 1]], [[2**70]], [[1.9]], ["1"], None, 3, torch.tensor([[1.0]])],
    ids=str,
)
def test_page_ids_are_never_converted_silently(table: Any) -> None:
    with pytest.raises(InputError, match="block_table"):
        metadata().set([1], [1], table)


def test_pages_may_be_shared_for_reading() -> None:
    built = metadata(num_pages=40)
    built.set([1, 1], [5, 6], [[7, 1], [7, 2]], num_tokens=2, num_reqs=2)
    assert built.live(2, 2).block_table[:, :2].tolist() == [[7, 1], [7, 2]]
