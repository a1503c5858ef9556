"""The program on two-batch overlap: its steps are split, their logits are compared, and its figures are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench.two_batch import __main__ as program
from bench.two_batch import steps

LITTLE = ["--layers", "1", "--batches", "3", "--prompt-tokens", "8"]


def test_the_program_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "two_batch.json"
    assert program.main([*LITTLE, "--json", str(out)]) == 0
    found = json.loads(out.read_text())["results"]
    assert [(each["requests"], each["tokens"]) for each in found["steps"]] == [(3, 3), (1, 8), (8, 8)]
    assert all(each["ms"].keys() == {"whole", "halves"} and each["tokens_equal"] == 1 for each in found["steps"])
    assert "steps whole and as two micro-batches" in capsys.readouterr().out


def test_other_logits_fail_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"requests": 1, "tokens": 1, "ms": {"whole": 1.0, "halves": 1.0}, "gain": 0.0, "tokens_equal": 1.0}
    monkeypatch.setattr(steps, "measure", lambda *_: [figures | {"relative_error": 0.01}])
    assert program.main([*LITTLE, "--json", str(tmp_path / "two_batch.json")]) == 1
