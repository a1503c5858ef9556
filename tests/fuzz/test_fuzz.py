"""Random programs: a module with graphs does what its eager twin does; ``python -m tests.fuzz`` runs more of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from simplegraph.program.snapshot import Snapshot
from tests.fuzz.grammar import CHANGES, PENDING, PIECES, Piece
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


@contextlib.contextmanager
def reseeded(generators: Sequence[torch.Generator]) -> Iterator[None]:
    for generator in generators:
        generator.manual_seed(1)
    yield


changes = Snapshot.changes
CALLED = tuple(("call", 4, "no_grad", "x") for _ in range(5))
IN_PLACE = tuple(("call", rows, "no_grad", "first rows in place") for rows in (4, 8, 8, 8, 3))
# Constructs, and a mistake of the library that only they show: pieces, settings, events, where, and what stands there.
MISTAKES: dict[str, tuple[tuple[str, ...], dict[str, Any], tuple[Any, ...], str, Any]] = {
    **{
        f"folded weights stay: {change}": (
            *(("folded",), {"optimized": True}, (*CALLED, ("change", change), *CALLED[:1])),
            *("simplegraph.fused.optimizing.folded.Fold.is_stale", lambda fold: fold.weights is None),
        )
        for change in CHANGES
        if "optimizer" in change or change == "training steps"
    },
    "no one is told of replayed steps": (
        *(("folded",), {"optimized": True}, (*CALLED, ("change", "training steps"), *CALLED[:1])),
        *("simplegraph.training.step.tell_written", lambda tensors: None),
    ),
    **{
        f"replays leave it out: {piece}": (
            *((piece,), {"mode": "PIECEWISE", "verify": 0}, CALLED),
            *("simplegraph.program.breaks.break_calls.Break.replay", lambda step: None),
        )
        for piece in PIECES
        if "break" in piece
    },
    **{
        f"a seed of a capture stays: {trouble}": (
            *(("noise", trouble, "noise"), {}, CALLED),
            *("simplegraph.program.session._reseeding_shows", reseeded),
        )
        for trouble in PIECES
        if trouble.startswith("refuses")
    },
    **{
        f"not looked for: {piece}": (
            *((piece,), {}, CALLED),
            *("simplegraph.program.snapshot.Snapshot.changes", lambda held, *, code=False: changes(held)),
        )
        for piece in PIECES
        if piece.endswith("'s number") and piece != "object's number"
    },
    "a capture's rows stay in place": (
        *(
            ("linear",),
            {"capture_sizes": [4, 8]},
            (*CALLED, *IN_PLACE, ("change", "weight data"), *IN_PLACE, *IN_PLACE),
        ),
        *("simplegraph.device.saved_state.SavedMemory.put", lambda memory, copies: None),
    ),
    "a layout is another one's": (
        *(("asks for strides",), {}, (*CALLED, ("call", 4, "no_grad", "transposed"))),
        *("simplegraph.call.plan._learn_strides", lambda arg, tensor, known: True),
    ),
    "two tensors are one": (
        *(("asks for one tensor",), {}, (*[("call", 4, "no_grad", "x twice")] * 5, ("call", 4, "no_grad", "x, y"))),
        *("simplegraph.call.plan.aliases", lambda tensors: []),
    ),
    "a raising call is replayed": (
        *(("linear",), {}, (*CALLED, ("call", 4, "no_grad", "raises at the end"), *CALLED[:1])),
        *("simplegraph.call.inputs.ConstantArg.holds", lambda arg, leaf: True),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_library_is_found(device: torch.device, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, settings, events, where, instead = MISTAKES[mistake]
    program = Program(0, pieces, "h", {"capture_sizes": [4]} | settings, False, events)
    assert program.difference(str(device)) is None
    monkeypatch.setattr(where, instead)
    assert program.difference(str(device)) is not None
