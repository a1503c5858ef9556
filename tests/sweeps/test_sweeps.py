"""Some samples of torch's databases; ``python -m tests.sweeps`` tries them all."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's databases of operators and modules need it")

from simplegraph.base.context import CALLS
from tests.sweeps import entries
from tests.sweeps.__main__ import KINDS, main
from tests.sweeps.counts import merged
from tests.sweeps.sweep import Verdict, sweep

pytestmark = pytest.mark.proofs  # as users have them

# Kind, mode, and which of the entries.
CASES = [
    ("modules", "no_grad", slice(0, None, 2)),
    ("modules", "inference_autocast", slice(1, None, 2)),
    ("operators", "no_grad", slice(0, None, 14)),
    ("operators", "inference_autocast", slice(7, None, 14)),
    ("in_place", "inference_mode", slice(0, None, 6)),
]


@pytest.mark.parametrize(("kind", "mode", "which"), CASES)
def test_every_entry_of_torchs_databases_equals_eager(device: torch.device, kind: str, mode: str, which: slice) -> None:
    if device.type == "cuda":
        pytest.skip("too long here: python -m tests.sweeps --device cuda --workers 8")
    chosen = KINDS[kind]()[which]
    verdicts = [sweep(entry, mode, device, 2) for entry in chosen]
    assert {verdict.name: verdict.defects for verdict in verdicts if verdict.defects} == {}
    served = sum(verdict.kind == "replayed" for verdict in verdicts)
    assert served > 0.6 * len(verdicts), "what runs eagerly proves little"


class Wrong(torch.nn.Module):
    """Answers otherwise to values that eager sees, and no capture does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = 3 if CALLS.context is None else 2  # inside of a wrapped module's call
        return x * factor


def test_the_sweep_sees_a_replay_that_differs(device: torch.device) -> None:
    calls = [((torch.full((2, 3), value, device=device),), {}) for value in (1.0, 2.0, 3.0, 4.0)]
    sample = entries.Sample("one", lambda: Wrong().eval(), calls)
    verdict: Verdict = sweep(entries.Entry("wrong", lambda device, calls: iter([sample])), "no_grad", device)
    assert list(verdict.defects) == ["one"]


SOME = ["--kinds=operators", "--only=linalg_inv", "--modes=no_grad,autocast", "--samples=1", "--quiet"]


def counts_of(*arguments: str, out: pathlib.Path) -> dict[str, dict[str, int]]:
    main([*SOME, *arguments, f"--out={out}"])
    return {result["mode"]: result["entries"] for result in json.loads(out.read_text())["results"]}


def test_what_a_sweep_had_no_time_for_is_counted_as_such(tmp_path: pathlib.Path) -> None:
    assert counts_of("--seconds=0", out=tmp_path / "none.json") == {
        "no_grad": {"not reached": 2},
        "autocast": {"not reached": 2},
    }


def test_chunks_and_a_sweep_that_goes_on_behind_a_crash_count_each_entry_once(tmp_path: pathlib.Path) -> None:
    whole = counts_of(out=tmp_path / "whole.json")
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    for index, part in enumerate(parts):
        counts_of(f"--chunk={index + 1}/2", out=part)
    together = merged(json.loads(part.read_text()) for part in parts)
    assert {result["mode"]: result["entries"] for result in together["results"]} == whole
    unfinished = json.loads(parts[0].read_text()) | {"done": 1, "results": []}
    parts[0].write_text(json.dumps(unfinished))
    after = counts_of("--chunk=1/2", "--crashed=-11", out=parts[0])
    assert after == {"autocast": {"defect": 1}}, "the first entry was done before, the second ended the process"
    assert "ended as -11" in parts[0].read_text()
