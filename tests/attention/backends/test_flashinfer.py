"""FlashInfer in every mode, by a stand-in whose kernel computes what was planned, from the tables that it points to."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import CudaGraphMode, ReplayError
from simplegraph.attention import FlashInferBackend
from simplegraph.attention.backends import flashinfer
from tests.attention.backends.test_lse import check_lse
from tests.support.attention_engine import AttentionEngine, Requests
from tests.support.attention_libraries import FlashInferModule, stand_in_flashinfer

CPU = torch.device("cpu")
FULL, PIECEWISE, NONE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE, CudaGraphMode.NONE
ERROR = 4e-3  # bfloat16 rounding


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> FlashInferModule:
    return stand_in_flashinfer(monkeypatch)


def captured(mode: str, **settings: Any) -> AttentionEngine:
    scores = {name: settings.pop(name) for name in ("softcap", "workspace_bytes") if name in settings}
    made = functools.partial(FlashInferBackend, **scores)
    served = AttentionEngine(made, CPU, mode=mode, **{"dtype": torch.bfloat16} | settings)
    assert served.manager.capture(served.forward).failed == {}
    return served


@pytest.mark.parametrize("masks", [{}, {"window": 6}, {"softcap": 2.0}])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("query_len", [1, 4])
def test_decodes_in_full_graphs_are_float64s_at_any_lengths(
    module: FlashInferModule, query_len: int, layout: str, masks: dict[str, Any]
) -> None:
    sizes = [query_len, 4 * query_len, 8 * query_len]
    settings: dict[str, Any] = {"uniform_query_len": query_len, "layout": layout, **masks}
    served = captured("FULL_DECODE_ONLY", decode_capture_sizes=sizes, **settings)
    for seed in range(12):
        ran, error = served.step(served.requests("decode", 1 + seed % 8, seed, query_len), seed)
        assert ran is FULL
        assert error <= ERROR


@pytest.mark.parametrize("mode", ["FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
def test_batches_of_all_kinds_are_float64s_in_every_mode(module: FlashInferModule, mode: str) -> None:
    served = captured(mode, capture_sizes=[1, 4, 8, 16, 32])
    seen = set()
    for seed in range(24):
        ran, error = served.step(served.requests("decode" if seed % 2 else "mixed", 1 + seed % 8, seed), seed)
        assert error <= ERROR
        seen.add(ran)
    assert seen == ({FULL, PIECEWISE} if mode == "FULL_AND_PIECEWISE" else {CudaGraphMode[mode]})


def test_every_replay_has_a_plan_of_its_own_lengths_and_padding_has_none(module: FlashInferModule) -> None:
    """After longer requests in the same rows: what they had there would be read."""
    served = captured("FULL_DECODE_ONLY", decode_capture_sizes=[8])
    tables: Any = served.backend._tables  # type: ignore[union-attr]
    long = Requests([1] * 8, [17, 18, 19, 20, 21, 22, 23, 24], [list(range(6 * row, 6 * row + 6)) for row in range(8)])
    short = Requests([1] * 3, [3, 9, 1], [[50], [51, 52, 53], [54]])
    for requests in (long, short):
        module.plans.clear()
        ran, error = served.step(requests, 1)
        assert ran is FULL
        assert error <= ERROR
        padding = 8 - len(requests.seq_lens)
        pages = [-(-length // 4) for length in requests.seq_lens] + [0] * padding
        assert module.plans == [(pages, [*requests.seq_lens, *[0] * padding])]
        assert tables.last_page_len[:8].tolist() == [(n - 1) % 4 + 1 for n in requests.seq_lens] + [1] * padding
        assert torch.equal(tables.device_indptr[:9].diff(), torch.tensor(pages, dtype=torch.int32))


def test_the_log_sum_exp_is_that_of_the_scores_to_the_base_e(module: FlashInferModule) -> None:
    check_lse(FlashInferBackend, CPU, torch.bfloat16, 2e-2)


class Moody(FlashInferModule):
    """A planner whose plan in a graph depends on the lengths."""

    def plan(self, floats: Tensor, ints: Tensor, pinned: Tensor, *arguments: Any) -> list[int]:
        return [*super().plan(floats, ints, pinned, *arguments), int(arguments[1][-1]) // 20]


def test_a_plan_that_is_not_the_captures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph holds the capture's numbers as constants."""
    stand_in_flashinfer(monkeypatch, Moody())
    served = captured("FULL_DECODE_ONLY", decode_capture_sizes=[8])
    few = Requests([1] * 8, [4] * 8, [[row] for row in range(8)])
    served.step(few, 1)
    many = Requests([1] * 8, [20] * 8, [list(range(5 * row, 5 * row + 5)) for row in range(8)])
    with pytest.raises(ReplayError, match=r"FlashInfer planned .* where this size was captured with"):
        served.step(many, 1)
    assert served.step(few, 2)[0] is FULL


class Small(FlashInferModule):
    """A planner that asks for memory for partial results."""

    def plan(self, floats: Tensor, ints: Tensor, pinned: Tensor, *arguments: Any) -> list[int]:
        if len(floats) < 4096:
            raise RuntimeError("Buffer overflow when allocating memory for batch_prefill_tmp_v")
        return super().plan(floats, ints, pinned, *arguments)


def test_memory_for_partial_results_grows_until_it_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_flashinfer(monkeypatch, Small())
    served = captured("FULL_DECODE_ONLY", decode_capture_sizes=[4, 8], workspace_bytes=1000)
    assert served.step(served.requests("decode", 3, 1), 1)[1] <= ERROR
    assert served.backend._proto._float_workspace_buffer.nbytes == 8000  # type: ignore[union-attr]


@pytest.mark.parametrize("extra", flashinfer._PLANNERS, ids=["0.5.3", "0.7.0", "0.7.4"])
def test_planners_of_all_releases_are_called_with_their_own_arguments(
    monkeypatch: pytest.MonkeyPatch, extra: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    stand_in_flashinfer(monkeypatch, FlashInferModule(extra))
    served = captured("FULL_DECODE_ONLY", decode_capture_sizes=[4, 8])
    for seed in range(6):
        assert served.step(served.requests("decode", 1 + seed, seed), seed)[1] <= ERROR
    assert served.backend._planner == extra  # type: ignore[union-attr]
    assert caplog.records == []


def test_a_planner_of_another_release_is_left_to_flashinfers_own_plan(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stand_in_flashinfer(monkeypatch, FlashInferModule((0, False, "new")))
    with caplog.at_level(logging.WARNING, logger="simplegraph"):
        served = captured("FULL_AND_PIECEWISE", capture_sizes=[4, 8])
        for seed in range(12):
            requests = served.requests("decode" if seed % 2 else "mixed", 1 + seed % 8, seed)
            assert served.step(requests, seed)[1] <= ERROR
    said = [record.message for record in caplog.records if "FlashInfer" in record.message]
    assert len(said) == 1
    assert "its own slower `plan` prepares every step" in said[0]
