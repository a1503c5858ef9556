"""FlashAttention in every mode, by stand-ins that read lengths and schedules where the kernels do."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import BatchDescriptor, ConfigError, CudaGraphMode
from simplegraph.attention import BatchMetadata, FlashAttentionBackend, PagedKVCache, TritonDecodeBackend, attending
from simplegraph.attention.backends import triton_decode
from tests.attention.backends.test_lse import check_lse
from tests.support.attention_engine import AttentionEngine
from tests.support.attention_libraries import PlainFlash, VllmFlash, stand_in_flash
from tests.support.reference_attention import reference_attention

CPU = torch.device("cpu")
FULL, PIECEWISE, NONE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE, CudaGraphMode.NONE
ERROR = 4e-3  # bfloat16 rounding
BUILDS: dict[str, Any] = {"3": (VllmFlash, 3, 16), "2": (VllmFlash, 2, 16), "2 alone": (PlainFlash, 2, 256)}


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(params=BUILDS)
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A build and one of its versions: the module, the version and the tokens of a page."""
    kind, version, page_size = BUILDS[request.param]
    module = kind()
    stand_in_flash(monkeypatch, module)
    return module, version, page_size


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> VllmFlash:
    found = VllmFlash()
    stand_in_flash(monkeypatch, found)
    return found


def engine(version: int | None = None, page_size: int = 16, **settings: Any) -> AttentionEngine:
    scores = {name: settings.pop(name) for name in ("softcap", "sinks", "max_splits") if name in settings}
    made = functools.partial(FlashAttentionBackend, version=version, **scores)
    limits: dict[str, Any] = {"num_pages": 32, "max_len": 48, "max_tokens": 32, "dtype": torch.bfloat16}
    return AttentionEngine(made, CPU, page_size=page_size, **limits | settings)


def captured(version: int, page_size: int, mode: str, **settings: Any) -> AttentionEngine:
    served = engine(version, page_size, mode=mode, **settings)
    assert served.manager.capture(served.forward).failed == {}
    return served


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("query_len", [1, 4])
def test_decodes_in_full_graphs_are_float64s_at_any_lengths(build: Any, query_len: int, window: int | None) -> None:
    _, version, page_size = build
    settings: dict[str, Any] = {"decode_capture_sizes": [query_len, 4 * query_len, 8 * query_len]}
    served = captured(version, page_size, "FULL_DECODE_ONLY", uniform_query_len=query_len, window=window, **settings)
    for seed in range(12):
        ran, error = served.step(served.requests("decode", 1 + seed % 8, seed, query_len), seed)
        assert ran is FULL
        assert error <= ERROR


def test_a_graph_of_decodes_knows_how_many_tokens_a_request_has(build: Any) -> None:
    """Version 2 splits keys, and takes heads for tokens, only if that is 1."""
    module, version, page_size = build
    served = captured(version, page_size, "FULL_DECODE_ONLY", decode_capture_sizes=[4, 8])
    assert {call.max_seqlen_q for call in module.calls} == {1}
    module.calls.clear()
    served.step(served.requests("decode", 3, 1), 1)
    assert module.calls == []  # a replay runs no Python


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE"])
def test_batches_of_all_kinds_are_float64s_in_every_mode(build: Any, mode: str) -> None:
    module, version, page_size = build
    served = captured(version, page_size, mode, capture_sizes=[1, 4, 8, 16, 32])
    seen = set()
    for seed in range(24):
        kind = "decode" if seed % 2 else "mixed"
        ran, error = served.step(served.requests(kind, 1 + seed % 8, seed), seed)
        assert error <= ERROR
        seen.add(ran)
    # Version 2 has full graphs for uniform batches alone: FULL is lowered to FULL_AND_PIECEWISE.
    both = {FULL, PIECEWISE}
    expected = {"FULL": {FULL} if version == 3 else both, "FULL_AND_PIECEWISE": both}
    assert seen == expected.get(mode, {CudaGraphMode[mode]})
    assert {call.version for call in module.calls} == {version}


def test_a_graph_of_one_token_a_request_reads_no_query_lengths_in_version_2(build: Any) -> None:
    """Why version 2 declares uniform batches: the same call, captured for single tokens, is wrong for others."""
    module, version, page_size = build
    served = engine(version, page_size, mode="NONE")
    served.fill(1)
    seq_lens, table = [9, 5, 7], torch.tensor([[1], [2], [3]], dtype=torch.int32)
    arguments: dict[str, Any] = {"max_seqlen_q": 1, "max_seqlen_k": 48, "block_table": table, "softmax_scale": 0.25}
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    arguments |= {"seqused_k": lengths, "fa_version": version} if isinstance(module, VllmFlash) else {}
    if not isinstance(module, VllmFlash):
        arguments["cu_seqlens_k"] = torch.tensor([0, 9, 14, 21], dtype=torch.int32)
    q, out = served.q[:3], torch.zeros_like(served.q[:3])
    starts = torch.tensor([0, 2, 2, 3], dtype=torch.int32)  # two tokens, none, one
    if isinstance(module, VllmFlash):
        arguments["out"] = out
    result = module.flash_attn_varlen_func(
        q, served.cache.keys(0), served.cache.values(0), cu_seqlens_q=starts, causal=True, **arguments
    )
    last = reference_attention(q[2:], served.cache, 0, [1], [7], [[3]], 0.25)
    second = reference_attention(q[:2], served.cache, 0, [2], [9], [[1]], 0.25)[1]
    torch.testing.assert_close(result[2].double(), last[0], rtol=2e-2, atol=2e-2)
    assert (result[1].double() - second).norm() > 0.1 * second.norm()


@pytest.mark.parametrize("masks", [{}, {"softcap": 2.0}, {"window": 6, "softcap": 2.0}])
def test_soft_caps_and_windows_in_full_graphs(build: Any, masks: dict[str, Any]) -> None:
    _, version, page_size = build
    served = captured(version, page_size, "FULL_DECODE_ONLY", decode_capture_sizes=[8], **masks)
    for seed in range(6):
        ran, error = served.step(served.requests("decode", 5 + seed % 4, seed), seed)
        assert ran is FULL
        assert error <= ERROR


def test_the_log_sum_exp_is_that_of_the_scores_to_the_base_e(build: Any) -> None:
    _, version, page_size = build
    made = functools.partial(FlashAttentionBackend, version=version)
    check_lse(made, CPU, torch.bfloat16, 2e-2, page_size=page_size)


def test_the_log_sum_exp_has_a_row_for_padding_too(build: Any) -> None:
    """In the breaks of a piecewise graph, where version 2 does not get the rows of padding."""
    _, version, page_size = build
    cache = PagedKVCache(1, 8, page_size, 2, 16, dtype=torch.bfloat16, device=CPU)
    limits = {"max_num_tokens": 4, "max_num_reqs": 4, "max_model_len": 64, "page_size": page_size}
    metadata = BatchMetadata(**limits, device=CPU)  # type: ignore[arg-type]
    backend = FlashAttentionBackend(cache, metadata, num_heads=4, version=version)
    metadata.set([1, 1], [5, 9], [[1], [2]], num_tokens=4, num_reqs=2)
    q = torch.randn(4, 4, 16, dtype=torch.bfloat16)
    with attending(backend, NONE, BatchDescriptor(4, 2)):
        lse = backend.run_with_lse(0, q, torch.zeros_like(q), backend.live)
    assert lse.shape == (4, 4)
    assert lse[:2].isfinite().all()


def test_a_window_of_w_is_w_minus_1_in_the_schedule_and_in_the_kernel(flash: VllmFlash) -> None:
    """Else the schedule is for other work than the kernel's. Only keys of the window are in its longest length."""
    served = engine(window=6, mode="NONE", max_tokens=8, softcap=2.0)
    for seed in range(6):
        served.step(served.requests("mixed" if seed % 2 else "decode", 3, seed), seed)
    longest = 6 - 1 + 8 + 16 - 1
    assert {call[1:3] + call[4:5] for call in flash.calls} == {((5, 0), 2.0, longest)}
    assert {schedule[:3] for schedule in flash.schedules} == {((5, 0), True, longest)}


def test_without_a_window_nothing_is_said_of_one(flash: VllmFlash) -> None:
    served = engine(mode="NONE")
    served.step(served.requests("decode", 3, 1), 1)
    assert {call[1:3] + call[4:5] for call in flash.calls} == {(None, 0.0, 48)}
    assert {schedule[:3] for schedule in flash.schedules} == {((-1, -1), False, 48)}


def test_sinks_go_to_the_kernel_in_bfloat16(flash: VllmFlash) -> None:
    sinks = {layer: torch.full((4,), float(layer), dtype=torch.bfloat16) for layer in range(2)}
    served = engine(sinks=sinks, mode="FULL_DECODE_ONLY", decode_capture_sizes=[4])
    served.manager.capture(served.forward)
    assert served.step(served.requests("decode", 3, 1), 1)[1] <= ERROR
    assert {call.sinks for call in flash.calls} == {torch.bfloat16}
    whole = {layer: one.float() for layer, one in sinks.items()}
    with pytest.raises(ConfigError, match=r"sinks are not torch.bfloat16"):
        engine(sinks=whole, mode="NONE")


def test_all_layers_of_a_forward_share_a_schedule_with_the_splits_of_the_kernels(flash: VllmFlash) -> None:
    """Each forward has its own: one that was captured lies in the graph's memory."""
    served = captured(3, 16, "FULL", capture_sizes=[4, 32], max_splits=7)
    served.step(served.requests("mixed", 3, 1), 1)
    assert all(call.scheduled for call in flash.calls)
    assert 2 * len(flash.schedules) == len(flash.calls)  # of two layers
    assert [call.num_splits for call in flash.calls[::2]] == [schedule[3] for schedule in flash.schedules]
    assert {call.num_splits for call in flash.calls} == {7}


def test_a_step_after_captures_and_replays_has_a_schedule_of_its_own(flash: VllmFlash) -> None:
    served = captured(3, 16, "FULL", capture_sizes=[8])
    for seed in range(6):  # too many tokens for the graph on every second step
        requests = served.requests("mixed" if seed % 2 else "decode", 2 + seed % 2 * 6, seed)
        ran, error = served.step(requests, seed)
        assert ran is (FULL if sum(requests.query_lens) <= 8 else NONE)
        assert error <= ERROR


def test_two_steps_in_one_graph_have_a_schedule_each(build: Any) -> None:
    """Lengths change on the device between them."""
    _, version, page_size = build
    served = engine(version, page_size, mode="FULL_DECODE_ONLY", decode_capture_sizes=[2])
    backend: Any = served.backend
    lengths, out = served.metadata.view(2, 2).seq_lens, torch.zeros_like(served.q[:2])

    def twice(mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[Tensor]:
        first = served.forward(mode, descriptor)
        lengths.add_(1)
        backend.run(0, served.q[:2], out, backend.live)
        lengths.sub_(1)
        return first

    served.manager.capture(twice)
    served.fill(3)
    batch = served.manager.dispatch(2, 2, 1)
    served.metadata.set([1, 1], [7, 20], [[1], [2, 3]], num_tokens=2, num_reqs=2, ahead=1)
    served.manager.run(batch, twice)
    assert batch.mode is FULL
    exact = reference_attention(served.q[:2], served.cache, 0, [1, 1], [8, 21], [[1], [2, 3]], backend.scale)
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_the_most_splits_follow_from_the_padded_shape_alone(flash: VllmFlash) -> None:
    """A graph holds them as a constant, and steps of any number of real requests replay it."""
    served = engine(3, mode="NONE")
    backend: Any = served.backend
    found = set()
    for count in (1, 5, 8):
        requests = served.requests("decode", count, 3)
        served.metadata.set(*requests, num_tokens=32, num_reqs=8)
        found.add(backend.num_splits(served.metadata.view(32, 8)))
    assert found == {4 * 132 // (32 * 2)}
    assert backend.num_splits(served.metadata.view(8, 8)) == 32
    backend.max_splits = 3
    assert backend.num_splits(served.metadata.view(8, 8)) == 3


def test_decodes_of_triton_leave_other_batches_to_version_2(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_flash(monkeypatch, VllmFlash(), capability=(8, 0))
    cache = PagedKVCache(1, 8, 16, 2, 16, dtype=torch.bfloat16, device=CPU)
    metadata = BatchMetadata(max_num_tokens=4, max_num_reqs=4, max_model_len=64, page_size=16, device=CPU)
    found = triton_decode._first_that_works(cache, metadata, num_heads=4)
    assert (found.name, TritonDecodeBackend.support) == ("FlashAttention-2", found.support)
