"""Sliding windows, soft caps and sinks on a GPU: every backend beside float64, the engine's tokens in every mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simplegraph import CudaGraphMode
from simplegraph.attention import SDPABackend, TritonDecodeBackend
from tests.attention.test_windows import Windowed
from tests.gpu.attention_backends import ATTENTION, ERROR, FA3, OTHERS, SHAPE
from tests.gpu.engine_modes import TINY, assert_nearly_same_in_half_precision, assert_same_in_every_mode, generate

FULL, PIECEWISE = CudaGraphMode.FULL, CudaGraphMode.PIECEWISE
on_sdpa: Any = functools.partial(TritonDecodeBackend, mixed=SDPABackend)
TRITON = [pytest.param(on_sdpa, id="Triton")]
MISTRAL = {"num_heads": 32, **SHAPE}
GPT_OSS: dict[str, Any] = {"num_heads": 64, **SHAPE, "head_dim": 64}
GEMMA: dict[str, Any] = {"num_heads": 16, **SHAPE, "head_dim": 256}
pytestmark = pytest.mark.usefixtures("timed_inference")


def check(make: Any, kinds: list[str], rounds: int, query_len: int = 1, **settings: Any) -> set[CudaGraphMode]:
    """Run steps whose pages before the window hold NaN and have no valid id; return the modes that ran."""
    limits = {"max_reqs": 64, "max_len": 2048, "num_pages": 8000, "max_tokens": 256} | settings
    served = Windowed(make, torch.device("cuda"), **limits)
    served.lost = []
    served.manager.capture(served.forward)
    seen, errors = set(), []
    for seed in range(rounds):
        kind = kinds[seed % len(kinds)]
        requests = served.requests(kind, [1, 2, 7, 8, 33, 64][seed % 6], seed, query_len)
        ran, error = served.run_step(requests, seed)
        seen.add(ran)
        errors.append(error)
    assert max(errors) <= ERROR, sorted(errors)[-5:]
    return seen


@pytest.mark.parametrize("window", [1, 15, 128, 1000, 10**6])
@pytest.mark.parametrize("query_len", [1, 4])
@pytest.mark.parametrize("make", [*FA3, *TRITON, *OTHERS])
def test_decode_with_a_window_in_full_graphs(make: Any, query_len: int, window: int) -> None:
    sizes = [query_len * count for count in (1, 2, 8, 48, 64)]
    settings = {"mode": "FULL_DECODE_ONLY", "uniform_query_len": query_len, "decode_capture_sizes": sizes}
    assert check(make, ["decode"], 30, query_len, window=window, **MISTRAL, **settings) == {FULL}


@pytest.mark.parametrize("make", FA3)
def test_mixed_batches_with_a_window_in_full_graphs(make: Any) -> None:
    settings = {"mode": "FULL", "capture_sizes": [16, 64, 256], "max_tokens": 256}
    assert check(make, ["mixed"], 40, window=100, **MISTRAL, **settings) == {FULL}


@pytest.mark.parametrize("make", [*FA3, *TRITON, *OTHERS])
def test_mixed_batches_between_segments_and_decode_in_full_graphs(make: Any) -> None:
    settings = {"mode": "FULL_AND_PIECEWISE", "capture_sizes": [16, 64, 256], "max_len": 512}
    assert check(make, ["decode", "mixed"], 24, window=100, **MISTRAL, **settings) == {FULL, PIECEWISE}


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("make", [*FA3, *TRITON, *OTHERS])
def test_a_soft_cap(make: Any, window: int | None) -> None:
    """A cap so low that it changes every score."""
    capped = functools.partial(make, softcap=2.0, scale=0.2)
    settings = {"mode": "FULL_DECODE_ONLY", "decode_capture_sizes": [1, 8, 64]}
    assert check(capped, ["decode"], 18, window=window, **GEMMA, **settings) == {FULL}


@pytest.mark.parametrize("window", [None, 128])
@pytest.mark.parametrize("make", [*FA3, *TRITON])
def test_sinks(make: Any, window: int | None) -> None:
    values = torch.linspace(-3, 4, 128, device="cuda", dtype=torch.bfloat16).view(2, 64)
    with_sinks = functools.partial(make, sinks=dict(enumerate(values)))
    settings = {"mode": "FULL_DECODE_ONLY", "decode_capture_sizes": [1, 8, 64]}
    assert check(with_sinks, ["decode"], 18, window=window, **GPT_OSS, **settings) == {FULL}


def one_group_has_a_window(engine: Any) -> Callable[[], object]:
    assert [backend.window for backend in engine.runner.backends] == [None, 50]
    return bool


def hybrid(dtype: torch.dtype) -> Any:
    """A Qwen whose last two of four layers have a window of 50 keys."""
    transformers = pytest.importorskip("transformers")
    from bench.models.llama import CacheShape, build_llama

    shape = {**TINY, "max_position_embeddings": 1024}
    shape |= {"use_sliding_window": True, "sliding_window": 50, "max_window_layers": 2, "initializer_range": 0.1}
    config = transformers.Qwen2Config(**shape)
    return build_llama(config, CacheShape(1, 16), 512, device="cuda", dtype=dtype, seed=3, windows=True)


def test_a_model_of_two_groups_generates_the_same_tokens_in_every_mode() -> None:
    assert_same_in_every_mode(functools.partial(generate, hybrid(torch.float32), one_group_has_a_window))


@pytest.mark.parametrize("attention", ATTENTION)
def test_a_model_of_two_groups_in_half_precision(attention: str) -> None:
    answer = functools.partial(generate, hybrid(torch.bfloat16), one_group_has_a_window)
    assert_nearly_same_in_half_precision(answer, attention)
