"""Speculative decoding in graphs: a draft model proposes tokens, and the target verifies them. Holds no engine.

eagle       EAGLE drafting in two graphs
acceptance  decides which drafts the target accepts
advance     positions and slots of the next tokens
buffers     the protocol of draft models, and what drafters run on

Example:
    >>> proposals = Proposals(num_slots=64, num_draft_tokens=5, device="cuda")
    >>> drafter = EagleDrafter(draft, prefill, decode, proposals, num_draft_tokens=5)
    >>> drafter.capture()
"""

from __future__ import annotations

from simplegraph._lazy import public_names

__all__, __getattr__ = public_names(__name__, __file__)
