"""The notebook runs from top to bottom, and shows what it prints."""

from __future__ import annotations

import json

import pytest
import torch

from docs.tools.notebook import NOTEBOOK, code_cells, run, stored, timeless


@pytest.mark.proofs
def test_the_notebook_runs_and_shows_what_it_prints() -> None:
    cells = code_cells(json.loads(NOTEBOOK.read_text()))
    assert len(cells) >= 5
    printed = run(cells)
    assert sum(map(bool, printed)) >= 3
    if not torch.cuda.is_available():  # the outputs are the emulator's
        assert list(map(timeless, printed)) == [timeless(stored(cell)) for cell in cells]
