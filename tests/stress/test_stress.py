"""A short stress run: nothing differs from eager; ``python -m tests.stress`` runs a long one."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.grammar import PIECES, Piece
from tests.stress.stress import Stress

pytestmark = pytest.mark.proofs  # as users have them


def test_many_replays_of_random_modules_equal_eager_whatever_goes_on_beside(device: torch.device) -> None:
    said: list[str] = []
    outcome = Stress(device, replays=400, modules=8, seconds=120, tell=said.append).run()
    assert outcome.differences == []
    assert (outcome.replays >= 400, outcome.modules) == (True, 8)
    assert outcome.actions["burst"] >= 1
    assert outcome.actions["move"] >= 1
    assert said


def test_a_replay_that_differs_is_found_and_told(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = "__import__('simplegraph.base.context', fromlist=['CALLS']).CALLS.context"  # of a wrapped module's call
    wrong = Piece(f"h = h * (2 if torch.is_inference_mode_enabled() and {inside} is not None else 1)")
    for name in ("tanh", "flip", "softmax", "second", "no grad", "size"):
        monkeypatch.setitem(PIECES, name, wrong)
    said: list[str] = []
    outcome = Stress(device, replays=400, modules=8, seconds=60, tell=said.append).run()
    assert outcome.differences
    assert any("DIFFERENCE" in text and "is_inference_mode_enabled" in text for text in said)
