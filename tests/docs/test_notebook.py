"""The notebook runs from top to bottom, and shows what it prints."""

from __future__ import annotations

import json
import re

import pytest
import torch

from docs.tools.notebook import NOTEBOOK, code_cells, run, stored


@pytest.mark.proofs
def test_the_notebook_runs_and_shows_what_it_prints() -> None:
    cells = code_cells(json.loads(NOTEBOOK.read_text()))
    assert len(cells) >= 5
    printed = run(cells)
    assert sum(map(bool, printed)) >= 3
    if not torch.cuda.is_available():  # the outputs are the emulator's
        assert list(map(_timeless, printed)) == [_timeless(stored(cell)) for cell in cells]


def _timeless(text: str) -> str:
    """A text without the numbers that differ from run to run, times and sizes, and without columns' widths."""
    return re.sub(r"\s+", " ", re.sub(r"\d+\.\d+", "", text))
