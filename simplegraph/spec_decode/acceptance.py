"""Which drafts the target takes, and the token that comes after them. On the device, and safe in graphs.

A draft of -1 is none: it is never taken, so that a request without drafts gets its next token as plain decoding
would give it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from simplegraph.errors import InputError


class Accepted(NamedTuple):
    """A round's outcome.

    Attributes:
        tokens: (R, K + 1) int64: the drafts taken, the target's own token after them, then -1.
        counts: (R,) int64, drafts taken, 0 to K; a request grows by one token more.
    """

    tokens: Tensor
    counts: Tensor

    @classmethod
    def of(cls, drafts: Tensor, taken: Tensor, token: Tensor) -> Accepted:
        """What is taken of each row.

        Args:
            drafts: (R, K) int64.
            taken: (R, K) bool, the verdict on each draft; what follows a refused one does not count.
            token: (R, K + 1) int64, the target's token after so many drafts.
        """
        counts = taken.long().cumprod(dim=1).sum(dim=1)
        place = torch.arange(drafts.shape[1] + 1, device=drafts.device)
        own = token.gather(1, counts[:, None])
        tokens = torch.cat((drafts, own), dim=1)  # the last column, where all drafts were taken
        tokens = torch.where(place == counts[:, None], own, tokens)
        return cls(torch.where(place <= counts[:, None], tokens, -1), counts)


def greedy_accept(drafts: Tensor, targets: Tensor) -> Accepted:
    """The longest run of drafts that are the target's own likeliest tokens: greedy decoding, several tokens at once.

    Args:
        drafts: (R, K) int64; -1 for none.
        targets: (R, K + 1) int64, the target's likeliest token after the last token, and after each draft.

    Raises:
        InputError: a shape or dtype is another.
    """
    _check_drafts(drafts)
    _check("targets", targets, (drafts.shape[0], drafts.shape[1] + 1))
    if targets.dtype is not torch.int64:
        raise InputError(f"targets is {targets.dtype}; expected torch.int64.")
    return Accepted.of(drafts, drafts == targets[:, :-1], targets)


def rejection_sample(
    drafts: Tensor, targets: Tensor, noise: Tensor, draft_probabilities: Tensor | None = None
) -> Accepted:
    """Tokens distributed as if the target had drawn each of them, whatever the draft proposed.

    A draft d is taken with probability min(1, p(d) / q(d)); the first one refused is replaced by a draw from what p
    has above q.

    Args:
        drafts: (R, K) int64; -1 for none.
        targets: (R, K + 1, V), p: the target's probabilities after the last token, and after each draft.
        noise: (R, K + 1), uniform in [0, 1): one number for each draft, and one for the target's own token.
        draft_probabilities: (R, K, V), q, which each draft was drawn from; None for drafts that were not drawn at
            random, such as the draft's likeliest tokens.

    Raises:
        InputError: a shape or dtype is another.

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
        left = wanted.scatter(2, index, torch.where(none, p, 0)[..., None])
    else:
        _check("draft_probabilities", draft_probabilities, tuple(wanted.shape))
        q = draft_probabilities.gather(2, index)[..., 0]
        left = torch.where(none[..., None], wanted, (wanted - draft_probabilities).clamp(min=0))
    taken = (noise[:, :-1] * q < p) & ~none
    counts = taken.long().cumprod(dim=1).sum(dim=1)
    weights = torch.cat((left, targets[:, -1:]), dim=1)
    weights = weights.gather(1, counts[:, None, None].expand(-1, 1, weights.shape[-1]))[:, 0]
    # Where p and q are equal but for rounding nothing is left of p, and p itself is what is left in the limit.
    whole = targets.gather(1, counts[:, None, None].expand(-1, 1, targets.shape[-1]))[:, 0]
    weights = torch.where((weights > 0).any(dim=-1, keepdim=True), weights, whole)
    return Accepted.of(drafts, taken, _draw(weights, noise[:, -1]).expand(width + 1, -1).T)


def target_probabilities(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Probabilities of the target's tokens; with a temperature of 0 all of it is the likeliest token's.

    Rejection sampling from those is greedy acceptance, so that greedy and sampled requests share a batch.

    Args:
        logits: (R, K + 1, V).
        temperatures: (R,) float32, 0 or more.

    Returns:
        (R, K + 1, V) float32.
    """
    scale = temperatures[:, None, None]
    greedy = torch.zeros_like(logits, dtype=torch.float32).scatter(2, logits.argmax(dim=-1, keepdim=True), 1.0)
    return torch.where(scale > 0, (logits.float() / scale.clamp(min=1e-5)).softmax(dim=-1), greedy)


def _draw(weights: Tensor, noise: Tensor) -> Tensor:
    """(R,) int64: for each row the token where the running sum of its weights, (R, V), passes its noise's share."""
    running = weights.double().cumsum(dim=-1)
    passed = (running > noise.double()[:, None] * running[:, -1:]) & (weights > 0)
    # A parallel sum may round its last entry below an earlier one, so that none passes; the likeliest is right then.
    return torch.where(passed.any(dim=-1), passed.int().argmax(dim=-1), weights.argmax(dim=-1))


def _check_drafts(drafts: Tensor) -> None:
    if drafts.dim() != 2 or drafts.shape[1] < 1 or drafts.dtype is not torch.int64:
        raise InputError(
            f"drafts is {tuple(drafts.shape)} of {drafts.dtype}; expected (R, K) of torch.int64, K at least 1. "
            "Without drafts decode plainly."
        )


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise InputError(f"{name} is {tuple(tensor.shape)}; expected {shape}.")
