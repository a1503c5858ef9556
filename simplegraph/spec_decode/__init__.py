"""Speculative decoding: a draft proposes tokens, the target verifies them, both in graphs.

Example:
    >>> proposals = Proposals(num_slots=64, num_draft_tokens=5, device="cuda")
    >>> drafter = EagleDrafter(draft, prefill, decode, proposals, num_draft_tokens=5)
    >>> drafter.capture()
"""

from __future__ import annotations

from simplegraph.spec_decode.acceptance import Accepted as Accepted
from simplegraph.spec_decode.acceptance import greedy_accept as greedy_accept
from simplegraph.spec_decode.acceptance import rejection_sample as rejection_sample
from simplegraph.spec_decode.acceptance import target_probabilities as target_probabilities
from simplegraph.spec_decode.advance import advance_step as advance_step
from simplegraph.spec_decode.buffers import Proposals as Proposals
from simplegraph.spec_decode.eagle import EagleDrafter as EagleDrafter
from simplegraph.spec_decode.model import DraftModel as DraftModel

__all__ = [
    "Accepted",
    "DraftModel",
    "EagleDrafter",
    "Proposals",
    "advance_step",
    "greedy_accept",
    "rejection_sample",
    "target_probabilities",
]
