"""From a process's start to its first token: the stages come in order, cold before warm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from bench.startup import first_token, first_token_process
from bench.startup.processes import CompileCaches


def check_stages(found: dict[str, Any]) -> None:
    stages = [found["seconds"][name] for name in first_token_process.STAGES]
    assert stages[0] > 0
    assert stages == sorted(stages)


def test_the_command_tells_the_stages_of_an_arm_with_cold_and_warm_caches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_token, "ARMS", {"simplegraph": first_token.ARMS["simplegraph"]})
    gpu = torch.cuda.is_available()
    model = ["--model", "tiny"] if gpu else []  # as it is by default elsewhere
    assert first_token.main(["--json", str(tmp_path / "figures.json"), *model]) == 0
    printed = capsys.readouterr().out
    assert "token after weights" in printed
    assert ("NOT speed" in printed) == (not gpu)
    results = json.loads((tmp_path / "figures.json").read_text())["results"]
    assert [(one["arm"], one["cache"]) for one in results] == [("simplegraph", "cold"), ("simplegraph", "warm")]
    for found in results:
        check_stages(found)
        assert found["captured"] > 0
        assert "transformers" not in found["heavy"]
        assert gpu or found["heavy"] == []
        assert {"torch", "then"} <= found["preload"].keys()
        assert found["preload"]["then"] <= found["seconds"]["loaded"]


def test_an_arm_without_graphs_has_the_same_stages(tmp_path: Path) -> None:
    line = ["--arm", "eager", "--model", "tiny", "--json", str(tmp_path / "eager.json")]
    assert first_token_process.main(line) == 0
    check_stages(json.loads((tmp_path / "eager.json").read_text()))


def test_the_ratios_are_those_of_the_first_token() -> None:
    def process(arm: str, token: float) -> dict[str, Any]:
        stages = dict.fromkeys(first_token_process.STAGES, 1.0) | {"first_token": token}
        return {"arm": arm, "cache": "cold", "seconds": stages}

    printed = first_token.render([process("simplegraph-fused", 4.0), process("compiled-piecewise", 16.0)])
    assert "first token of simplegraph-fused over compiled-piecewise, cold caches: 0.25" in printed
    row = next(line for line in printed.splitlines() if line.startswith("simplegraph-fused"))
    assert row.split()[-1] == "3.00"


def test_a_process_that_fails_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="'none' is no model; expected 70b, 8b, tiny"):
        first_token.measure(["eager"], "none", CompileCaches(tmp_path))
