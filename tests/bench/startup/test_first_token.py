"""From a process's start to its first token: the stages come in order, cold before warm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from bench.startup import first_token
from bench.startup.processes import CompileCaches


def test_the_stages_of_an_arm_with_cold_and_warm_caches(tmp_path: Path) -> None:
    cold, warm = first_token.measure(["simplegraph"], "tiny", CompileCaches(tmp_path))
    assert (cold["cache"], warm["cache"]) == ("cold", "warm")
    for found in (cold, warm):
        stages = [found["seconds"][name] for name in ("imported", "weights", "first_token", "ready")]
        assert stages[0] > 0
        assert stages == sorted(stages)
        assert found["captured"] > 0
    assert "token after weights" in first_token.render([cold, warm])


def test_a_process_that_fails_is_an_error_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="'none' is no model; expected 70b, 8b, tiny"):
        first_token.measure(["eager"], "none", CompileCaches(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the whole table takes minutes on a GPU")
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_token, "ARMS", {"eager": first_token.ARMS["eager"]})
    assert first_token.main(["--json", str(tmp_path / "figures.json")]) == 0
    assert "NOT speed" in capsys.readouterr().out
    saved = json.loads((tmp_path / "figures.json").read_text())
    assert [one["arm"] for one in saved["results"]] == ["eager", "eager"]
