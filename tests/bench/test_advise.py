"""The benchmark of advice, on the emulator: each program's first line, and the change that it names followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench.advise.__main__ import main

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu/test_cuda_advise.py has the times")


def test_advice_is_followed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "advise.json"
    main(["--device", "cpu", "--rounds", "1", "--programs", "evaluation,ppo,engine", "--json", str(figures)])
    found = json.loads(figures.read_text())
    assert {"machine_info", "tolerance", "programs"} <= found.keys()
    rows = found["programs"]
    assert rows["evaluation"]["first"].startswith("`model` (programs.py:")
    assert rows["evaluation"]["called"] == "model"
    assert {"optimizer.step", "agent.get_action_and_value"} == {line.split("`")[1] for line in rows["ppo"]["lines"]}
    assert rows["engine"]["first"].startswith("graphs captured at ")
    assert all(rows[name]["measured"] > 0 for name in ("evaluation", "ppo"))
    assert "the first line" in capsys.readouterr().out
