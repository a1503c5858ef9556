"""One thread for torch: operators this small gain nothing from more, and wait long where cores are shared."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.tools.measure import few_threads


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with few_threads(torch.device("cpu")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the processes that tests start
        patch.setenv("BENCH_COMMIT", "c0ffee")  # an unpacked sdist has none
        yield
