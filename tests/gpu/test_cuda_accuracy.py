"""Scores of trained weights on a GPU: the same from graphs and with speculation as eagerly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", minversion="5.0")

from bench.accuracy import __main__ as accuracy
from bench.accuracy.ways import WAYS


def _scored(path: Path, *arguments: str) -> Any:
    assert accuracy.main([*arguments, "--questions", "40", "--windows", "40", "--json", str(path)]) == 0
    return json.loads(path.read_text())["results"]


def test_every_way_has_the_eager_score_in_float32(tmp_path: Path) -> None:
    found = _scored(tmp_path / "accuracy.json")
    for text in ("declaration", "gettysburg"):
        rows = found[text]
        assert list(rows) == list(WAYS)
        assert {row["exact_match"] for row in rows.values()} == {rows["eager"]["exact_match"]}
        assert rows["full"]["perplexity"] == pytest.approx(rows["eager"]["perplexity"], rel=1e-4)
        # Padded batches are rounded otherwise, which decides a draft's near tie now and then.
        assert rows["speculation, full"]["per_position"] == pytest.approx(
            rows["speculation, eager"]["per_position"], abs=0.02
        )
    assert found["declaration"]["full"]["exact_match"] > 0.9
    assert found["declaration"]["speculation, full"]["mean_length"] > 2.5


@pytest.mark.parametrize("draft", ["eagle", "eagle3"])
def test_every_way_has_the_eager_score_in_bfloat16(draft: str, tmp_path: Path) -> None:
    rows = _scored(tmp_path / "accuracy.json", "--dtype", "bfloat16", "--draft", draft)["declaration"]
    assert {way for way, row in rows.items() if row["exact_match"] > 0.85} == set(WAYS)
    assert all(row["perplexity"] < 1.1 for row in rows.values())
