"""Attention inside graphs: captured once, replayed at other lengths, equal to float64; the cache is exactly eager's."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from simplegraph import (
    AttentionCGSupport,
    BatchDescriptor,
    CaptureError,
    ConfigError,
    CudaGraphMode,
    InputError,
    ReplayError,
)
from simplegraph.attention import (
    AttentionBackend,
    BackendGroup,
    PagedKVCache,
    SDPABackend,
    attend,
    attending,
    minimum_support,
)
from tests.support.attention_engine import AttentionEngine

FULL, PIECEWISE, NONE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE, CudaGraphMode.NONE


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def engine(device: torch.device, **settings: Any) -> Any:
    return AttentionEngine(SDPABackend, device, **settings)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY", "NONE"])
def test_every_mode_gives_float64s_answer_and_eagers_cache_at_any_lengths(
    device: torch.device, mode: str, layout: str
) -> None:
    served = engine(device, mode=mode, capture_sizes=[1, 4, 8, 16, 32], layout=layout)
    assert served.manager.capture(served.forward).failed == {}
    seen = set()
    for seed in range(25):
        kind = "decode" if seed % 2 else "mixed"
        ran, error = served.step(served.requests(kind, 1 + seed % 8, seed), seed)
        assert error <= 1e-5
        seen.add(ran)
    modes = {
        "FULL": {FULL},
        "PIECEWISE": {PIECEWISE},
        "FULL_AND_PIECEWISE": {FULL, PIECEWISE},
        "FULL_DECODE_ONLY": {FULL, NONE},
        "NONE": {NONE},
    }
    assert seen == modes[mode]


def test_uniform_decode_of_several_tokens_replays_a_full_graph(device: torch.device) -> None:
    served = engine(device, mode="FULL_DECODE_ONLY", uniform_query_len=4, capture_sizes=[4, 16, 32])
    served.manager.capture(served.forward)
    for seed in range(12):
        ran, error = served.step(served.requests("decode", 1 + seed % 8, seed, query_len=4), seed)
        assert ran is FULL
        assert error <= 1e-5


@pytest.mark.parametrize("max_reqs", [1, 2, 4, 8])
def test_any_number_of_requests_is_captured_and_served(device: torch.device, max_reqs: int) -> None:
    served = engine(device, mode="FULL_AND_PIECEWISE", max_reqs=max_reqs, capture_sizes=[1, 8, 32])
    served.manager.capture(served.forward)
    for seed in range(6):
        _, error = served.step(served.requests("mixed", max_reqs, seed), seed)
        assert error <= 1e-5


def test_a_capture_and_its_warmup_write_nothing_to_the_cache(device: torch.device) -> None:
    served = engine(device, mode="FULL_AND_PIECEWISE", capture_sizes=[4, 8])
    served.cache._memory.fill_(7.0)
    served.manager.capture(served.forward)
    assert bool((served.cache._memory[:, :, : served.cache.num_pages] == 7.0).all())


def test_a_step_that_was_not_described_is_refused_before_anything_is_written(device: torch.device) -> None:
    served = engine(device, mode="FULL", capture_sizes=[4, 8])
    served.manager.capture(served.forward)
    step = served.requests("decode", 4, 1)
    served.metadata.set([1] * 8, [3] * 8, [[page] for page in range(1, 9)])
    before = served.cache._memory.clone()
    with pytest.raises(ReplayError, match=r"BatchMetadata\.set"):
        served.manager.run(served.manager.dispatch(4, 4, 1), served.forward)
    assert torch.equal(served.cache._memory, before)
    assert served.step(step, 1)[1] <= 1e-5


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_rank_without_requests_replays_a_dummy_step(device: torch.device, mode: str) -> None:
    served = engine(device, mode=mode, capture_sizes=[4, 8])
    served.manager.capture(served.forward)
    served.step(served.requests("decode", 4, 1), 1)
    cache = served.cache._memory.clone()
    batch = served.manager.dispatch(4, 4, 1)
    served.metadata.set_dummy(4, 4, 1)
    outputs = served.manager.run(batch, served.forward)
    assert batch.mode is CudaGraphMode[mode]
    assert all(output.isfinite().all() for output in outputs)
    assert torch.equal(served._pages(), cache[:, :, : served.cache.num_pages])


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_a_model_may_write_the_cache_itself_and_bring_the_output(device: torch.device, mode: str) -> None:
    served = engine(device, mode=mode, capture_sizes=[1, 4, 8, 16, 32])
    outs = torch.zeros(2, *served.q.shape, device=device)

    def forward(mode: CudaGraphMode, descriptor: BatchDescriptor) -> list[torch.Tensor]:
        rows, results = descriptor.num_tokens, []
        with attending(served.backend, mode, descriptor):
            for layer, out in enumerate(outs):
                slots = served.backend.live.slot_mapping
                served.cache.write(layer, served.k[:rows], served.v[:rows], slots)
                results.append(attend(served.q[:rows] * (layer + 1), None, None, layer, out=out[:rows]))
        return results

    served.forward = forward
    served.manager.capture(forward)
    for seed in range(10):
        _, error = served.step(served.requests("mixed", 1 + seed % 8, seed), seed)
        assert error <= 1e-5


def test_half_a_cache_entry_or_a_wrong_output_is_refused(device: torch.device) -> None:
    served = engine(device, mode="NONE")
    served.metadata.set([1, 1], [1, 1], [[1], [2]])
    q, k = served.q[:2], served.k[:2]
    with attending(served.backend, NONE, BatchDescriptor(2)):
        with pytest.raises(InputError, match="one of k and v is None"):
            attend(q, k, None, 0)
        with pytest.raises(InputError, match="out is"):
            attend(q, k, k, 0, out=q[:1])


def test_a_step_runs_once(device: torch.device) -> None:
    served = engine(device, mode="FULL", capture_sizes=[4])
    served.manager.capture(served.forward)
    served.step(served.requests("decode", 4, 1), 1)
    batch = served.manager.dispatch(4, 4, 1)
    before = served.cache._memory.clone()
    served.k.add_(1)
    with pytest.raises(ReplayError, match="ran already"):
        served.manager.run(batch, served.forward)
    assert torch.equal(served.cache._memory, before)
    served.metadata.repeat()
    served.manager.run(batch, served.forward)
    assert not torch.equal(served.cache._memory, before)
    served.step(served.requests("decode", 3, 2), 2)


def test_no_step_is_repeated_before_there_is_one(device: torch.device) -> None:
    with pytest.raises(ReplayError, match="no batch is set"):
        engine(device, mode="NONE").metadata.repeat()


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_backend_that_is_no_hook_is_never_captured(device: torch.device, mode: str) -> None:
    served = engine(device, mode=mode, capture_sizes=[4, 8])
    served.manager.hooks.clear()
    with pytest.raises(CaptureError, match="add_hooks"):
        served.manager.capture(served.forward)
    assert served.manager.programs == {}


def test_pages_must_be_of_every_cache(device: torch.device) -> None:
    served = engine(device, mode="NONE")
    small = PagedKVCache(2, 8, 4, 2, 16, dtype=torch.float32, device=device)
    SDPABackend(small, served.metadata, num_heads=4)
    assert served.metadata.num_pages == 8


@pytest.mark.parametrize("layer", [-1, 2])
def test_a_layer_that_the_cache_does_not_have_is_refused(device: torch.device, layer: int) -> None:
    served = engine(device, mode="NONE")
    served.metadata.set([1], [1], [[1]])
    with (
        attending(served.backend, NONE, BatchDescriptor(1)),
        pytest.raises(InputError, match=f"layer is {layer}; the cache has layers 0 to 1"),
    ):
        attend(served.q[:1], served.k[:1], served.v[:1], layer)


def test_a_backend_that_returns_its_result_is_refused(device: torch.device) -> None:
    class Returning(SDPABackend):
        support, name = AttentionCGSupport.ALWAYS, "returning"

        def run(self, layer: int, q: Any, out: Any, metadata: Any) -> Any:
            return q * 2

    served = AttentionEngine(Returning, device, mode="NONE")
    with pytest.raises(ConfigError, match="must write into `out`"):
        served.step(served.requests("decode", 2, 1), 1)


def test_a_group_of_a_list_is_refused(device: torch.device) -> None:
    with pytest.raises(ConfigError, match="mapping"):
        BackendGroup([engine(device, mode="NONE").backend])  # type: ignore[arg-type]


def test_attention_outside_its_context_is_refused(device: torch.device) -> None:
    served = engine(device, mode="NONE")
    with pytest.raises(ReplayError, match="attending"):
        attend(served.q, served.k, served.v, 0)
    with pytest.raises(ReplayError, match="not prepared"):
        _ = served.backend.live


def test_rows_that_are_not_the_steps_are_refused(device: torch.device) -> None:
    served = engine(device, mode="NONE")
    served.metadata.set([1, 1], [2, 3], [[1], [2]])
    with attending(served.backend, NONE, BatchDescriptor(2, 2)):
        with pytest.raises(InputError, match=r"q is \(3, 4, 16\).*expected \(2, 4, 16\)"):
            attend(served.q[:3], served.k[:3], served.v[:3], 0)
        with pytest.raises(InputError, match=r"k has shape"):
            attend(served.q[:2], served.k[:2, :1], served.v[:2], 0)


# Support is declared.


def test_support_is_never_inherited() -> None:
    with pytest.raises(ConfigError, match="Quiet does not declare support and name"):

        class Quiet(SDPABackend):
            def run(self, *args: Any) -> None: ...


class Limited(SDPABackend):
    support = AttentionCGSupport.UNIFORM_BATCH
    name = "limited"

    def run(self, *args: Any) -> None:
        super().run(*args)


def test_the_least_backend_decides(device: torch.device) -> None:
    served = engine(device, mode="NONE")
    limited = Limited(served.cache, served.metadata, num_heads=4)
    group = BackendGroup({0: served.backend, 1: limited})
    assert group.support is AttentionCGSupport.UNIFORM_BATCH
    assert minimum_support([served.backend]) is AttentionCGSupport.ALWAYS
    with pytest.raises(ConfigError, match="no attention backend"):
        minimum_support([])


def test_a_group_serves_each_layer_by_its_own_backend(device: torch.device) -> None:
    def make(cache: Any, metadata: Any, num_heads: int) -> Any:
        backends = [kind(cache, metadata, num_heads=num_heads) for kind in (SDPABackend, Limited)]
        group = BackendGroup(dict(enumerate(backends)))
        return group

    served = AttentionEngine(make, device, mode="FULL_AND_PIECEWISE", capture_sizes=[4, 8, 32])
    served.manager.capture(served.forward)
    for seed in range(8):
        ran, error = served.step(served.requests("mixed" if seed % 2 else "decode", 4, seed), seed)
        assert error <= 1e-5
        assert ran in (FULL, PIECEWISE)
    served.metadata.set([1], [1], [[1]])
    entered = attending(served.backend, NONE, BatchDescriptor(1, 1))
    with entered, pytest.raises(ConfigError, match="no backend serves layer 7"):
        attend(served.q[:1], served.k[:1], served.v[:1], 7)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"num_heads": 3}, "multiple of the cache's 2"), ({"page_size": 8}, "pages of 4 tokens")],
)
def test_a_backend_that_does_not_fit_its_cache_is_refused(
    device: torch.device, changes: dict[str, Any], words: str
) -> None:
    from simplegraph.attention import BatchMetadata

    served = engine(device, mode="NONE")
    metadata = BatchMetadata(
        max_num_tokens=8, max_num_reqs=8, max_model_len=8, page_size=changes.get("page_size", 4), device=device
    )
    with pytest.raises(ConfigError, match=words):
        SDPABackend(served.cache, metadata, num_heads=changes.get("num_heads", 4))


def test_an_abstract_backend_needs_no_declaration() -> None:
    class Shared(AttentionBackend):
        """Has no `run`, so it serves nothing itself."""

    assert dataclasses.is_dataclass(Shared) is False
