"""The index of the largest score, read in parts, is the one that torch finds."""

from __future__ import annotations

import math

import pytest
import torch

from simplegraph.fused.torch_operators import most_likely


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [1, 100, 128, 1024, 50257, 128256])
@pytest.mark.parametrize("rows", [1, 5, 49])
def test_it_is_the_index_that_argmax_returns(rows: int, words: int, dtype: torch.dtype, device: torch.device) -> None:
    scores = torch.randn(rows, words, device=device).to(dtype)  # in bfloat16 many are equal: the first counts
    assert torch.equal(most_likely(scores), scores.argmax(dim=-1))
    scores[:, words // 2 :] = scores.max()
    assert torch.equal(most_likely(scores), scores.argmax(dim=-1))
    scores[-1] = -math.inf  # all words are forbidden
    assert torch.equal(most_likely(scores), scores.argmax(dim=-1))


def test_a_score_that_is_no_number_wins_as_it_does_in_argmax(device: torch.device) -> None:
    scores = torch.randn(2, 1024, device=device)
    scores[0, 700:] = math.nan
    scores[1, 300] = math.inf
    assert most_likely(scores).tolist() == [700, 300] == scores.argmax(dim=-1).tolist()
