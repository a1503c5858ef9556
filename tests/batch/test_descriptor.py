"""A descriptor is a value that refuses batches which cannot be."""

from __future__ import annotations

import copy
import pickle

import pytest

from simplegraph.base.errors import CaptureSizeError, InputError
from simplegraph.batch.sizes import BatchDescriptor


class TestBatchDescriptor:
    def test_is_a_key(self):
        assert BatchDescriptor(8, 8, 1) == BatchDescriptor(8, 8, 1)
        assert {BatchDescriptor(8, 8, 1): "graph"}[BatchDescriptor(8, 8, 1)] == "graph"
        assert pickle.loads(pickle.dumps(BatchDescriptor(8, 4, 2, 1))) == BatchDescriptor(8, 4, 2, 1)
        assert copy.deepcopy(BatchDescriptor(8)) == BatchDescriptor(8)

    def test_another_count_of_requests_is_another_graph(self):
        # vLLM #35918: a graph captured for another count hangs.
        keys = {
            BatchDescriptor(8),
            BatchDescriptor(8, 8),
            BatchDescriptor(8, 4),
            BatchDescriptor(8, 8, 1),
            BatchDescriptor(8, 8, 1, 2),
        }
        assert len(keys) == 5

    def test_orders_by_size_also_with_parts_unknown(self):
        ordered = [
            BatchDescriptor(2),
            BatchDescriptor(8),
            BatchDescriptor(8, 4),
            BatchDescriptor(8, 4, 2),
            BatchDescriptor(8, 4, 2, 1),
            BatchDescriptor(16),
        ]
        shuffled = ordered[3:] + ordered[:3]
        assert sorted(shuffled) == ordered
        assert BatchDescriptor(2) <= BatchDescriptor(2)
        assert BatchDescriptor(3) > BatchDescriptor(2)
        with pytest.raises(TypeError):
            _ = BatchDescriptor(2) < 3

    def test_frozen(self):
        with pytest.raises(AttributeError):
            BatchDescriptor(8).num_tokens = 9

    def test_prints_what_is_known(self):
        assert str(BatchDescriptor(8)) == "8 tokens"
        assert str(BatchDescriptor(8, 4, 2, 1)) == "8 tokens, 4 requests, uniform decode of 2, 1 LoRAs"

    @pytest.mark.parametrize("num_tokens", [0, -1])
    def test_empty(self, num_tokens):
        with pytest.raises(CaptureSizeError, match=f"num_tokens is {num_tokens}"):
            BatchDescriptor(num_tokens)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ((8.0,), r"num_tokens is 8\.0"),
            ((True,), "num_tokens is True"),
            (("8",), "num_tokens is '8'"),
            ((8, 0), "num_reqs is 0"),
            ((8, 9), "num_reqs is 9"),
            ((8, 2.0), r"num_reqs is 2\.0"),
            ((8, None, 2), "num_reqs=None"),
            ((8, 3, 2), "num_tokens == num_reqs"),
            ((8, 4, 0), "num_tokens == num_reqs"),
            ((8, 4, "2"), "uniform_query_len is '2'"),
            ((8, None, None, -1), "num_active_loras is -1"),
        ],
    )
    def test_numbers_that_do_not_fit(self, arguments, message):
        with pytest.raises(InputError, match=message):
            BatchDescriptor(*arguments)
