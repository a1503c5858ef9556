"""Positions, slots and lengths of the next steps: those that a loop over requests and tokens finds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from simplegraph.attention import BatchMetadata
from simplegraph.spec_decode.advance import advance_step, follow, upcoming

MAX_LEN, PAGE = 22, 4


@given(
    requests=st.lists(st.tuples(st.integers(1, MAX_LEN), st.integers(1, 8)), min_size=1, max_size=5),
    padding=st.integers(0, 3),
    steps=st.integers(1, 7),
)
def test_every_token_goes_to_its_own_place_or_nowhere(
    requests: list[tuple[int, int]], padding: int, steps: int
) -> None:
    metadata = BatchMetadata(max_num_tokens=8, max_num_reqs=8, max_model_len=MAX_LEN, page_size=PAGE, device="cpu")
    limits = [limit for limit, _ in requests]
    table = [[7 * row + column + 1 for column in range(-(-limit // PAGE))] for row, limit in enumerate(limits)]
    rows = len(requests) + padding
    view = metadata.set([1] * len(requests), limits, table, num_tokens=rows, num_reqs=rows)
    # Where each one's last token is: some before its limit, by what was refused and what is still to be drafted.
    last = [max(0, limit - behind) for limit, behind in requests] + [MAX_LEN - 1] * padding
    found = upcoming(torch.tensor(last), view.seq_lens, view.block_table, PAGE, steps, MAX_LEN)
    for step in range(steps):
        for row, start in enumerate(last):
            position, limit = start + 1 + step, limits[row] if row < len(limits) else 0
            assert found.positions[step, row] == min(position, MAX_LEN - 1)
            assert found.seq_lens[step, row] == min(position + 1, limit)
            slot = -1 if position >= limit else table[row][position // PAGE] * PAGE + position % PAGE
            assert found.slots[step, row] == slot
    assert found.slots.dtype is torch.int64
    assert found.seq_lens.dtype is torch.int32
    assert all(part[0].is_contiguous() for part in found)


def test_steps_that_follow_another_have_its_pages_and_their_own_query_starts() -> None:
    first, second = (
        BatchMetadata(max_num_tokens=8, max_num_reqs=4, max_model_len=MAX_LEN, page_size=PAGE, device="cpu")
        for _ in range(2)
    )
    step = first.set([2, 2], [6, MAX_LEN], [[3, 1, 2], [9, 8, 7, 6, 5, 4]], ahead=3, num_reqs=4)
    second.set([1] * 4, [9] * 4, [[11] * 3] * 4)  # what an earlier step left
    live = second.view(4, 4)
    assert follow(live, step, 3, MAX_LEN).tolist() == [9, MAX_LEN, 0, 0]
    assert live.block_table.tolist() == [[3, 1, 2, 0, 0, 0], [9, 8, 7, 6, 5, 4], [0] * 6, [0] * 6]
    assert live.query_start_loc.tolist() == [0, 1, 2, 2, 2]


@given(
    requests=st.lists(st.tuples(st.integers(3, 12), st.lists(st.integers(1, 3), max_size=3)), min_size=1, max_size=4),
    padding=st.integers(0, 2),
)
def test_a_step_moved_on_is_the_one_that_the_host_would_have_set(
    requests: list[tuple[int, list[int]]], padding: int
) -> None:
    moved, written = (
        BatchMetadata(max_num_tokens=24, max_num_reqs=6, max_model_len=MAX_LEN, page_size=PAGE, device="cpu")
        for _ in range(2)
    )
    count, query_len = len(requests), 3
    shape = {"num_tokens": query_len * (count + padding), "num_reqs": count + padding}
    table = [[6 * row + column + 1 for column in range(6)] for row in range(count)]
    lengths = [length for length, _ in requests]
    view = moved.set(query_len, lengths, table, ahead=MAX_LEN, **shape)
    for step in range(4):
        grown = [0 if step == 0 else (more + [1] * 3)[step - 1] for _, more in requests] + [0] * padding
        lengths = [length + more for length, more in zip(lengths, grown, strict=False)]
        if step:
            moved.advance(lengths)
        positions = advance_step(view, torch.tensor(grown), query_len, PAGE)
        expected = written.set(query_len, lengths, table, ahead=MAX_LEN, **shape)
        assert view.seq_lens.tolist() == expected.seq_lens.tolist() == lengths + [0] * padding
        assert view.slot_mapping.tolist() == expected.slot_mapping.tolist()
        assert moved.batch.seq_lens.tolist() == written.batch.seq_lens.tolist()
        assert positions[:count].tolist() == [[length - 3, length - 2, length - 1] for length in lengths]
        assert positions.min() >= 0


def test_padding_stays_where_it_is_and_a_dummy_step_writes_nothing() -> None:
    metadata = BatchMetadata(max_num_tokens=8, max_num_reqs=4, max_model_len=MAX_LEN, page_size=PAGE, device="cpu")
    view = metadata.set_dummy(8, 4, 2, capturing=True)
    advance_step(view, torch.zeros(4, dtype=torch.int64), 2, PAGE)
    assert view.slot_mapping.tolist() == [-1] * 8
    assert view.seq_lens.tolist() == [2] * 4
