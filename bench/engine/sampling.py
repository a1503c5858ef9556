"""Chooses tokens from logits, and copies them to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.engine.request import SamplingParams

_TINY = torch.finfo(torch.float32).tiny
_BITS = 2**64 - 1


def sample(logits: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> Tensor:
    """Choose one token per row. A row with a seed depends on nothing but its logits, its parameters and its position.

    Args:
        logits: (num_reqs, vocab_size).
        params: sampling parameters of each row.
        positions: of each new token, from the begin of its prompt.

    Returns:
        (num_reqs,) int64.
    """
    greedy = logits.argmax(dim=-1)
    rows = [row for row, one in enumerate(params) if not one.greedy]
    if not rows:
        return greedy
    chosen = [params[row] for row in rows]
    # A temperature that is 0 in float32 divides by zero, and a small one overflows unless the largest score is 0.
    temperatures = torch.tensor([max(one.temperature, _TINY) for one in chosen], device=logits.device)
    scores = logits[rows].float()
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / temperatures[:, None]
    if any(one.top_k or one.top_p < 1 for one in chosen):
        scores = keep_likeliest(scores, chosen)
    # Gumbel's trick: the largest of log p - log e, with e exponential, is drawn with probability p.
    noise = _exponential(scores, [one.seed for one in chosen], [positions[row] for row in rows])
    drawn = (scores - noise.log()).argmax(dim=-1)
    return greedy.index_copy(0, torch.tensor(rows, device=logits.device), drawn)


def _exponential(scores: Tensor, seeds: Sequence[int | None], positions: Sequence[int]) -> Tensor:
    """Draw exponential noise of the shape of scores; a row with a seed has that of its seed and position."""
    noise = torch.empty_like(scores)
    if None in seeds:
        noise.exponential_()
    generator = torch.Generator(scores.device)
    for row, seed, position in zip(noise, seeds, positions, strict=True):
        if seed is not None:
            row.exponential_(generator=generator.manual_seed(_mixed(_mixed(seed) + position)))
    return noise


def _mixed(number: int) -> int:
    """Spread a number over 64 bits, so that near ones do not give generators near states.

    Source: splitmix64's finalizer (Steele, Lea and Flood, OOPSLA 2014).
    """
    number = (number + 0x9E3779B97F4A7C15) & _BITS
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _BITS
    return number ^ (number >> 31)


def keep_likeliest(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set scores, (n, vocab_size), to -inf for tokens that `top_k` or `top_p` exclude."""
    vocab_size = scores.shape[-1]
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)  # ties must not depend on the other rows
    most = torch.tensor([min(one.top_k or vocab_size, vocab_size) for one in params], device=scores.device)
    out = torch.arange(vocab_size, device=scores.device) >= most[:, None]
    ordered = ordered.masked_fill(out, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    mass = torch.tensor([max(one.top_p, _TINY) for one in params], device=scores.device)
    # The sum of the tokens before it decides, so that the most likely token always stays: its sum is 0.
    before = probabilities.cumsum(dim=-1) - probabilities
    ordered = ordered.masked_fill((before >= mass[:, None]) & (mass[:, None] < 1), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)


def to_host(tokens: Tensor) -> tuple[Tensor, Any]:
    """Start copying tokens to the host; return them and the event of the copy, None if it is complete."""
    if not tokens.is_cuda:
        return tokens.clone(), None
    arrived = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True).copy_(tokens, non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    return arrived, done
