"""A step's metadata: what reaches the device, what is in the padding, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from simplegraph import CaptureSizeError, ConfigError, CudaGraphManager, InputError, ReplayError, SimpleGraphError
from simplegraph.attention import BatchMetadata, ContextShare

TOKENS, REQS, LENGTH, PAGE = 16, 6, 24, 4


def metadata(device: torch.device | str = "cpu", **settings: Any) -> BatchMetadata:
    limits = {"max_num_tokens": TOKENS, "max_num_reqs": REQS, "max_model_len": LENGTH, "page_size": PAGE}
    return BatchMetadata(device=device, **(limits | settings))


def fields(built: BatchMetadata, num_tokens: int = TOKENS, num_reqs: int = REQS) -> tuple[Tensor, ...]:
    view = built.view(num_tokens, num_reqs)
    return view.query_start_loc, view.seq_lens, view.block_table, view.slot_mapping


def poison(built: BatchMetadata) -> None:
    for field in fields(built):
        field.fill_(-7777)


def test_every_padded_place_is_filled(device: torch.device) -> None:
    built = metadata(device)
    poison(built)
    view = built.set([1, 3], [7, 9], [[5, 2], [8, 1, 3]], num_tokens=8, num_reqs=4)
    assert view.query_start_loc.tolist() == [0, 1, 4, 4, 4]
    assert view.seq_lens.tolist() == [7, 9, 0, 0]
    assert view.block_table.tolist() == [[5, 2, 0, 0, 0, 0], [8, 1, 3, 0, 0, 0], [0] * 6, [0] * 6]
    assert view.slot_mapping.tolist() == [2 * 4 + 2, 1 * 4 + 2, 1 * 4 + 3, 3 * 4, -1, -1, -1, -1]
    dtypes = [field.dtype for field in fields(built)]
    assert dtypes == [torch.int32, torch.int32, torch.int32, torch.int64]


def test_nothing_of_longer_steps_is_left_behind(device: torch.device) -> None:
    built = metadata(device)
    draw = np.random.default_rng(0)
    for _ in range(100):
        count = int(draw.integers(1, REQS + 1))
        queries = draw.integers(1, TOKENS // count + 1, count)
        lengths = np.minimum(queries + draw.integers(0, LENGTH, count), LENGTH)
        table = draw.integers(0, 50, (count, LENGTH // PAGE))
        poison(built)
        built.set(queries, lengths, table, num_tokens=TOKENS, num_reqs=REQS)
        total = int(queries.sum())
        expected = [
            table[r, p // PAGE] * PAGE + p % PAGE for r in range(count) for p in _positions(queries, lengths, r)
        ]
        starts, seq_lens, pages, slots = (field.cpu() for field in fields(built))
        assert slots.tolist() == expected + [-1] * (TOKENS - total)
        assert starts.tolist() == [0, *np.cumsum(queries), *[total] * (REQS - count)]
        assert seq_lens.tolist() == [*lengths, *[0] * (REQS - count)]
        needed = np.zeros((REQS, LENGTH // PAGE), int)
        for row in range(count):
            used = -(-lengths[row] // PAGE)
            needed[row, :used] = table[row, :used]
        assert pages.tolist() == needed.tolist()


def _positions(queries: Any, lengths: Any, request: int) -> range:
    return range(lengths[request] - queries[request], lengths[request])


def test_addresses_and_views_never_change(device: torch.device) -> None:
    built = metadata(device)
    before = built.view(8, 4)
    addresses = [field.data_ptr() for field in fields(built, 8, 4)]
    for length in range(1, 20):
        built.set([1], [length], [[1] * 6], num_tokens=8, num_reqs=4)
    assert built.view(8, 4) is before
    assert [field.data_ptr() for field in fields(built, 8, 4)] == addresses
    assert before.batch.version == 19
    assert before.batch.max_seq_len == 19


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
    built = metadata(debug=True, num_pages=40)
    view = built.set([1, 1], [5, 20], torch.tensor([[3, 4, -1, 999, 7], [5, 6, 7, 8, 9]]))
    assert view.block_table[0].tolist() == [3, 4, 0, 0, 0, 0]
    built.set([1], [5], torch.ones(1, 100, dtype=torch.int32))


def test_pages_of_the_tokens_ahead_reach_the_device(device: torch.device) -> None:
    built = metadata(device)
    table = [[5, 2, 9, 8, 7, 6], [8, 1, 3, 4, 0, 0]]
    view = built.set([1, 3], [7, 9], table, ahead=4)
    assert view.block_table.tolist() == [[5, 2, 9, 0, 0, 0], [8, 1, 3, 4, 0, 0]]
    assert view.seq_lens.tolist() == [7, 9]
    assert view.slot_mapping.tolist() == [2 * 4 + 2, 1 * 4 + 2, 1 * 4 + 3, 3 * 4]
    assert built.batch.ahead == 4
    # No further than the model's limit, which is 6 pages.
    assert built.set([1], [23], table[:1], ahead=100).block_table.tolist() == table[:1]
    assert built.set([1], [7], table[:1]).block_table.tolist() == [[5, 2, 0, 0, 0, 0]]
    assert built.batch.ahead == 0
    with pytest.raises(InputError, match="request 0 needs 4 pages of 4 tokens, but its row in block_table has 3"):
        built.set([1], [12], [[1, 2, 3]], ahead=1)


def test_a_step_that_the_device_writes_is_known_by_its_shape(device: torch.device) -> None:
    first, second = metadata(device), metadata(device)
    first.set([2, 2], [7, 22], [[5, 2, 9], [8, 1, 3, 4, 6, 7]], ahead=4)
    second.follow(first.batch, 4, 4)
    batch = second.batch
    assert (batch.num_reqs, batch.num_tokens, batch.padded_reqs, batch.padded_tokens) == (2, 2, 4, 4)
    assert (batch.query_lens, batch.max_seq_len, batch.seq_lens.tolist()) == ({1}, LENGTH, [11, LENGTH])
    assert second.live(4, 4) is second.view(4, 4)
    with pytest.raises(CaptureSizeError, match="2 requests are to be followed in a graph of 1"):
        second.follow(first.batch, 1, 4)
    with pytest.raises(CaptureSizeError, match="expected 1 to 16 tokens and 1 to 6 requests"):
        second.follow(first.batch, 7, 4)
    with pytest.raises(InputError, match="was set with ahead=4; 5 are needed"):
        second.follow(first.batch, 4, 5)


def test_a_step_that_goes_on_from_the_one_before_sends_nothing(device: torch.device) -> None:
    built = metadata(device)
    view = built.set(2, [7, 9], [[5, 2, 9, 8], [8, 1, 3, 4]], ahead=6, num_tokens=8, num_reqs=4)
    before = [view.seq_lens.tolist(), view.slot_mapping.tolist(), view.block_table.tolist()]
    version = built.batch.version
    built.advance([8, 12], ahead=3)
    batch = built.batch
    assert (batch.seq_lens.tolist(), batch.max_seq_len, batch.ahead, batch.version) == ([8, 12], 12, 3, version + 1)
    assert built.live(8, 4) is view
    assert [view.seq_lens.tolist(), view.slot_mapping.tolist(), view.block_table.tolist()] == before
    built.advance([13, 15])  # all that the pages were set for
    assert built.batch.seq_lens.dtype == "int32"


@pytest.mark.parametrize(
    ("lengths", "ahead", "message"),
    [
        ([8, 8], 0, r"seq_lens\[1\] is 8 after 9; expected no less, and at most 15"),
        ([14, 9], 0, r"seq_lens\[0\] is 14 after 7; expected no less, and at most 13"),
        ([12, 9], 2, r"seq_lens\[0\] is 12 after 7; expected no less, and at most 11.*with ahead=2"),
        ([7, 9], 7, r"seq_lens\[0\] is 7 after 7; expected no less, and at most 6"),
        ([-(1 << 62), 9], 0, r"seq_lens\[0\] is -4611686018427387904 after 7"),
        ([8], 0, "seq_lens has 1 entries; the step that is set has 2 requests"),
        ([8.0, 9.0], 0, "seq_lens is float64"),
    ],
)
def test_a_step_goes_on_within_its_pages_only(lengths: list[int], ahead: int, message: str) -> None:
    built = metadata()
    with pytest.raises(ReplayError, match="no batch is set"):
        built.advance([1])
    built.set(2, [7, 9], [[5, 2, 9, 8], [8, 1, 3, 4]], ahead=6)
    version = built.batch.version
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            built.advance(lengths, ahead=ahead)
    assert (built.batch.version, built.batch.seq_lens.tolist()) == (version, [7, 9])
    built.advance([9, 9], ahead=4)
    with pytest.raises(InputError, match="is 8 after 9"):
        built.advance([8, 9], ahead=4)


def test_lengths_may_change_in_the_callers_array_afterwards() -> None:
    built = metadata()
    built.set(1, [7], [[5, 2, 9]], ahead=3)
    lengths = np.array([9])
    built.advance(lengths)
    lengths[:] = 0
    assert built.batch.seq_lens.tolist() == [9]
    with pytest.raises(InputError, match="is 8 after 9"):
        built.advance([8])


@pytest.mark.parametrize("ahead", [-1, 1.5, None, "1", True], ids=repr)
def test_tokens_ahead_are_a_whole_number_of_0_or_more(ahead: Any) -> None:
    """Fewer than none would take a page from the step, or let it outgrow its pages."""
    built, other = metadata(), metadata()
    view = built.set(1, [9], [[5, 2, 9]])
    for call in (
        lambda: built.set(1, [9], [[5, 2, 9]], ahead=ahead),
        lambda: built.advance([13], ahead=ahead),
        lambda: other.follow(built.batch, 1, ahead),
    ):
        with pytest.raises(InputError, match=r"ahead is .*expected a whole number of 0 or more"):
            call()
    assert (built.batch.seq_lens.tolist(), view.block_table[0, :3].tolist()) == ([9], [5, 2, 9])


@pytest.mark.parametrize("ahead", [LENGTH, 2**31 - 1, 2**70, np.int64(LENGTH)])
def test_more_tokens_ahead_than_there_can_be_are_all_that_there_can_be(ahead: int) -> None:
    built = metadata()
    built.set(1, [9], [list(range(1, 7))], ahead=ahead)
    built.advance([LENGTH], ahead=ahead)
    assert built.batch.seq_lens.tolist() == [LENGTH]


def test_a_step_that_follows_another_metadatas_forgets_the_one_that_was_moved_on() -> None:
    built, other = metadata(), metadata()
    built.set(1, [7, 9], [[5, 2, 9], [8, 1, 3]], ahead=3)
    built.advance([8, 9])
    other.set(1, [3], [[4]], ahead=1)
    built.follow(other.batch, 2, 1)
    with pytest.raises(InputError, match="seq_lens has 2 entries; the step that is set has 1 requests"):
        built.advance([9, 10])


def test_a_step_moved_on_inside_a_capture_is_refused(device: torch.device) -> None:
    built = metadata(device)
    built.set(1, [7], [[5, 2, 9]], ahead=3)
    manager = CudaGraphManager(device=device, capture_sizes=[2], progress=False, num_warmups=0)
    with pytest.raises(InputError, match="inside a capture"):
        manager.capture(lambda mode, descriptor: built.advance([8]))
    assert built.batch.seq_lens.tolist() == [7]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ([[5, 2, 9], [8, 1, 9]], "requests 0 and 1 both write to page 9"),
        ([[5, 2, 9], [8, 1, 1]], "a request has page 1 twice"),
    ],
)
def test_debug_refuses_pages_that_steps_ahead_would_write_twice(table: list[list[int]], words: str) -> None:
    built = metadata(debug=True)
    built.set(1, [7, 8], table, ahead=0)
    with pytest.raises(InputError, match=words):
        built.set(1, [7, 8], table, ahead=2)
    built.set(1, [7, 8], [[5, 2, 9], [5, 1, 3]], ahead=2)  # what is only read may be shared


def test_a_step_at_the_models_limit_needs_no_pages_beyond() -> None:
    built = metadata()
    built.set(1, [LENGTH - 2], [list(range(1, 7))], ahead=9)
    built.advance([LENGTH], ahead=9)
    with pytest.raises(InputError, match=f"at most {LENGTH}"):
        built.advance([LENGTH + 1], ahead=9)
    shared = metadata(share=ContextShare(0, 2))
    shared.set(1, [4], [[1]])
    with pytest.raises(InputError, match="ranks share a context"):
        shared.advance([5])


def test_steps_in_flight_keep_their_own_numbers(device: torch.device) -> None:
    built = metadata(device)
    seen = []
    for length in range(1, LENGTH + 1):
        view = built.set([1], [length], [list(range(1, 7))])
        seen.append(view.slot_mapping.clone())
    assert [slot.item() for slot in seen] == [(p // PAGE + 1) * PAGE + p % PAGE for p in range(LENGTH)]


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
        (([1, 1], [3, 4], [[7], [7]]), InputError, "requests 0 and 1 both write to page 7"),
        (([8], [8], [[5, 5]]), InputError, "page 5 twice"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_step_before_stays(
    step: tuple[Any, Any, Any], error: type[SimpleGraphError], words: str
) -> None:
    built = metadata(debug=True, num_pages=40)
    built.set([1, 2], [5, 6], [[1, 2], [3, 4]], num_tokens=8, num_reqs=4)
    before, state = [field.clone() for field in fields(built)], dict(vars(built.batch))
    with pytest.raises(error, match=words):
        built.set(*step)
    assert all(map(torch.equal, before, fields(built)))
    assert all(value is state[name] for name, value in vars(built.batch).items())


@pytest.mark.parametrize("page", [40, -1])
@pytest.mark.parametrize("column", [0, 1])
def test_a_page_outside_of_the_cache_is_refused_without_debug(page: int, column: int) -> None:
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


@pytest.mark.parametrize("size", [4.0, "4", True])
def test_a_padded_shape_is_whole_numbers(size: Any) -> None:
    with pytest.raises(InputError, match="num_tokens is"):
        metadata().set([1], [1], [[1]], num_tokens=size, num_reqs=1)


def test_a_graph_that_leaves_its_requests_open_reads_as_many_as_its_rows_could_be() -> None:
    built = metadata()
    built.set([1, 2], [1, 2], [[1], [2]], num_tokens=4, num_reqs=None)
    assert built.live(4, 4).seq_lens.tolist() == [1, 2, 0, 0]
    assert built.set_dummy(4).num_reqs == 4


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (0, 2), (17, 2), (3, 7)])
def test_a_padded_shape_that_cannot_hold_the_step_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(CaptureSizeError):
        metadata().set([1, 2], [1, 2], [[1], [2]], num_tokens=shape[0], num_reqs=shape[1])


def test_pages_may_be_shared_for_reading() -> None:
    built = metadata(debug=True, num_pages=40)
    built.set([1, 1], [5, 6], [[7, 1], [7, 2]], num_tokens=2, num_reqs=2)
    assert built.live(2, 2).block_table[:, :2].tolist() == [[7, 1], [7, 2]]


@pytest.mark.parametrize("name", ["max_num_tokens", "max_num_reqs", "max_model_len", "page_size"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        metadata(**{name: 0})


def test_a_dummy_reads_page_0_and_writes_nothing(device: torch.device) -> None:
    built = metadata(device)
    poison(built)
    view = built.set_dummy(10, 4)
    assert view.query_start_loc.tolist() == [0, 3, 6, 8, 10]
    assert view.seq_lens.tolist() == [3, 3, 2, 2]
    assert view.slot_mapping.tolist() == [-1] * 10
    assert view.block_table.tolist() == [[0] * 6] * 4
    assert built.set_dummy(8, 4, 2).seq_lens.tolist() == [2] * 4


def test_a_dummys_lengths_stay_within_the_models_limit() -> None:
    view = metadata(max_num_tokens=64).set_dummy(64, 1)
    assert view.seq_lens.tolist() == [LENGTH]
    assert view.query_start_loc.tolist() == [0, LENGTH]


@pytest.mark.parametrize("dummy", [(8, 4, 3), (8, 1, 25), (2, 4, None), (8, 4, 0)])
def test_dummies_that_do_not_fit_are_refused(dummy: tuple[int, int, int | None]) -> None:
    with pytest.raises(InputError, match="dummy"):
        metadata(max_num_tokens=64).set_dummy(*dummy)


def test_a_step_set_for_a_smaller_shape_does_not_run_in_a_larger_one() -> None:
    built = metadata()
    built.set([1, 1], [1, 1], [[1], [2]], num_tokens=4, num_reqs=3)
    assert built.live(3, 2).num_tokens == 3
    for shape in ((8, 3), (4, 4), (1, 2), (4, 1)):
        with pytest.raises(ReplayError, match="set as 2 tokens and 2 requests, padded to 4 and 3"):
            built.live(*shape)


def test_a_dummy_is_no_step() -> None:
    built = metadata()
    with pytest.raises(ReplayError, match="no batch is set"):
        built.live(1, 1)
    built.set([1], [1], [[1]])
    built.set_dummy(4, 4, capturing=True)
    with pytest.raises(ReplayError, match="no batch is set"):
        built.live(1, 1)


def test_a_rank_without_requests_may_run_a_dummy_step() -> None:
    built = metadata()
    view = built.set_dummy(4, 4, 1)
    assert built.live(4, 4) is view
    assert built.batch.query_lens == {1}


def test_setting_works_in_and_out_of_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        built = metadata(device)
        built.set([1], [3], [[1]])
    assert built.set([1], [4], [[1]]).slot_mapping.tolist() == [7]


def test_a_step_set_inside_a_capture_is_refused(device: torch.device) -> None:
    built = metadata(device)
    manager = CudaGraphManager(device=device, capture_sizes=[2], progress=False, num_warmups=0)
    with pytest.raises(InputError, match="inside a capture"):
        manager.capture(lambda mode, descriptor: built.set([1], [1], [[1]]))


def test_views_of_eager_batches_do_not_pile_up() -> None:
    built = metadata(max_num_tokens=8000)
    for tokens in range(1, 6000):
        built.view(tokens, 1)
    assert len(built._views) <= 4096
