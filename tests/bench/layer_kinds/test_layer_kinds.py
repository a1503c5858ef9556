"""The program on kinds of layers: every kind has its steps, and they are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench.layer_kinds import __main__ as program
from bench.layer_kinds.steps import KINDS


def test_the_program_prints_and_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "kinds.json"
    program.main(["--batches", "1,2", "--json", str(out)])
    figures = json.loads(out.read_text())["results"]
    assert list(figures) == list(KINDS)
    for found in figures.values():
        assert [row["batch"] for row in found["steps"]["decode"]] == [1, 2]
        assert all(set(row["ms"]) == {"graph", "eager"} for row in found["steps"]["decode"])
    assert "hybrid: ms of a decode step, context 60" in capsys.readouterr().out


def test_the_shapes_have_both_kinds_of_layers() -> None:
    import torch

    built = KINDS["windows"].build(torch.device("cpu"), small=True)
    assert [layer.window for layer in built.model.attentions] == [50] * 5 + [None]
    built = KINDS["hybrid"].build(torch.device("cpu"), small=True)
    assert [layer.index for layer in built.model.attentions] == [2, 5]
    assert len(built.model.recurrences) == 4
