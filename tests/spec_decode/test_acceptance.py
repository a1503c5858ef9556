"""Acceptance: exactly what a plain loop over each request accepts, and the target's distribution."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from simplegraph import InputError
from simplegraph.spec_decode import greedy_accept, rejection_sample, target_probabilities


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]]]:
    reqs, width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    tokens = st.integers(0, 2)  # few, so that long runs happen
    drafts = [[draw(st.integers(-1, 2)) for _ in range(width)] for _ in range(reqs)]
    targets = [[draw(tokens) for _ in range(width + 1)] for _ in range(reqs)]
    return drafts, targets


@given(rounds())
def test_greedy_takes_the_longest_run_of_the_targets_own_tokens(found: tuple[list[list[int]], list[list[int]]]) -> None:
    drafts, targets = found
    accepted = greedy_accept(torch.tensor(drafts), torch.tensor(targets))
    for row, (draft, target) in enumerate(zip(drafts, targets, strict=True)):
        expected = [target[0]]
        for place, token in enumerate(draft):
            if token != target[place]:
                break
            expected.append(target[place + 1])
        assert accepted.counts[row] == len(expected) - 1
        assert accepted.tokens[row].tolist() == expected + [-1] * (len(target) - len(expected))


def sample_one(drafts: list[int], p: torch.Tensor, q: torch.Tensor | None, noise: list[float]) -> list[int]:
    """The rule as it is written, one draft after the other."""
    found = []
    for place, token in enumerate(drafts):
        if token < 0:
            weights = p[place]
        else:
            proposed = torch.zeros_like(p[place]) if q is None else q[place]
            if q is None:
                proposed[token] = 1
            if noise[place] * float(proposed[token]) < float(p[place, token]):
                found.append(token)
                continue
            weights = (p[place] - proposed).clamp(min=0)
        break
    else:
        weights = p[-1]
    running, passed = 0.0, noise[-1] * float(weights.sum())
    for token, weight in enumerate(weights.tolist()):
        running += weight
        if weight > 0 and running > passed:
            return [*found, token]
    raise AssertionError("no token was drawn")


@given(st.integers(0, 10_000), st.booleans())
def test_rejection_sampling_follows_its_rule(seed: int, drawn: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    reqs, width, vocab = 5, 3, 6
    p = torch.randn(reqs, width + 1, vocab, generator=generator, dtype=torch.float64).mul(2).softmax(-1)
    q = torch.randn(reqs, width, vocab, generator=generator, dtype=torch.float64).softmax(-1) if drawn else None
    drafts = torch.randint(-1, vocab, (reqs, width), generator=generator)
    noise = torch.rand(reqs, width + 1, generator=generator, dtype=torch.float64)
    accepted = rejection_sample(drafts, p, noise, q)
    for row in range(reqs):
        expected = sample_one(drafts[row].tolist(), p[row], None if q is None else q[row], noise[row].tolist())
        assert accepted.tokens[row].tolist() == expected + [-1] * (width + 1 - len(expected))
        assert accepted.counts[row] == len(expected) - 1


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", ["drawn", "likeliest", "none"])
def test_what_is_sampled_is_distributed_as_the_target(kind: str) -> None:
    """Two tokens after one another from a Markov chain p, with the drafts of another one q."""
    vocab, width, count = 5, 2, 200_000
    generator = torch.Generator().manual_seed(11)
    p, q = (torch.randn(vocab + 1, vocab, generator=generator, dtype=torch.float64).softmax(-1) for _ in range(2))
    start = torch.full((count,), vocab)
    drafts, proposed = [], []
    for _ in range(width):
        rows = q[drafts[-1] if drafts else start]
        chosen = rows.multinomial(1, generator=generator)[:, 0] if kind == "drawn" else rows.argmax(-1)
        drafts.append(chosen)
        proposed.append(rows)
    guess = torch.stack(drafts, dim=1)
    targets = p[torch.cat((start[:, None], guess), dim=1)]
    if kind == "none":
        guess = torch.full_like(guess, -1)
    noise = torch.rand(count, width + 1, generator=generator)
    accepted = rejection_sample(guess, targets, noise, torch.stack(proposed, 1) if kind == "drawn" else None)
    first = accepted.tokens[:, 0]
    # 4 degrees of freedom: above 18.5 once in a thousand seeds.
    assert chi_square(first.bincount(minlength=vocab), p[vocab]) < 18.5
    seconds = Counter(zip(*accepted.tokens[accepted.counts >= 1, :2].T.tolist(), strict=True))
    for before in range(vocab):
        found = torch.tensor([seconds[before, after] for after in range(vocab)], dtype=torch.float64)
        if found.sum() > 1000:  # of a token that was taken often
            assert chi_square(found, p[before]) < 18.5
    if kind == "none":
        assert accepted.counts.max() == 0
    else:
        assert accepted.counts.max() == width


def test_a_draft_that_draws_as_the_target_does_is_always_taken() -> None:
    p = torch.tensor([[[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]]])
    for first, second in itertools.product(range(2), repeat=2):
        noise = torch.tensor([[0.999999, 0.5 * second]])
        accepted = rejection_sample(torch.tensor([[first]]), p, noise, p[:, :1])
        assert accepted.counts.tolist() == [1]


def test_a_draft_refused_by_rounding_alone_is_replaced_by_a_draw_of_the_target() -> None:
    """Rounding leaves nothing of p - q to draw from: the next token is one of p, and not always the first."""
    q = torch.tensor([0.25, 0.5, 0.25, 0.0])
    p = q * (1 - 2**-22)
    drawn = set()
    for share in (0.1, 0.3, 0.6, 0.9):
        noise = torch.tensor([[1 - 2**-24, share]])
        accepted = rejection_sample(torch.tensor([[1]]), p.expand(1, 2, 4), noise, q.expand(1, 1, 4))
        assert accepted.counts.tolist() == [0], "the case that this is about"
        running = p.double().cumsum(0)
        assert accepted.tokens.tolist() == [[int((running <= share * running[-1]).sum()), -1]]
        drawn.add(int(accepted.tokens[0, 0]))
    assert drawn == {0, 1, 2}


def test_a_token_without_probability_is_never_drawn() -> None:
    p = torch.zeros(4, 2, 5)
    p[..., 2] = 1.0
    noise = torch.tensor([[0.0, 0.0], [0.5, 0.5], [0.999, 1 - 2**-24], [0.0, 0.3]])
    accepted = rejection_sample(torch.tensor([[0], [4], [2], [-1]]), p, noise)
    assert accepted.tokens.tolist() == [[2, -1], [2, -1], [2, 2], [2, -1]]


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.3])
def test_a_temperature_of_zero_is_greedy_beside_sampled_requests(temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(64, 4, 7, generator=generator)
    drafts = logits[:, :3].argmax(-1)
    drafts[::3, 1] = (drafts[::3, 1] + 1) % 7
    temperatures = torch.tensor([0.0, temperature]).repeat(32)
    probabilities = target_probabilities(logits, temperatures)
    accepted = rejection_sample(drafts, probabilities, torch.rand(64, 4, generator=generator))
    expected = greedy_accept(drafts, logits.argmax(-1))
    assert torch.equal(accepted.tokens[::2], expected.tokens[::2])
    assert torch.allclose(probabilities[1::2], (logits[1::2] / temperature).softmax(-1))
    assert temperature < 0.1 or not torch.equal(accepted.tokens[1::2], expected.tokens[1::2])


@pytest.mark.parametrize(
    ("drafts", "targets", "words"),
    [
        (torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64), "K at least 1"),
        (torch.zeros(2, 3), torch.zeros(2, 4, dtype=torch.int64), r"torch.float32; expected \(R, K\)"),
        (torch.zeros(2, 3).long(), torch.zeros(2, 3, dtype=torch.int64), r"targets is \(2, 3\); expected \(2, 4\)"),
        (torch.zeros(2, 3).long(), torch.zeros(2, 4), "targets is torch.float32"),
    ],
)
def test_drafts_that_do_not_fit_are_refused(drafts: torch.Tensor, targets: torch.Tensor, words: str) -> None:
    with pytest.raises(InputError, match=words):
        greedy_accept(drafts, targets)
