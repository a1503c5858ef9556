"""Changes between two calls are noticed, with versions of dicts and without; `tests.fuzz.changes` runs more."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from simplegraph.guard.guards import CapturedState
from simplegraph.guard.plain_state import PlainState
from simplegraph.guard.values import PlainValues
from tests.fuzz import changes
from tests.fuzz.grammar import AND_BACK, AROUND, CHANGES, GAPS, HARMLESS, OWN_DICT, PENDING
from tests.fuzz.program import Program

pytestmark = pytest.mark.proofs  # as users have them

ONCE = sorted(name for name in CHANGES if "freed" in name or ("storage" in name and "back" not in name))
KEYED = {"a layer's setting", "an object's other class"}  # plain values alone: another key, and no graph is dropped
READ = sorted(AND_BACK.keys() - HARMLESS - AROUND - GAPS.keys())


def program(name: str, **settings: Any) -> Program:
    """Calls that end in replays, before a change, after it, and after it was taken back."""
    called = [("call", 4, "no_grad", "indices" if "table" in name else "x")] * 5
    events = [*called, ("change", f"{name} (and back)"), *called, ("change", f"{name}, back"), *called]
    if name not in AND_BACK:
        events = [*called, ("change", name), *called]
    return Program(0, ("linear", "norm"), "h", {"capture_sizes": [4]} | settings, False, tuple(events))


WAYS = {
    "versions": contextlib.nullcontext,
    "no versions": changes.without_versions,
    "asking the allocator": changes.asking_allocator,
}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    with WAYS[request.param]():
        yield


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", [*AND_BACK, *ONCE])
def test_a_change_is_noticed_and_so_is_its_end(device: torch.device, name: str) -> None:
    kinds = [{"mixin": True}] if name in OWN_DICT else [{}, {"mixin": True}, {"outputs": "static"}]
    found = [program(name, **settings).run(str(device)) for settings in kinds]
    if name in GAPS:  # delete it from there once it is noticed
        assert all(difference is not None for difference, _ in found)
        return
    assert [difference for difference, _ in found] == [None] * len(kinds)
    recaptures = {done["recaptures"] for _, done in found}
    if name in HARMLESS | AROUND | KEYED:
        assert recaptures == {0}
    else:
        assert recaptures <= {1, 2}
        assert 0 not in recaptures


# Not of memory that is given back, which must not be read.
@pytest.mark.parametrize("name", READ)
def test_an_answer_shows_each_change(device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would pass without any guard."""
    if device.type == "cuda" and "table" in name:
        pytest.skip("without guards its indices end the process's use of the GPU")
    monkeypatch.setattr(CapturedState, "moved", lambda state: False)
    values = PlainValues({})
    monkeypatch.setattr(PlainState, "_values", lambda state, module: values)
    assert program(name, mixin=True).difference(str(device)) is not None


@pytest.mark.parametrize("block", range(4))
def test_random_changes_equal_eager_with_as_many_recaptures_without_versions(device: torch.device, block: int) -> None:
    for seed in range(block * 8, (block + 1) * 8):
        found, done = changes.outcome(seed, str(device), without=PENDING)
        other, again = changes.outcome(seed, str(device), versions=False, without=PENDING)
        if found or other:
            pytest.fail(found or other or "")
        # A call that runs eagerly unread shows a change a call later, so one replay more or less does not count.
        for name in ("captures", "recaptures"):
            assert done[name] == again[name]
        assert done["replays"]


def test_the_command_counts_and_prints_what_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ["--calls", "10", "--seed", "3", "--most", "1", "--whole"]
    monkeypatch.setattr(changes, "BLOCK", 1)
    assert changes.main([*line, "--without-versions"]) == 0
    assert "recaptures" in capsys.readouterr().out
    monkeypatch.setattr(CapturedState, "moved", lambda state: False)
    assert changes.main(line) == 1
    told = capsys.readouterr().out
    assert "# seed 3: call" in told
    assert "1 programs differ" in told
