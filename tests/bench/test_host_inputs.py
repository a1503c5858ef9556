"""The benchmark of images on the CPU, with a tiny model: graphs serve every way to pass them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import host_inputs


def test_every_way_to_pass_images_is_served_by_a_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "host_inputs.json"
    host_inputs.main(["--device", "cpu", "--rounds", "1", "--json", str(figures)])
    found = json.loads(figures.read_text())
    assert list(found["waited_us"]) == ["device", "pinned", "pinned, waits", "pageable", "eager"]
    assert all(time > 0 for time in found["waited_us"].values())
    assert "of device" in capsys.readouterr().out
