"""Real text in, batches that fit the cache out."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.models.workload import PAGE_SIZE, Workload
from bench.tools import text

CPU = torch.device("cpu")


def test_token_ids_are_the_texts_bytes() -> None:
    ids = text.token_ids(11, 256)
    assert bytes(ids.tolist()) == b"In Congress"


def test_token_ids_begin_again_at_the_end_of_the_text() -> None:
    length = len(text.TEXT.read_bytes())
    assert text.token_ids(2, 256, start=length - 1).tolist() == [ord("\n"), ord("I")]


def test_token_ids_stay_inside_a_small_vocabulary() -> None:
    assert int(text.token_ids(500, 50).max()) < 50


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    with pytest.raises(ValueError, match="is empty"):
        text.token_ids(1, 256, path=tmp_path / "empty.txt")


@pytest.mark.parametrize("mixed", [False, True])
def test_a_batch_writes_where_its_block_table_reads(mixed: bool) -> None:
    workload = Workload("tiny", (64,), CPU)
    ids, positions, slots, lengths, table = workload.batch(64, 512, start=5, mixed_lengths=mixed)
    assert ids.dtype == positions.dtype == slots.dtype == torch.int64
    assert lengths.dtype == table.dtype == torch.int32
    assert torch.equal(lengths, positions.int() + 1)
    pages = table.gather(1, (positions[:, None] // PAGE_SIZE))[:, 0]
    assert torch.equal(slots, pages.long() * PAGE_SIZE + positions % PAGE_SIZE)
    assert table.unique().numel() == table.numel()
    assert int(table.min()) == 1  # page 0 is scratch
    assert len(lengths.unique()) > 1 if mixed else bool((lengths == workload.context).all())


def test_an_unknown_model_says_what_there_is() -> None:
    with pytest.raises(FileNotFoundError, match="expected 70b, 8b, tiny, or a folder"):
        Workload("7b", (1,), CPU).config()
