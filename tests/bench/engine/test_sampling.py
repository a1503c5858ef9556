"""Sampling: the distribution that temperature, top-k and top-p ask for."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.engine.request import MAX_TOP_K, SEEDS, SamplingParams
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
    each = [dataclasses.replace(params, seed=seed) for seed in range(100)]
    positions = range(ROWS // 100)  # the noise of near seeds and of near positions is independent
    tokens = sample(LOGITS.expand(ROWS, -1), each * len(positions), [at for at in positions for _ in each])
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
    tokens = sample(logits, params, [0] * 4)
    assert tokens[:3].tolist() == logits[:3].argmax(-1).tolist()
    assert 0 <= int(tokens[3]) < 50


def test_top_p_of_one_keeps_every_token() -> None:
    scores = torch.randn(3, 1000) * 30
    assert torch.equal(keep_likeliest(scores, [SamplingParams(temperature=1.0, top_k=1000)] * 3), scores)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(temperature=1e-46), SamplingParams(temperature=1e-38), SamplingParams(top_p=1e-46)],
    ids=str,
)
def test_values_that_are_zero_in_float32_take_the_likeliest_token(params: SamplingParams) -> None:
    logits = torch.randn(50, 97, generator=torch.Generator().manual_seed(0)) * 10
    params = dataclasses.replace(params, temperature=params.temperature or 1.0)
    tokens = sample(logits, [params] * 50, [0] * 50)
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_the_largest_values_of_each_parameter_draw_a_token() -> None:
    params = SamplingParams(temperature=3e38, top_k=MAX_TOP_K, seed=SEEDS[0])
    tokens = sample(LOGITS.expand(2, -1), [params, dataclasses.replace(params, seed=SEEDS[1])], [0, 2**31])
    assert all(0 <= token < len(LOGITS) for token in tokens.tolist())


def test_a_row_with_a_seed_depends_on_its_position_and_on_no_other_row() -> None:
    # Ties at the cut: whichever are kept must be the same, however many rows are sorted together.
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).mul(4).round()
    params = [SamplingParams(temperature=1.0, top_k=row % 60, seed=row) for row in range(40)]
    together = sample(logits, params, range(40)).tolist()
    for row in range(40):
        assert sample(logits[row : row + 1], [params[row]], [row]).tolist() == together[row : row + 1]
    unseeded = [SamplingParams(temperature=1.0) if row % 2 else one for row, one in enumerate(params)]
    assert sample(logits, unseeded, range(40)).tolist()[::2] == together[::2]
    # The noise of seed 1 at position 2 must not be that of seed 2 at position 1.
    level = torch.zeros(100, 1000)
    drawn = [
        [int(token) for token in sample(level, [SamplingParams(temperature=1.0, seed=seed)] * 100, range(100))]
        for seed in range(20)
    ]
    assert len({token for row in drawn for token in row}) > 800
    assert all(a[1:] != b[:-1] for a in drawn for b in drawn)
