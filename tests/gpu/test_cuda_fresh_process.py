"""What is captured as a process's first work on a GPU serves the calls after it."""

from __future__ import annotations

import pytest

from tests.gpu import host_inputs
from tests.gpu.fresh_process import CASES, NEEDS_TRANSFORMERS, check


@pytest.mark.parametrize("case", CASES)
def test_later_calls_are_all_replayed(case: str) -> None:
    if case in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", minversion="5.0")
    check(case, "cuda")


@pytest.mark.parametrize("case", host_inputs.CASES)
def test_cpu_inputs_that_a_forward_moves_are_served_right(case: str) -> None:
    if case in host_inputs.NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", minversion="5.0")
    host_inputs.check(case)
