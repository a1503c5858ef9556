"""Sampling: the distribution that temperature, top-k and top-p ask for."""

from __future__ import annotations

import pytest
import torch

from bench.engine.request import SamplingParams
from bench.engine.sampling import keep_likeliest, sample

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -3.0])
ROWS = 20_000


def expected(params: SamplingParams) -> torch.Tensor:
    """The probabilities, worked out one token after the other."""
    probabilities = (LOGITS.double() / params.temperature).softmax(0)
    kept, mass = [], 0.0
    for rank, token in enumerate(probabilities.argsort(descending=True).tolist()):
        if params.top_k and rank >= params.top_k:
            break
        kept.append(token)
    among = probabilities[kept] / probabilities[kept].sum()
    final = []
    for token, probability in zip(kept, among.tolist(), strict=True):
        if mass < params.top_p:
            final.append(token)
        mass += probability
    result = torch.zeros_like(probabilities)
    result[final] = probabilities[final] / probabilities[final].sum()
    return result


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=1.0, top_k=3),
        SamplingParams(temperature=1.0, top_p=0.8),
        SamplingParams(temperature=2.0, top_k=4, top_p=0.7),
        SamplingParams(temperature=1.0, top_p=0.01),
    ],
    ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_asked_for(params: SamplingParams) -> None:
    generators = [torch.Generator().manual_seed(row) for row in range(ROWS)]
    tokens = sample(LOGITS.expand(ROWS, -1), [params] * ROWS, generators)
    probabilities = expected(params)
    counts = tokens.bincount(minlength=len(LOGITS)).double()
    assert counts[probabilities == 0].sum() == 0
    likely = probabilities > 0
    chi_square = ((counts - ROWS * probabilities)[likely] ** 2 / (ROWS * probabilities[likely])).sum()
    assert chi_square < 25.7  # 5 degrees of freedom at most: once in ten thousand, and the seeds are fixed


def test_each_row_follows_its_own_parameters() -> None:
    logits = torch.randn(4, 50)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(),
        SamplingParams(temperature=9.0),
    ]
    tokens = sample(logits, params, [None] * 4)
    assert tokens[:3].tolist() == logits[:3].argmax(-1).tolist()
    assert 0 <= int(tokens[3]) < 50


def test_top_p_of_one_keeps_every_token() -> None:
    scores = torch.randn(3, 1000) * 30
    assert torch.equal(keep_likeliest(scores, [SamplingParams(temperature=1.0, top_k=1000)] * 3), scores)
