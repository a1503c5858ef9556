"""Decides on the device which drafts the target accepts, and the token that follows them. Safe in graphs.

A draft of -1 stands for no draft: it is never accepted, so that a request without drafts gets the same next token as
in plain decoding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simplegraph.base.errors import InputError


class Accepted(NamedTuple):
    """The outcome of one round of verification.

    Attributes:
        tokens: (R, K + 1) int64: the accepted drafts, the target's own token after them, then -1.
        counts: (R,) int64, accepted drafts, 0 to K; the request grows by counts + 1 tokens.
    """

    tokens: Tensor
    counts: Tensor

    @classmethod
    def of(cls, drafts: Tensor, taken: Tensor, token: Tensor) -> Accepted:
        """Combine the verdicts on single drafts; drafts after a refused one are refused as well.

        Args:
            drafts: (R, K) int64.
            taken: (R, K) bool, the verdict on each draft.
            token: (R, K + 1) int64, the target's own token after 0 to K accepted drafts.
        """
        counts = taken.long().cumprod(dim=1).sum(dim=1)
        place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        target_token = token.gather(1, counts[:, None])
        tokens = torch.cat((drafts, target_token), dim=1)  # the last column is used if all drafts were taken
        tokens = torch.where(place == counts[:, None], target_token, tokens)
        return cls(torch.where(place <= counts[:, None], tokens, -1), counts)


def greedy_accept(drafts: Tensor, targets: Tensor) -> Accepted:
    """Accept drafts as long as they are the target's most likely tokens; the result is that of greedy decoding.

    Args:
        drafts: (R, K) int64; -1 for none.
        targets: (R, K + 1) int64, the target's most likely token after the last token, and after each draft.

    Raises:
        InputError: a shape or dtype differs.
    """
    _check_drafts(drafts)
    _check("targets", targets, (drafts.shape[0], drafts.shape[1] + 1))
    if targets.dtype is not torch.int64:
        raise InputError(f"targets is {targets.dtype}; expected torch.int64.")
    return Accepted.of(drafts, drafts == targets[:, :-1], targets)


def rejection_sample(
    drafts: Tensor, targets: Tensor, noise: Tensor, draft_probabilities: Tensor | None = None
) -> Accepted:
    """Accept drafts at random, so that the tokens are distributed as if the target had drawn each of them.

    A draft d is accepted with probability min(1, p(d) / q(d)); the first refused draft is replaced by a draw from the
    normalized positive part of p - q.

    Args:
        drafts: (R, K) int64; -1 for none.
        targets: (R, K + 1, V), p: the target's probabilities after the last token, and after each draft.
        noise: (R, K + 1), uniform in [0, 1): one number for each draft, and one for the target's own token.
        draft_probabilities: (R, K, V), q: the distribution that each draft was drawn from; None for drafts that were
            not drawn at random, such as the draft model's most likely tokens.

    Raises:
        InputError: a shape or dtype differs.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), Chen et al. 2023 (arXiv 2302.01318).
    """
    _check_drafts(drafts)
    reqs, width = drafts.shape
    _check("targets", targets, (reqs, width + 1, targets.shape[-1]))
    _check("noise", noise, (reqs, width + 1))
    none, index = drafts < 0, drafts.clamp(min=0)[..., None]
    wanted = targets[:, :-1]
    p = wanted.gather(2, index)[..., 0]
    if draft_probabilities is None:
        q = torch.ones_like(p)
        residual = wanted.scatter(2, index, torch.where(none, p, 0)[..., None])
    else:
        _check("draft_probabilities", draft_probabilities, tuple(wanted.shape))
        q = draft_probabilities.gather(2, index)[..., 0]
        residual = torch.where(none[..., None], wanted, (wanted - draft_probabilities).clamp(min=0))
    taken = (noise[:, :-1] * q < p) & ~none
    counts = taken.long().cumprod(dim=1).sum(dim=1)
    weights = torch.cat((residual, targets[:, -1:]), dim=1)
    weights = weights.gather(1, counts[:, None, None].expand(-1, 1, weights.shape[-1]))[:, 0]
    # If p and q are equal but for rounding, p - q has no positive part; p itself is its limit.
    whole = targets.gather(1, counts[:, None, None].expand(-1, 1, targets.shape[-1]))[:, 0]
    weights = torch.where((weights > 0).any(dim=-1, keepdim=True), weights, whole)
    return Accepted.of(drafts, taken, _draw(weights, noise[:, -1]).expand(width + 1, -1).T)


def target_probabilities(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Compute the probabilities of the target's tokens; temperature 0 gives the most likely token probability 1.

    Rejection sampling from such rows equals greedy acceptance, so that greedy and sampled requests share a batch.

    Args:
        logits: (R, K + 1, V), any floating-point dtype.
        temperatures: (R,) float32, 0 or more.

    Returns:
        (R, K + 1, V) float32.
    """
    scale = temperatures[:, None, None]
    greedy = torch.zeros_like(logits, dtype=torch.float32).scatter(2, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(scale > 0, (logits.float() / scale.clamp(min=1e-5)).softmax(dim=-1), greedy)


def _draw(weights: Tensor, noise: Tensor) -> Tensor:
    """Draw a token from each row of weights (R, V): the first whose running sum exceeds the noise's share, (R,)."""
    running = weights.double().cumsum(dim=-1)
    passed = (running > noise.double()[:, None] * running[:, -1:]) & (weights > 0)
    # A parallel sum may round its last entry below an earlier one, so that no token passes; take the likeliest then.
    return torch.where(passed.any(dim=-1), passed.int().argmax(dim=-1), weights.argmax(dim=-1))


def _check_drafts(drafts: Tensor) -> None:
    if drafts.dim() != 2 or drafts.shape[1] < 1 or drafts.dtype is not torch.int64:
        raise InputError(
            f"drafts is {tuple(drafts.shape)} of {drafts.dtype}; expected (R, K) of torch.int64, K at least 1. "
            "Without drafts, decode without speculation."
        )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InputError(f"{name} is {tuple(tensor.shape)}; expected {shape}.")
