"""What is captured as a process's first work on a GPU serves the calls after it."""

from __future__ import annotations

import pytest

from tests.gpu.fresh_process import CASES, NEEDS_TRANSFORMERS, check


@pytest.mark.parametrize("case", CASES)
def test_later_calls_are_all_replayed(case: str) -> None:
    if case in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", minversion="5.0")
    check(case, "cuda")
