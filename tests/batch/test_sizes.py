from __future__ import annotations

import itertools
import math
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplegraph.base.config import CudaGraphConfig
from simplegraph.base.errors import CaptureSizeError, ConfigError, SimpleGraphError
from simplegraph.batch.planner import _Costs, plan_sizes
from simplegraph.batch.sizes import default_sizes, mixed_sizes, padded_size, uniform_decode_sizes

ROOT = pathlib.Path(__file__).parents[2]
sizes_strategy = st.sets(st.integers(1, 300), min_size=1, max_size=20)


@pytest.mark.parametrize("module", ["batch.sizes", "batch.dispatch", "base.config"])
def test_deciding_what_runs_needs_no_torch(module):
    code = f"import sys, simplegraph.{module}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class TestDefaultSizes:
    def test_512_is_the_grid_engines_know(self):
        sizes = default_sizes(512)
        assert len(sizes) == 51
        assert sizes[:5] == (1, 2, 4, 8, 16)
        assert sizes[33:37] == (248, 256, 272, 288)
        assert sizes[-1] == 512

    @pytest.mark.parametrize(
        ("largest", "expected"),
        [
            (1, (1,)),
            (2, (1, 2)),
            (3, (1, 2, 3)),
            (4, (1, 2, 4)),
            (8, (1, 2, 4, 8)),
            (20, (1, 2, 4, 8, 16, 20)),
        ],
    )
    def test_small(self, largest, expected):
        assert default_sizes(largest) == expected

    def test_largest_off_the_grid_is_captured(self):
        assert default_sizes(300)[-3:] == (272, 288, 300)

    @pytest.mark.parametrize("largest", [0, -1, 2.0, True, None])
    def test_refuses(self, largest):
        with pytest.raises(CaptureSizeError, match=r"expected a whole number of at least 1"):
            default_sizes(largest)

    @given(st.integers(1, 5000))
    def test_ascending_unique_and_never_wasting_more_than_the_grid_step(self, largest):
        sizes = default_sizes(largest)
        assert list(sizes) == sorted(set(sizes))
        assert sizes[-1] == largest
        assert all(high - low <= 16 for low, high in itertools.pairwise(sizes))


class TestResolvedSizes:
    def test_defaults(self):
        assert mixed_sizes(CudaGraphConfig()) == default_sizes(512)
        assert uniform_decode_sizes(CudaGraphConfig()) == default_sizes(512)

    def test_explicit_sizes_are_kept(self):
        assert mixed_sizes(CudaGraphConfig(capture_sizes=[8, 3, 1])) == (1, 3, 8)

    def test_defaults_stop_at_max_num_tokens(self):
        assert mixed_sizes(CudaGraphConfig(max_num_tokens=100)) == default_sizes(100)

    def test_max_num_seqs_off_the_grid_still_has_a_graph(self):
        # vLLM #57355: without 100 itself, batches of 97 to 100 requests ran eagerly.
        sizes = uniform_decode_sizes(CudaGraphConfig(max_num_seqs=100))
        assert sizes[-3:] == (88, 96, 100)

    def test_max_num_seqs_leaves_mixed_batches_alone(self):
        assert mixed_sizes(CudaGraphConfig(max_num_seqs=100)) == default_sizes(512)

    def test_own_sizes_above_max_num_seqs_give_way_to_it(self):
        config = CudaGraphConfig(capture_sizes=[1, 4, 64, 128], max_num_seqs=50)
        assert uniform_decode_sizes(config) == (1, 4, 50)

    def test_own_sizes_below_max_num_seqs_are_all_there_is(self):
        assert uniform_decode_sizes(CudaGraphConfig(capture_sizes=[1, 4], max_num_seqs=50)) == (1, 4)

    def test_multiples_of_the_query_length(self):
        config = CudaGraphConfig(capture_sizes=[1, 2, 4, 8], uniform_query_len=3)
        assert uniform_decode_sizes(config) == (3, 6, 9)

    def test_max_num_tokens_not_a_multiple_of_the_query_length(self):
        config = CudaGraphConfig(max_num_tokens=16, uniform_query_len=3)
        assert uniform_decode_sizes(config) == (3, 6, 9, 15)

    @given(
        st.none() | st.sets(st.integers(1, 200), min_size=1, max_size=8),
        st.none() | st.integers(1, 100),
        st.none() | st.integers(200, 400),
        st.integers(1, 8),
    )
    def test_every_possible_decode_batch_up_to_the_largest_size_is_served(self, sizes, seqs, tokens, query_len):
        config = CudaGraphConfig(
            capture_sizes=sizes, max_num_seqs=seqs, max_num_tokens=tokens, uniform_query_len=query_len
        )
        uniform = uniform_decode_sizes(config)
        limit = min((seqs or 10**9) * query_len, (tokens or 10**9) // query_len * query_len)
        assert list(uniform) == sorted(set(uniform))
        assert all(size % query_len == 0 for size in uniform)
        assert uniform[-1] == min(limit, -(-mixed_sizes(config)[-1] // query_len) * query_len)


class TestPaddedSize:
    def test_padded(self):
        assert [padded_size((1, 2, 4, 8), n) for n in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, None]

    def test_dropped_sizes_never_come_back(self):
        # Sizes are those that remain, so nothing pads to a size without a graph.
        sizes = uniform_decode_sizes(CudaGraphConfig(capture_sizes=[8, 64, 128], max_num_seqs=50))
        assert padded_size(sizes, 9) == 50
        assert padded_size(sizes, 51) is None

    @given(sizes_strategy, st.integers(1, 400))
    def test_smallest_that_holds(self, sizes, n):
        assert padded_size(sorted(sizes), n) == min((size for size in sizes if size >= n), default=None)


def wasted(histogram, sizes):
    return sum(count * (min(s for s in sizes if s >= size) - size) for size, count in histogram.items() if count)


def brute_force(histogram, num_graphs):
    """The least waste of any choice, and the fewest graphs that reach it."""
    points = sorted(size for size, count in histogram.items() if count)
    options = [
        (wasted(histogram, chosen), len(chosen))
        for k in range(1, num_graphs + 1)
        for chosen in itertools.combinations(points, k)
        if chosen[-1] == points[-1]
    ]
    return min(options)


class TestPlanSizes:
    def test_picks_what_traffic_has(self):
        plan = plan_sizes({1: 500, 33: 400, 97: 10}, 3)
        assert plan.sizes == (1, 33, 97)
        assert plan.waste_after == 0
        assert plan.waste_before == 400 * (40 - 33)
        assert plan.tokens == 500 + 400 * 33 + 97 * 10

    def test_one_graph_is_the_largest_batch(self):
        plan = plan_sizes({1: 1000, 100: 1}, 1)
        assert plan.sizes == (100,)
        assert plan.waste_after == 99_000

    def test_more_graphs_than_useful_are_not_captured(self):
        assert plan_sizes({3: 1, 9: 1}, 64).sizes == (3, 9)

    def test_sizes_never_seen_are_not_captured(self):
        assert plan_sizes({3: 1, 5: 0, 9: 1, 700: 0}, 64).sizes == (3, 9)

    def test_numpy_histograms(self):
        numpy = pytest.importorskip("numpy")
        sizes, counts = numpy.unique(numpy.array([3, 3, 7]), return_counts=True)
        plan = plan_sizes(dict(zip(sizes, counts, strict=True)), 2)
        assert plan.sizes == (3, 7)
        assert all(type(size) is int for size in plan.sizes)

    def test_prints_what_it_saves(self):
        assert str(plan_sizes({33: 1000, 64: 10}, 2)) == (
            "2 sizes: 33, 64\n"
            "  padding 0 tokens (0.0%); 7,000 tokens (20.8%) with the 11 default sizes (real tokens: 33,640)"
        )

    def test_feeds_the_configuration(self):
        plan = plan_sizes({5: 2, 6: 1}, 2)
        assert CudaGraphConfig(capture_sizes=plan.sizes).capture_sizes == (5, 6)

    def test_frozen(self):
        with pytest.raises(AttributeError):
            plan_sizes({1: 1}, 1).sizes = ()

    @given(
        st.dictionaries(st.integers(1, 60), st.integers(0, 50), min_size=1, max_size=9),
        st.integers(1, 6),
    )
    def test_no_choice_wastes_less(self, histogram, num_graphs):
        seen = {size: count for size, count in histogram.items() if count}
        if not seen:
            return
        plan = plan_sizes(histogram, num_graphs)
        assert list(plan.sizes) == sorted(set(plan.sizes))
        assert plan.waste_after == wasted(histogram, plan.sizes)
        assert (plan.waste_after, len(plan.sizes)) == brute_force(histogram, num_graphs)
        assert plan.waste_before == wasted(histogram, default_sizes(max(seen)))

    @given(st.dictionaries(st.integers(1, 60), st.floats(1e-6, 1e6), min_size=1, max_size=8), st.integers(1, 5))
    def test_weights_may_be_fractions(self, histogram, num_graphs):
        plan = plan_sizes(histogram, num_graphs)
        least, _ = brute_force(histogram, num_graphs)
        assert math.isclose(plan.waste_after, least, rel_tol=1e-9, abs_tol=1e-9)

    def test_never_worse_than_the_defaults_with_as_many_graphs(self):
        histogram = {size: 1 + (size * 7919) % 101 for size in range(1, 513)}
        plan = plan_sizes(histogram, len(default_sizes(512)))
        assert plan.waste_after < plan.waste_before

    def test_two_thousand_sizes_and_64_graphs_are_quick(self, monkeypatch):
        priced, cost = [], _Costs.cost
        monkeypatch.setattr(_Costs, "cost", lambda *at: priced.append(None) or cost(*at))
        plan = plan_sizes({size: 1 + size % 7 for size in range(1, 2001)}, 64)
        assert len(priced) < 64 * 2000 * 20, "of 64 * 2000 * 1000 pairs of a size and the one before it"
        assert len(plan.sizes) == 64
        assert plan.sizes[-1] == 2000

    @pytest.mark.parametrize(
        ("histogram", "num_graphs", "message"),
        [
            ({}, 4, "no batches"),
            ({3: 0}, 4, "no batches"),
            ([3, 4], 4, "expected a mapping"),
            ({3: -1}, 4, "count of size 3 is -1"),
            ({3: float("nan")}, 4, "count of size 3 is nan"),
            ({3: float("inf")}, 4, "count of size 3 is inf"),
            ({3: "many"}, 4, "count of size 3 is 'many'"),
            ({3: None}, 4, "count of size 3 is None"),
            ({0: 1}, 4, "histogram size is 0"),
            ({-2: 1}, 4, "histogram size is -2"),
            ({2.5: 1}, 4, r"histogram size is 2\.5"),
            ({"2": 1}, 4, "histogram size is '2'"),
            ({True: 1}, 4, "histogram size is True"),
            ({3: 1}, 0, "num_graphs is 0"),
            ({3: 1}, -1, "num_graphs is -1"),
            ({3: 1}, 1.5, r"num_graphs is 1\.5"),
        ],
    )
    def test_refuses(self, histogram, num_graphs, message):
        with pytest.raises(ConfigError, match=message) as caught:
            plan_sizes(histogram, num_graphs)
        assert isinstance(caught.value, (SimpleGraphError, ValueError))
