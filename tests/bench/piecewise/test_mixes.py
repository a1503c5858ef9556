"""Mixed batches must be what they are called, and keep their requests apart."""

from __future__ import annotations

import pytest
import torch

from bench.models.workload import CONTEXT, PAGE_SIZE, Workload
from bench.piecewise.mixes import Chunk, mixed_batch, mixes

WORKLOAD = Workload("tiny", (64,), torch.device("cpu"))
CHUNKS = (Chunk(1, 199), Chunk(40), Chunk(17, 15), Chunk(1))


def test_a_batch_writes_where_its_block_table_reads() -> None:
    batch = mixed_batch(WORKLOAD, CHUNKS, 512, start=5)
    metadata = batch.metadata
    row = 0
    for chunk, pages in zip(CHUNKS, metadata.block_table.tolist(), strict=True):
        for position in range(chunk.cached, chunk.length):
            assert batch.positions[row] == position
            assert metadata.slots[row] == pages[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            row += 1
    assert row == metadata.num_tokens == len(batch.input_ids) == len(metadata.slots)


def test_requests_share_no_page_and_none_is_scratch() -> None:
    table = mixed_batch(WORKLOAD, CHUNKS, 512).metadata.block_table
    used = [row[: -(-chunk.length // PAGE_SIZE)] for row, chunk in zip(table, CHUNKS, strict=True)]
    pages = torch.cat(used)
    assert pages.unique().numel() == pages.numel()
    assert int(pages.min()) == 1
    assert int((table != 0).sum()) == pages.numel()


def test_metadata_on_the_host_and_on_the_device_agree() -> None:
    metadata = mixed_batch(WORKLOAD, CHUNKS, 512).metadata
    assert metadata.query_start_loc.tolist() == [0, 1, 41, 58, 59]
    assert metadata.seq_lens.tolist() == list(metadata.seq_lens_host) == [200, 40, 32, 1]
    assert metadata.query_lens == (1, 40, 17, 1)
    assert metadata.max_query_len == 40
    kinds = (metadata.slots, metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
    assert [tensor.dtype for tensor in kinds] == [torch.int64, *[torch.int32] * 3]


def test_another_start_gives_other_tokens() -> None:
    one, other = (mixed_batch(WORKLOAD, CHUNKS, 256, start=start).input_ids for start in (0, 997))
    assert not torch.equal(one, other)


def test_requests_that_do_not_fit_the_cache_say_what_they_need() -> None:
    small = Workload("tiny", (1,), torch.device("cpu"))
    assert mixed_batch(small, [Chunk(13 * PAGE_SIZE)], 512).metadata.num_tokens == 208
    with pytest.raises(ValueError, match="need 14 pages, the cache has 13"):
        mixed_batch(small, [Chunk(13 * PAGE_SIZE), Chunk(1)], 512)


@pytest.mark.parametrize("size", [16, 256, 1024, 2048])
def test_mixes_fill_their_size_but_for_the_padded_one(size: int) -> None:
    *full, padded = mixes(size, WORKLOAD)
    assert [mix.num_tokens for mix in full] == [size] * 3
    assert size // 2 < padded.num_tokens < size
    assert all(chunk.query > 0 for mix in (*full, padded) for chunk in mix.chunks)
    for mix in (*full, padded):
        mixed_batch(WORKLOAD, mix.chunks, 512)  # which refuses what does not fit the cache


def test_mixes_hold_decodes_prefills_and_chunks_of_prompts() -> None:
    prefill, with_prefill, chunked, _ = mixes(256, WORKLOAD)
    assert prefill.chunks == (Chunk(256),)
    assert sum(chunk.query == 1 for chunk in with_prefill.chunks) == 32
    contexts = [chunk.length for chunk in with_prefill.chunks if chunk.query == 1]
    assert len(set(contexts)) > 10
    assert max(contexts) <= CONTEXT
    assert sum(chunk.query > 1 and chunk.cached > 0 for chunk in chunked.chunks) == 2
