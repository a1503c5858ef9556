"""What the walks of docs/contributing.md build works as the page shows it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

WALKS = sorted((Path(__file__).parent / "walks").glob("*.py"))


@pytest.mark.proofs
@pytest.mark.parametrize("walk", WALKS, ids=[path.stem for path in WALKS])
def test_a_walk_runs(walk: Path) -> None:
    page = walk.parents[3] / "docs" / "contributing.md"
    assert f"../tests/docs/walks/{walk.name}" in page.read_text(encoding="utf-8")
    runpy.run_path(str(walk))
