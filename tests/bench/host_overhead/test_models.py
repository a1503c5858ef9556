"""Calls of whole models: what is timed is served by graphs, and a file cut short has what was done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.host_overhead import models


def test_steady_mixed_and_lazy_calls_are_served_and_written(tmp_path: Path) -> None:
    file = tmp_path / "calls.json"
    models.main(["--device", "cpu", "--calls", "50", "--largest", "4", "--json", str(file)])
    found = json.loads(file.read_text())
    assert set(found["steady"]) == {models.TEN, models.LLAMA}
    assert all(each["us"] > 0 for each in found["steady"].values())
    mixed = found["mixed"]["50 calls"]
    assert mixed["unverified_eager_calls"] == 0
    assert mixed["ratio"] == mixed["verified_seconds"] / mixed["unverified_seconds"]
    assert found["lazy"]["simplegraph"]["longest_ms"] > found["lazy"]["simplegraph"]["median_ms"] > 0
    text = models.render(found)
    assert models.TEN in text
    assert "longest_ms" in text


def test_each_part_is_in_the_file_as_soon_as_it_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "calls.json"
    monkeypatch.setitem(models.PARTS, "lazy", lambda plan, device: 1 / 0)
    line = ["--device", "cpu", "--calls", "10", "--largest", "2", "--parts", "mixed,lazy", "--json", str(file)]
    with pytest.raises(ZeroDivisionError):
        models.main(line)
    assert set(json.loads(file.read_text())) >= {"machine_info", "mixed"}
