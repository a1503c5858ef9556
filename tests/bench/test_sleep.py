"""The benchmark of sleeping, with a tiny model: it wakes with the same answers, and its figures say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import sleep
from simplegraph.base.extras import memory_sources


def test_a_tiny_model_sleeps_and_wakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "sleep.json"
    try:
        sleep.main(["--device", "cpu", "--cycles", "2", "--json", str(figures)])
    finally:
        memory_sources.clear()
    found = json.loads(figures.read_text())
    assert [cycle["equal"] for cycle in found["cycles"]] == [3, 3]
    assert found["recaptures"] == 0
    assert all(0 < cycle["on_host"] < cycle["given_back"] for cycle in found["cycles"])
    assert "3 of 3" in capsys.readouterr().out
