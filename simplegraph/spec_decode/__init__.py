"""Speculative decoding in graphs: a draft model proposes tokens, and the target verifies them. Holds no engine.

Example:
    >>> proposals = Proposals(num_slots=64, num_draft_tokens=5, device="cuda")
    >>> drafter = EagleDrafter(draft, prefill, decode, proposals, num_draft_tokens=5)
    >>> drafter.capture()
"""

from __future__ import annotations

from simplegraph._lazy import public_names

__all__, __getattr__ = public_names(__name__, __file__)
