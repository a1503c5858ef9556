"""Values at all places, changed in all ways, are never stale; ``python -m tests.fuzz.state`` runs more programs."""

from __future__ import annotations

import collections
import os

import pytest
import torch

from simplegraph.guard.plain_state import PlainState
from simplegraph.guard.values import PlainValues
from tests.fuzz import changes, state
from tests.fuzz.state_grammar import FORMS, KINDS, SPOTS, STATE_GAPS

pytestmark = pytest.mark.proofs  # as users have them

PROGRAMS = 12
FIRST = int(os.environ.get("TESTS_SEED", "0")) * PROGRAMS
GAPS = frozenset(STATE_GAPS)


def changed(spot: str, kind: str, form: str, **more: str) -> state.StateProgram:
    """Calls that end in replays, before a place is given another value, after it, and after it was given the first."""
    values = KINDS[kind].values
    placed = state.Placed(0, spot, kind, values[0], KINDS[kind].uses[0], more.get("where", "forward"))
    settings = {} if form == "step" else {"capture_sizes": [4]}
    put = (SPOTS[spot].put or "AT = NEW").replace("AT", state.place_of(SPOTS[spot]))
    calls = [("call", 4, "grad" if form == "step" else "no_grad", "")] * 8
    changes = [("change", 0, put.replace("NEW", value), "") for value in (values[1], values[0])]
    events = (*calls, ("serves",), changes[0], *calls, ("serves",), changes[1], *calls, ("serves",))
    return state.StateProgram(0, form, "SGD" if form == "step" else "", (placed,), settings, events)


def test_random_programs_equal_eager_and_graphs_serve(device: torch.device) -> None:
    total = collections.Counter[str]()
    for seed in range(FIRST, FIRST + PROGRAMS):
        found, done = state.outcome(seed, str(device), without=GAPS)
        total += done
        if found is not None:
            pytest.fail(found)
    assert total["replays"] > total["calls"] / 4


@pytest.mark.parametrize("form", sorted(set(FORMS)))
def test_every_form_notices_another_value_and_serves_again(device: torch.device, form: str) -> None:
    for spot in ("attribute", "list in a dict", "slot", "global dict"):
        assert changed(spot, "int", form).difference(str(device)) is None


def test_each_program_shows_what_it_changes(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would pass without any guard."""
    values = PlainValues({})
    monkeypatch.setattr(PlainState, "_values", lambda *_: values)
    for spot, kind in (("dict", "int"), ("slot", "date"), ("global list", "enum"), ("closure", "str")):
        assert changed(spot, kind, "module").difference(str(device)) is not None


def test_the_text_of_a_program_that_differs_runs_by_itself(
    device: torch.device, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    values = PlainValues({})
    monkeypatch.setattr(PlainState, "_values", lambda *_: values)
    monkeypatch.setattr(changes, "BLOCK", 1)
    assert state.main(["--calls", "2000", "--most", "1", "--whole", "--device", str(device)]) == 1
    told = capsys.readouterr().out
    assert "1 programs differ" in told
    text = told[told.index("import sys\n") : told.rindex("\n", 0, told.rindex("programs differ"))]
    with pytest.raises(state.Different):
        exec(compile(text, "<told>", "exec"), {"__name__": "told"})
