"""Limits of a step, and the shape that it is padded to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from one_step import LENGTH, metadata

from simplegraph import CaptureSizeError, ConfigError, InputError


@pytest.mark.parametrize("name", ["max_num_tokens", "max_num_reqs", "max_model_len", "page_size"])
def test_limits_below_one_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        metadata(**{name: 0})


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
