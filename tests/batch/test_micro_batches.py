"""Micro-batches together are the batch: no row is lost or computed twice, and requests that decode stay whole."""

from __future__ import annotations

import pytest

from simplegraph.attention.two_batch import micro_batches
from simplegraph.batch.sizes import BatchDescriptor


@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize("requests", [2, 3, 8, 129])
def test_decoding_requests_stay_whole(requests: int, query_len: int) -> None:
    first, second = micro_batches(BatchDescriptor(requests * query_len, requests, query_len, 2)) or ()
    assert (first.rows.start, first.rows.stop, second.rows.stop) == (0, second.rows.start, requests * query_len)
    reqs = [part.descriptor.num_reqs for part in (first, second)]
    assert reqs == [(requests + 1) // 2, requests // 2]
    for part in (first, second):
        expected = BatchDescriptor(part.rows.stop - part.rows.start, part.descriptor.num_reqs, query_len, 2)
        assert part.descriptor == expected


@pytest.mark.parametrize("requests", [None, 1, 3, 7])
def test_the_rows_of_other_batches_are_cut_in_the_middle(requests: int | None) -> None:
    first, second = micro_batches(BatchDescriptor(7, requests)) or ()
    assert (first.rows, second.rows) == (slice(0, 4), slice(4, 7))
    assert first.descriptor == BatchDescriptor(4, requests and min(4, requests))
    assert second.descriptor == BatchDescriptor(3, requests and min(3, requests))


@pytest.mark.parametrize("batch", [BatchDescriptor(1), BatchDescriptor(1, 1, 1), BatchDescriptor(5, 1, 5)])
def test_a_single_row_or_request_is_not_split(batch: BatchDescriptor) -> None:
    assert micro_batches(batch) is None
