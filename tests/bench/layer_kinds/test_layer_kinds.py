"""The program on kinds of layers: a kind whose tokens differ fails it, and its figures are written as they come."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from bench.layer_kinds import __main__ as program
from bench.layer_kinds import equality
from bench.layer_kinds.shapes import KINDS

LITTLE = ["--requests", "3", "--tokens", "3", "--batches", "1,2"]


def test_the_program_prints_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equality, "MODES", ("FULL_AND_PIECEWISE",))
    out = tmp_path / "kinds.json"
    assert program.main([*LITTLE, "--kinds", "hybrid", "--json", str(out)]) == 0
    assert program.main([*LITTLE, "--kinds", "windows", "--parts", "steps", "--json", str(tmp_path / "more.json")]) == 0
    figures, more = (json.loads(file.read_text())["results"] for file in (out, tmp_path / "more.json"))
    assert figures["hybrid"]["equality"]["equal"] == {"FULL_AND_PIECEWISE": 3, "few pages and slots": 3}
    for found in (figures["hybrid"], more["windows"]):
        assert [row["batch"] for row in found["steps"]["decode"]] == [1, 2]
        assert all(set(row["ms"]) == {"graph", "eager"} for row in found["steps"]["decode"])
    assert "hybrid: of 3 requests x 3 tokens equal eager's: FULL_AND_PIECEWISE 3" in capsys.readouterr().out


def test_tokens_that_differ_fail_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "compare", lambda *_, **__: {"requests": 3, "tokens": 1, "equal": {"FULL": 2}})
    arguments = ["--kinds", "hybrid", "--parts", "equality", "--json", str(tmp_path / "kinds.json")]
    assert program.main(arguments) == 1


def test_the_shapes_have_both_kinds_of_layers() -> None:
    import torch

    built = KINDS["windows"].build(torch.device("cpu"), small=True)
    assert [layer.window for layer in built.model.attentions] == [50] * 5 + [None]
    built = KINDS["hybrid"].build(torch.device("cpu"), small=True)
    assert [layer.index for layer in built.model.attentions] == [2, 5]
    assert len(built.model.recurrences) == 4
