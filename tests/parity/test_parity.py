"""Verdicts of the emulator are a GPU's; ``python -m tests.parity`` tries many more, on both."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch

pytest.importorskip("expecttest", reason="torch's databases of operators and modules need it")

from tests.parity import forwards
from tests.parity.__main__ import main
from tests.parity.compare import differences, summary
from tests.parity.verdicts import find

pytestmark = pytest.mark.proofs  # as users have them

NAMED = forwards.named()


@pytest.mark.parametrize("entry", NAMED, ids=[entry.name for entry in NAMED])
def test_a_forward_gets_the_verdict_of_a_gpu_and_equals_eager(device: torch.device, entry: Any) -> None:
    found = find(f"named: {entry.name}", entry, "inference_mode" if len(entry.name) % 2 else "no_grad", device)
    assert (found.verdict, found.differs) in ((forwards.expected(found.name), ""), ("replayed", "rounding")), found


def finding(name: str, verdict: str, differs: str = "") -> dict[str, str]:
    return {"name": name, "verdict": verdict, "reasons": "", "cause": "", "differs": differs}


def test_a_comparison_names_what_differs_and_leaves_out_what_has_no_verdict() -> None:
    one = {"device": "A", "findings": [finding("x", "replayed"), finding("y", "eager"), finding("z", "raised")]}
    two = {"device": "B", "findings": [finding("x", "eager"), finding("y", "eager"), finding("z", "replayed")]}
    two["findings"].append(finding("only there", "defect", "by 3"))
    count, other, wrong = differences(one, two)
    assert (count, other) == (2, ["x: replayed on A, eager on B"])
    assert wrong == ["only there on B: by 3"]
    assert "1 other verdicts (50.0%), 1 wrong answers" in summary(one, two)


def test_a_cut_run_goes_on_and_blames_what_was_running(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "found.json"
    assert main(["--only=named: e", "--seconds=0", f"--json={path}"]) == 0
    assert json.loads(path.read_text())["findings"] == []
    path.write_text(json.dumps(json.loads(path.read_text()) | {"running": "named: eig"}))
    assert main(["--only=named: e", f"--json={path}"]) == 1
    found = {each["name"]: each for each in json.loads(path.read_text())["findings"]}
    assert found["named: eig"]["differs"] == "its process ended"
    assert found["named: einsum"]["verdict"] == "replayed"
    assert len(found) == sum(name.startswith("e") for name in forwards.MODULES)
