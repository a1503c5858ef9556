"""Every batch gets the graph that holds it, or a reason why it runs eagerly."""

from __future__ import annotations

import itertools
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simplegraph.base.config import AttentionCGSupport, CudaGraphConfig, CudaGraphMode
from simplegraph.base.errors import CaptureSizeError, ConfigError, InputError
from simplegraph.base.reasons import Reason
from simplegraph.batch import dispatch as dispatch_module
from simplegraph.batch.dispatch import Dispatch, Dispatcher, resolve_mode
from simplegraph.batch.sizes import BatchDescriptor, default_sizes

NONE, PIECEWISE, FULL = CudaGraphMode.NONE, CudaGraphMode.PIECEWISE, CudaGraphMode.FULL


FULL_DECODE_ONLY, FULL_AND_PIECEWISE = CudaGraphMode.FULL_DECODE_ONLY, CudaGraphMode.FULL_AND_PIECEWISE


NEVER, SINGLE, UNIFORM, ALWAYS = AttentionCGSupport


def dispatcher(mode="FULL", sizes=(1, 2, 4, 8), support=ALWAYS, lora_cases=(0,), requests=None, **settings):
    config = CudaGraphConfig(mode=mode, capture_sizes=sizes, **settings)
    return Dispatcher(config, support, lora_cases=lora_cases, requests=requests)


class TestFull:
    def test_exact(self):
        assert dispatcher().dispatch(4) == Dispatch(FULL, BatchDescriptor(4), Reason.EXACT, 0)

    def test_padded(self):
        assert dispatcher().dispatch(5) == Dispatch(FULL, BatchDescriptor(8), Reason.PADDED, 3)

    def test_too_large_runs_eagerly_as_it_is(self):
        assert dispatcher().dispatch(9) == Dispatch(NONE, BatchDescriptor(9), Reason.BATCH_TOO_LARGE, 0)

    def test_one_set_of_graphs_serves_decode_and_mixed(self):
        full = dispatcher(requests=True)
        decode = full.dispatch(4, num_reqs=4, uniform_query_len=1)
        mixed = full.dispatch(4, num_reqs=2)
        assert decode.descriptor == mixed.descriptor == BatchDescriptor(4, 4)

    def test_requests_are_padded_to_the_most_there_can_be(self):
        full = dispatcher(max_num_seqs=3)
        assert full.dispatch(7, num_reqs=2).descriptor == BatchDescriptor(8, 3)
        assert full.dispatch(2, num_reqs=2).descriptor == BatchDescriptor(2, 2)
        assert full.dispatch(7).descriptor == BatchDescriptor(8, 3)
        assert dispatcher(max_num_seqs=3, requests=False).dispatch(7, num_reqs=2).descriptor == BatchDescriptor(8)

    def test_more_requests_than_the_limit_never_get_a_graph_for_fewer(self):
        answer = dispatcher(max_num_seqs=3).dispatch(7, num_reqs=5)
        assert answer == Dispatch(NONE, BatchDescriptor(7, 5), Reason.BATCH_TOO_LARGE, 0)

    def test_full_ruled_out_by_the_caller(self):
        full = dispatcher()
        assert full.dispatch(4, allow_full=False).reason is Reason.MIXED_BATCH
        assert full.dispatch(4).mode is FULL

    def test_padding_off(self):
        exact = dispatcher(padding=False)
        assert exact.dispatch(8).reason is Reason.EXACT
        assert exact.dispatch(5) == Dispatch(NONE, BatchDescriptor(5), Reason.SIZE_NOT_CAPTURED, 0)
        assert exact.dispatch(9).reason is Reason.BATCH_TOO_LARGE


class TestNone:
    def test_nothing_runs_as_a_graph(self):
        off = dispatcher("NONE")
        assert off.dispatch(4) == Dispatch(NONE, BatchDescriptor(4), Reason.SWITCHED_OFF, 0)
        assert off.descriptors() == []
        assert off.dispatch(4, num_active_loras=3).reason is Reason.SWITCHED_OFF


class TestPiecewise:
    def test_requests_do_not_matter(self):
        piecewise = dispatcher("PIECEWISE", max_num_seqs=2)
        expected = Dispatch(PIECEWISE, BatchDescriptor(8), Reason.PADDED, 2)
        assert piecewise.dispatch(6) == expected
        assert piecewise.dispatch(6, num_reqs=5) == expected
        assert piecewise.dispatch(6, num_reqs=6, uniform_query_len=1) == expected
        assert piecewise.dispatch(6, allow_full=False) == expected


class TestUniformDecode:
    def test_decode_is_full_and_mixed_is_piecewise(self):
        both = dispatcher("FULL_AND_PIECEWISE")
        decode = both.dispatch(3, 3, 1)
        assert decode == Dispatch(FULL, BatchDescriptor(4, 4, 1), Reason.PADDED, 1)
        assert both.dispatch(3, 2) == Dispatch(PIECEWISE, BatchDescriptor(4), Reason.PADDED, 1)

    def test_mixed_batches_never_get_a_decode_graph(self):
        decode_only = dispatcher("FULL_DECODE_ONLY")
        assert decode_only.dispatch(4, 2) == Dispatch(NONE, BatchDescriptor(4, 2), Reason.MIXED_BATCH, 0)
        assert decode_only.dispatch(4).reason is Reason.MIXED_BATCH
        assert decode_only.dispatch(4, 2, 2).reason is Reason.MIXED_BATCH
        assert decode_only.dispatch(4, 4, 1).mode is FULL

    def test_speculative_decode(self):
        speculative = dispatcher("FULL_AND_PIECEWISE", sizes=[3, 6, 12, 24], uniform_query_len=3)
        assert speculative.dispatch(9, 3, 3) == Dispatch(FULL, BatchDescriptor(12, 4, 3), Reason.PADDED, 3)
        # Plain decode steps between the speculative ones are not what was captured.
        assert speculative.dispatch(3, 3, 1).mode is PIECEWISE

    def test_a_decode_batch_above_the_decode_graphs_uses_a_mixed_one(self):
        both = dispatcher("FULL_AND_PIECEWISE", sizes=[1, 2, 4, 8, 16], max_num_seqs=6)
        assert both.dispatch(5, 5, 1).descriptor == BatchDescriptor(6, 6, 1)
        assert both.dispatch(7, 7, 1) == Dispatch(PIECEWISE, BatchDescriptor(8), Reason.PADDED, 1)
        assert both.dispatch(17, 17, 1) == Dispatch(NONE, BatchDescriptor(17, 17, 1), Reason.BATCH_TOO_LARGE, 0)

    def test_a_decode_batch_that_rules_out_full_runs_piecewise(self):
        both = dispatcher("FULL_AND_PIECEWISE")
        assert both.dispatch(4, 4, 1, allow_full=False).mode is PIECEWISE
        assert dispatcher("FULL_DECODE_ONLY").dispatch(4, 4, 1, allow_full=False).reason is Reason.MIXED_BATCH

    def test_the_largest_decode_batch_is_served_off_the_grid(self):
        decode_only = Dispatcher(CudaGraphConfig(mode="FULL_DECODE_ONLY", max_num_seqs=100))
        assert decode_only.dispatch(97, 97, 1).descriptor == BatchDescriptor(100, 100, 1)
        assert decode_only.dispatch(100, 100, 1).reason is Reason.EXACT
        assert decode_only.dispatch(101, 101, 1).reason is Reason.BATCH_TOO_LARGE

    def test_numbers_that_contradict_are_refused(self):
        with pytest.raises(InputError, match="num_tokens == num_reqs"):
            dispatcher("FULL_AND_PIECEWISE").dispatch(5, 2, 2)


class TestLoras:
    def test_smallest_case_that_holds(self):
        loras = dispatcher(lora_cases=(4, 0, 1))
        assert [loras.dispatch(4, num_active_loras=n).descriptor.num_active_loras for n in (0, 1, 2, 4)] == [0, 1, 4, 4]

    def test_ranks_agree_on_a_case_that_holds_the_most_that_one_has(self):
        loras = dispatcher(lora_cases=(4, 0, 1))
        agreed = [loras.agreed(FULL, 4, n, num_tokens=4) for n in (0, 1, 2, 4, 5)]
        assert [each.descriptor.num_active_loras for each in agreed] == [0, 1, 4, 4, 5]
        assert [each.mode for each in agreed] == [FULL] * 4 + [NONE]

    def test_too_many(self):
        answer = dispatcher(lora_cases=(0, 1)).dispatch(4, num_active_loras=2)
        assert answer == Dispatch(NONE, BatchDescriptor(4, num_active_loras=2), Reason.BATCH_TOO_LARGE, 0)

    @pytest.mark.parametrize("cases", [(), (-1,), ("1",), (1.5,)])
    def test_refuses(self, cases):
        with pytest.raises(ConfigError, match="lora_cases"):
            dispatcher(lora_cases=cases)


class TestDescriptors:
    def test_full(self):
        assert dispatcher(sizes=[1, 4]).descriptors() == [(FULL, BatchDescriptor(4)), (FULL, BatchDescriptor(1))]

    def test_full_for_an_engine(self):
        engine = dispatcher(sizes=[1, 4], max_num_seqs=2)
        assert engine.descriptors() == [(FULL, BatchDescriptor(4, 2)), (FULL, BatchDescriptor(1, 1))]
        wrapper = dispatcher(sizes=[1, 4], max_num_seqs=2, requests=False)
        assert wrapper.descriptors() == [(FULL, BatchDescriptor(4)), (FULL, BatchDescriptor(1))]

    def test_both_kinds_largest_first(self):
        both = dispatcher("FULL_AND_PIECEWISE", sizes=[2, 4], uniform_query_len=2)
        assert both.descriptors() == [
            (FULL, BatchDescriptor(4, 2, 2)),
            (PIECEWISE, BatchDescriptor(4)),
            (FULL, BatchDescriptor(2, 1, 2)),
            (PIECEWISE, BatchDescriptor(2)),
        ]

    def test_lora_cases_are_captured_each(self):
        found = dispatcher(sizes=[1, 2], lora_cases=(0, 2)).descriptors()
        assert [(key.num_tokens, key.num_active_loras) for _, key in found] == [(2, 2), (2, 0), (1, 2), (1, 0)]

    def test_default_sizes(self):
        assert len(Dispatcher(CudaGraphConfig()).descriptors()) == 51
        assert len(Dispatcher(CudaGraphConfig(mode="FULL_AND_PIECEWISE")).descriptors()) == 102
        assert len(default_sizes(512)) == 51


@st.composite
def batches(draw):
    query_len = draw(st.sampled_from([None, 1, 2, 3]))
    if query_len is not None:
        reqs = draw(st.integers(1, 40))
        return reqs * query_len, reqs, query_len
    tokens = draw(st.integers(1, 80))
    return tokens, draw(st.integers(1, tokens)), None


@given(
    mode=st.sampled_from(CudaGraphMode),
    support=st.sampled_from(AttentionCGSupport),
    sizes=st.sets(st.integers(1, 64), min_size=1, max_size=6),
    query_len=st.integers(1, 3),
    max_num_seqs=st.none() | st.integers(1, 40),
    padding=st.booleans(),
    batch=batches(),
    requests=st.booleans(),
    loras=st.integers(0, 3),
    allow_full=st.booleans(),
)
def test_every_answer_can_be_captured_and_holds_its_batch(
    mode, support, sizes, query_len, max_num_seqs, padding, batch, requests, loras, allow_full
):
    tokens, reqs, batch_query_len = batch
    if not requests:
        reqs = batch_query_len = None
    logging.getLogger("simplegraph").disabled = True
    try:
        config = CudaGraphConfig(
            mode=mode, capture_sizes=sizes, uniform_query_len=query_len, max_num_seqs=max_num_seqs, padding=padding
        )
        asked = Dispatcher(config, support, lora_cases=(0, 2), requests=requests)
    finally:
        logging.getLogger("simplegraph").disabled = False
    answer = asked.dispatch(tokens, reqs, batch_query_len, loras, allow_full=allow_full)
    key = answer.descriptor
    if answer.mode is NONE:
        assert key == BatchDescriptor(tokens, reqs, batch_query_len, loras)
        assert answer.padding == 0
        assert answer.reason not in (Reason.EXACT, Reason.PADDED)
        return
    assert (answer.mode, key) in asked.descriptors()
    assert answer.padding == key.num_tokens - tokens >= 0
    assert answer.reason is (Reason.PADDED if answer.padding else Reason.EXACT)
    assert padding or not answer.padding
    assert allow_full or answer.mode is PIECEWISE
    assert key.num_active_loras >= loras
    if key.num_reqs is not None:
        assert key.num_reqs >= reqs
    if key.uniform_query_len is not None:
        assert key.uniform_query_len == batch_query_len == query_len


class TestHotPath:
    def test_the_same_batch_is_decided_once(self, monkeypatch):
        full = dispatcher()
        first = full.dispatch(5, num_reqs=2)
        monkeypatch.setattr(Dispatcher, "_decide", None)
        assert full.dispatch(5, num_reqs=2) is first
        assert full.dispatch(5, 2) is first

    def test_answers_differ_by_every_argument(self):
        both = dispatcher("FULL_AND_PIECEWISE", lora_cases=(0, 1))
        calls = itertools.product([(4, 4, 1), (4, 4, None), (4, None, None)], (0, 1), (True, False))
        answers = [both.dispatch(*batch, loras, allow_full=full) for batch, loras, full in calls]
        assert [(a.mode, a.descriptor.num_active_loras) for a in answers] == [
            (FULL, 0), (PIECEWISE, 0), (FULL, 1), (PIECEWISE, 1),
            *[(PIECEWISE, 0), (PIECEWISE, 0), (PIECEWISE, 1), (PIECEWISE, 1)] * 2,
        ]  # fmt: skip

    def test_odd_traffic_does_not_grow_memory_for_ever(self, monkeypatch):
        monkeypatch.setattr(dispatch_module, "_MAX_REMEMBERED", 10)
        full = dispatcher()
        for size in range(1, 100):
            assert full.dispatch(size).mode is (FULL if size <= 8 else NONE)
        assert len(full._answers) <= 10

    def test_an_error_is_not_remembered(self):
        full = dispatcher()
        for _ in range(2):
            with pytest.raises(CaptureSizeError):
                full.dispatch(0)


class TestResolveMode:
    @pytest.mark.parametrize(
        ("mode", "support", "query_len", "expected"),
        [
            *[(mode, ALWAYS, q, mode) for mode in CudaGraphMode for q in (1, 3)],
            *[(mode, support, 1, mode) for mode in (NONE, PIECEWISE) for support in AttentionCGSupport],
            *[(FULL, UNIFORM, q, FULL_AND_PIECEWISE) for q in (1, 3)],
            *[(mode, UNIFORM, q, mode) for mode in (FULL_DECODE_ONLY, FULL_AND_PIECEWISE) for q in (1, 3)],
            (FULL, SINGLE, 1, FULL_AND_PIECEWISE),
            (FULL_DECODE_ONLY, SINGLE, 1, FULL_DECODE_ONLY),
            (FULL_AND_PIECEWISE, SINGLE, 1, FULL_AND_PIECEWISE),
            *[(mode, SINGLE, 2, PIECEWISE) for mode in (FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE)],
            *[(mode, NEVER, 1, PIECEWISE) for mode in (FULL, FULL_DECODE_ONLY, FULL_AND_PIECEWISE)],
        ],
    )
    def test_table(self, mode, support, query_len, expected):
        resolved, message = resolve_mode(mode, support, query_len)
        assert resolved is expected
        assert (message is None) == (resolved is mode)

    def test_a_downgrade_names_what_is_lost_its_cost_and_the_way_out(self):
        # vLLM #49547: a silent downgrade cost 16%.
        _, message = resolve_mode(FULL, UNIFORM, 1)
        assert message is not None
        for part in (
            "FULL is lowered to FULL_AND_PIECEWISE",
            "UNIFORM_BATCH",
            "mixed batches",
            "17 us",
            "accept it with mode=",
        ):
            assert part in message

    def test_the_message_names_the_query_length_that_rules_full_out(self):
        _, message = resolve_mode(FULL_AND_PIECEWISE, SINGLE, 4)
        assert message is not None
        assert "query length 4" in message

    def test_logged_once_not_per_batch(self, caplog):
        with caplog.at_level(logging.WARNING, logger="simplegraph"):
            lowered = dispatcher("FULL", support=UNIFORM)
            lowered.dispatch(4)
            lowered.dispatch(5)
        assert len(caplog.records) == 1
        assert lowered.mode is FULL_AND_PIECEWISE
        assert lowered.dispatch(4, 4, 1).mode is FULL
        assert lowered.dispatch(4, 2).mode is PIECEWISE

    def test_nothing_logged_when_nothing_is_lost(self, caplog):
        dispatcher("FULL_AND_PIECEWISE", support=UNIFORM)
        assert caplog.records == []


class TestAdvice:
    """The advice for a batch without a graph names a setting that helps."""

    @pytest.mark.parametrize(
        ("settings", "batch", "advice", "change"),
        [
            ({"capture_sizes": [1, 8]}, (9,), "the largest is 8: add 9 to capture_sizes", {"capture_sizes": [1, 8, 9]}),
            (
                {},
                (600,),
                "the largest is 512: set capture_sizes=simplegraph.default_sizes(600)",
                {"capture_sizes": default_sizes(600)},
            ),
            ({"max_num_tokens": 64}, (65,), "the largest is 64: raise max_num_tokens to 65", {"max_num_tokens": 65}),
            (
                {"max_num_tokens": 64, "capture_sizes": [64]},
                (65,),
                "raise max_num_tokens to 65 and add 65 to capture_sizes",
                {"max_num_tokens": 65, "capture_sizes": [64, 65]},
            ),
            (
                {"max_num_seqs": 4, "capture_sizes": [8]},
                (8, 8, 1),
                "8 requests: raise max_num_seqs to 8",
                {"max_num_seqs": 8},
            ),
            (
                {"mode": "FULL_DECODE_ONLY", "uniform_query_len": 2, "decode_capture_sizes": [4]},
                (8, 4, 2),
                "the largest is 4: add 8 to decode_capture_sizes",
                {"decode_capture_sizes": [4, 8]},
            ),
            (
                {"padding": False, "capture_sizes": [1, 8]},
                (3,),
                "batch size 3: add 3 to capture_sizes",
                {"capture_sizes": [1, 3, 8]},
            ),
        ],
    )
    def test_following_it_gives_the_batch_a_graph(self, settings, batch, advice, change):
        config = CudaGraphConfig(**settings)
        told = Dispatcher(config)
        refused = told.dispatch(*batch)
        assert refused.mode is NONE
        assert told.advice(refused).endswith(advice)
        assert Dispatcher(config.replace(**change)).dispatch(*batch).mode is FULL


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_ranks_run_the_smallest_captured_graph_that_holds_what_they_agree_on(mode):
    """A full one if all of them can; ranks that were eager where such a graph is would lose all that it saves."""
    config = CudaGraphConfig(mode=mode, capture_sizes=[4, 8, 16], decode_capture_sizes=[2, 6], max_num_seqs=12)
    ranks = Dispatcher(config, lora_cases=(0, 3))
    captured = ranks.descriptors()
    modes = []
    for lowest, size, loras in itertools.product((NONE, PIECEWISE, FULL), (1, 2, 6, 8, 16, 17), (0, 1, 3, 4)):
        found = ranks.agreed(lowest, size, loras, num_tokens=1)
        fitting = [
            (key.num_tokens, key)
            for kind, key in captured
            if kind is found.mode and key.num_tokens >= size and key.num_active_loras == (3 if loras else 0)
        ]
        holding = {
            kind
            for kind, key in captured
            if key.num_tokens >= size and loras <= key.num_active_loras and kind in (lowest, PIECEWISE)
        }
        wanted = NONE if lowest is NONE else next((kind for kind in (FULL, PIECEWISE) if kind in holding), NONE)
        assert found.mode is wanted, (lowest, size, loras)
        assert found.reason is Reason.OTHER_RANKS
        if wanted is not NONE:
            assert found.descriptor == min(fitting)[1]
        assert found.descriptor.num_tokens >= size
        assert found.padding == found.descriptor.num_tokens - 1
        modes.append(found.mode)
    assert {NONE, FULL} <= set(modes) if "FULL" in mode else {NONE, PIECEWISE} <= set(modes)
    with pytest.raises(CaptureSizeError, match="at least one token"):
        ranks.agreed(FULL, 0, 0, num_tokens=0)
