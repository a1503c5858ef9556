"""The table of other people's models on a GPU: answers are eager's, and rows have times."""

from __future__ import annotations

from typing import Any

import pytest

from bench.model_table import table
from bench.model_table.row import FULL, measure_row
from bench.tools import fresh
from bench.tools.side_by_side import SideBySide

ROWS = ("torch/GRU", "torch/LSTM", "Llama", "BERT", "ViT", "ConvBert", "DETR", "Qwen2-VL")


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    """Rows of each kind, two processes at once."""
    fresh.preload("cuda", *table.PRELOADED)
    tasks = {name: (measure_row, (name, "cuda", True)) for name in ROWS}
    return dict(SideBySide(workers=2, seconds=120, total=240).run(tasks))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_eagers_answers_and_times(rows: dict[str, Any], name: str) -> None:
    row = rows[name]
    assert not isinstance(row, Exception), row
    assert (row["answers"], row["column"]) == ("equal", FULL), row
    assert row["timed"]["replays"] >= row["timed"]["steps"] > 0, row
    assert {"eager_ms", "ms"} <= row.keys()  # how long they are is for the benchmark, alone on a GPU
    assert row["kernel_ms"] > 0
