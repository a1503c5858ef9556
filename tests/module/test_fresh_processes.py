"""What is captured as a process's first work serves the calls after it; on a GPU tests/gpu runs more cases."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.fresh_process import NEEDS_TRANSFORMERS, check

CASES = ["sdpa", "lstm", "llama-without-cache", "graph-generation", "train-step", "manager"]


@pytest.mark.parametrize("case", CASES)
def test_later_calls_are_all_replayed(case: str) -> None:
    if case in NEEDS_TRANSFORMERS:
        pytest.importorskip("transformers", minversion="5.0")
    check(case, "cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the README takes the GPU where there is one")
def test_the_readmes_snippet_captures_what_it_calls() -> None:
    check("readme", "cpu")


def test_a_setting_that_the_first_forward_changes_does_not_hide_graphs() -> None:
    check("changes-a-setting", "cpu")
