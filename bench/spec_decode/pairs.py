"""Targets with their drafts, by name."""

from __future__ import annotations

import torch

from bench.models.eagle import Eagle, Eagle3, build_eagle, load_eagle, tiny_pair
from bench.models.llama import Llama
from bench.models.workload import Workload

TRAINED = "trained"
KINDS = ("eagle", "eagle3")
DRAFT_VOCAB = 32_000  # that of public EAGLE-3 drafts for Llama-3


def load_pair(name: str, draft: str, device: torch.device) -> tuple[Llama, Eagle | Eagle3, bool]:
    """Load target and draft; the third value is True if both are trained."""
    if name == TRAINED:
        if draft not in KINDS:
            raise ValueError(f"--draft is {draft!r}; the trained target has {' and '.join(KINDS)}.")
        return *tiny_pair(draft, device=device), True
    target = Workload(name, (1,), device, lm_head=True).build()
    return target, load_draft(draft, target), draft not in KINDS


def load_draft(draft: str, target: Llama) -> Eagle | Eagle3:
    """Load a draft for a target from a folder; or build one of a kind with random weights."""
    if draft not in KINDS:
        return load_eagle(draft, target)
    return build_eagle(draft, target, draft_vocab_size=min(DRAFT_VOCAB, target.config.vocab_size))
