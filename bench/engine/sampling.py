"""Chooses tokens from logits, and copies them to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.engine.request import SamplingParams


def sample(logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]) -> Tensor:
    """Choose one token per row.

    Args:
        logits: (num_reqs, vocab_size).
        params: sampling parameters of each row.
        generators: random generator of each row; None for torch's own.

    Returns:
        (num_reqs,) int64.
    """
    greedy = logits.argmax(dim=-1)
    rows = [row for row, one in enumerate(params) if not one.greedy]
    if not rows:
        return greedy
    chosen = [params[row] for row in rows]
    temperatures = torch.tensor([one.temperature for one in chosen], device=logits.device)
    scores = logits[rows].float() / temperatures[:, None]
    if any(one.top_k or one.top_p < 1 for one in chosen):
        scores = keep_likeliest(scores, chosen)
    # Gumbel's trick: the largest of log p - log e, with e exponential, is drawn with probability p.
    noise = torch.empty_like(scores)
    for row, request_row in zip(noise, rows, strict=True):
        row.exponential_(generator=generators[request_row])
    drawn = (scores - noise.log()).argmax(dim=-1)
    return greedy.index_copy(0, torch.tensor(rows, device=logits.device), drawn)


def keep_likeliest(scores: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Set scores, (n, vocab_size), to -inf for tokens that `top_k` or `top_p` exclude."""
    vocab_size = scores.shape[-1]
    ordered, order = scores.sort(dim=-1, descending=True)
    most = torch.tensor([one.top_k or vocab_size for one in params], device=scores.device)
    out = torch.arange(vocab_size, device=scores.device) >= most[:, None]
    ordered = ordered.masked_fill(out, -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    mass = torch.tensor([one.top_p for one in params], device=scores.device)
    # The sum of the tokens before it decides, so that the most likely token always stays.
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
