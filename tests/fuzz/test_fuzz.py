"""Random programs: a module with graphs does what its eager twin does; ``python -m tests.fuzz`` runs more of them."""

from __future__ import annotations

import pytest
import torch

from tests.fuzz.grammar import PENDING, PIECES, Piece
from tests.fuzz.program import Program, report, shrunk

pytestmark = pytest.mark.proofs  # as users have them

BLOCK = 12


@pytest.mark.parametrize("block", range(8))
def test_random_programs_equal_eager(device: torch.device, block: int) -> None:
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        found = report(seed, str(device), PENDING)
        if found is not None:
            pytest.fail(found)


def test_a_difference_is_found_and_made_small(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = "__import__('simplegraph.base.context', fromlist=['CALLS']).CALLS.context"  # of a wrapped module's call
    monkeypatch.setitem(PIECES, "wrong", Piece(f"h = h * (1 if {inside} is None else 2)"))
    calls = tuple(("call", 4, "no_grad", "x") for _ in range(6))
    program = Program(0, ("linear", "wrong", "tanh"), "pair", {"capture_sizes": [4]}, False, calls)
    small = shrunk(program, lambda tried: tried.difference(str(device)) is not None)
    assert small.pieces == ("wrong",)
    assert small.events == calls[:1]
    assert "twins.call(4, 'no_grad', 'x')" in small.text()
