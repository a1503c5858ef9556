"""A step's metadata: what reaches the device, what is in the padding, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from one_step import LENGTH, PAGE, REQS, TOKENS, fields, metadata, poison

from simplegraph import CudaGraphManager, InputError, ReplayError


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
    assert before.batch.seq_lens.max() == 19


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


def test_steps_in_flight_keep_their_own_numbers(device: torch.device) -> None:
    built = metadata(device)
    seen = []
    for length in range(1, LENGTH + 1):
        view = built.set([1], [length], [list(range(1, 7))])
        seen.append(view.slot_mapping.clone())
    assert [slot.item() for slot in seen] == [(p // PAGE + 1) * PAGE + p % PAGE for p in range(LENGTH)]


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
    manager = CudaGraphManager(device=device, capture_sizes=[2], progress=False)
    with pytest.raises(InputError, match="inside a capture"):
        manager.capture(lambda mode, descriptor: built.set([1], [1], [[1]]))


def test_views_of_eager_batches_do_not_pile_up() -> None:
    built = metadata(max_num_tokens=8000)
    for tokens in range(1, 6000):
        built.view(tokens, 1)
    assert len(built._views) <= 4096
