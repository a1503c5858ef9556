"""The decode kernel itself in Triton's interpreter, which needs no GPU: with TRITON_INTERPRET=1."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from interpreted import needs_interpreter

from simplegraph.attention import SDPABackend, TritonDecodeBackend
from tests.attention.backends.test_lse import check_lse
from tests.support.attention_engine import AttentionEngine, Requests

pytestmark = needs_interpreter
PAGE = 4


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def sinks(heads: int) -> dict[int, torch.Tensor]:
    return dict(enumerate(torch.linspace(-3, 4, 2 * heads).view(2, heads)))


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("query_len", [1, 3])
@pytest.mark.parametrize(
    ("window", "options"),
    [
        (None, {}),
        (1, {}),
        (5, {"sinks": sinks(4)}),
        (90, {"softcap": 1.5}),
        (100, {"sinks": sinks(4), "softcap": 2.0}),
        (None, {"sinks": sinks(4), "softcap": 2.0, "scale": 0.4}),
        (10**10, {}),
    ],
)
def test_windows_caps_and_sinks_in_parts_and_whole(
    monkeypatch: pytest.MonkeyPatch, window: int | None, options: dict[str, Any], query_len: int, splits: int
) -> None:
    """Lengths around the borders of window, page and the kernel's blocks of 64 keys, and a padding row."""
    monkeypatch.setattr(TritonDecodeBackend, "_num_splits", lambda self, num_reqs: splits)
    make = functools.partial(TritonDecodeBackend, mixed=SDPABackend, **options)
    cpu = torch.device("cpu")
    served = AttentionEngine(make, cpu, window=window, mode="NONE", max_len=200, num_pages=400, max_tokens=64)
    backend: Any = served.backend
    backend._parts = torch.empty(10**6)
    near = {1, 3, 4, 5, 63, 65, 99, 100, 130, 193} | {min(window or 9, 190) + more for more in (-1, 0, 1, 2)}
    lengths = sorted(length for length in near if length >= query_len)
    for chunk in (lengths[:8], lengths[8:]):
        pages = itertools.count(1)
        tables = [[next(pages) for _ in range(-(-length // PAGE))] for length in chunk]
        _, error = served.step(Requests([query_len] * len(chunk), chunk, tables), query_len)
        assert error <= 1e-5


def test_the_log_sum_exp_is_that_of_the_scores_to_the_base_e() -> None:
    make = functools.partial(TritonDecodeBackend, mixed=SDPABackend)
    check_lse(make, torch.device("cpu"), torch.float32, 1e-5)
