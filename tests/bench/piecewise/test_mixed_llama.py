"""Mixed batches: attention is correct for any mixture of query lengths, which it reads at every replay."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.models import attention
from bench.models.llama import Attention, Llama
from bench.models.workload import PAGE_SIZE, Workload
from bench.piecewise import mixed_llama
from bench.piecewise.mixed_llama import AttentionMetadata, MixedLlama, for_requests, mixed_attention
from bench.piecewise.mixes import Chunk, MixedBatch, mixed_batch
from simplegraph import wrap

WORKLOAD = Workload("tiny", (1, 32), torch.device("cpu"))


@pytest.fixture(scope="module")
def llama() -> Llama:
    return WORKLOAD.build()


@pytest.fixture(scope="module")
def layer() -> Attention:
    return WORKLOAD.build().double().model.layers[0].self_attn


def batch_of(llama: Llama, *chunks: Chunk, start: int = 0) -> MixedBatch:
    return mixed_batch(WORKLOAD, chunks, llama.config.vocab_size, start=start)


def heads(layer: Attention, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, k, v."""
    counts = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    q, k, v = (torch.randn(rows, count, layer.head_dim, dtype=torch.float64) for count in counts)
    return q, k, v


def reference(q: Tensor, k: Tensor, v: Tensor, layer: Attention, metadata: AttentionMetadata) -> Tensor:
    """One token and head at a time, over a dense history of the request; the cache as it was before the step."""
    out, row = torch.empty_like(q), 0
    for request, (query, length) in enumerate(zip(metadata.query_lens, metadata.seq_lens_host, strict=True)):
        pages = metadata.block_table[request]
        places = [(int(pages[i // PAGE_SIZE]), i % PAGE_SIZE) for i in range(length - query)]
        keys, values = (
            torch.stack([*(cache[place] for place in places), *new[row : row + query]])
            for cache, new in ((layer.k_cache, k), (layer.v_cache, v))
        )
        for token in range(query):
            seen = length - query + token + 1
            for head in range(layer.num_heads):
                shared = head // (layer.num_heads // layer.num_kv_heads)
                scores = keys[:seen, shared] @ q[row + token, head] * layer.head_dim**-0.5
                out[row + token, head] = scores.softmax(0) @ values[:seen, shared]
        row += query
    return out


def random_chunks(seed: int) -> list[Chunk]:
    draw = random.Random(seed)
    return [Chunk(draw.choice((1, 1, 2, 15, 16, 17, 33)), draw.choice((0, 1, 15, 16, 40))) for _ in range(5)]


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("seed", range(4))
def test_attention_of_mixed_requests_is_that_of_a_float64_reference(layer: Attention, seed: int, padding: int) -> None:
    metadata = mixed_batch(WORKLOAD, random_chunks(seed), 512).metadata
    q, k, v = heads(layer, metadata.num_tokens + padding)
    expected = reference(q[: metadata.num_tokens], k, v, layer, metadata)
    out = torch.full_like(q, float("nan"))
    with for_requests(metadata):
        mixed_attention(q, k, v, out, layer)
    torch.testing.assert_close(out[: metadata.num_tokens], expected, rtol=1e-11, atol=1e-12)
    assert not out[metadata.num_tokens :].any()


class Flash:
    """Stands in for FlashAttention-3: notes what it is asked for."""

    __name__ = "vllm_flash_attn"

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []

    def flash_attn_varlen_func(self, *tensors: Tensor, **settings: Any) -> None:
        self.asked.append(settings | {"rows": tensors[0].shape[0]})
        settings["out"].fill_(1.0)


def test_flash_attention_is_given_the_live_requests(layer: Attention, monkeypatch: pytest.MonkeyPatch) -> None:
    flash = Flash()
    monkeypatch.setattr(mixed_llama, "flash_attention", lambda q: flash)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    q, k, v = heads(layer, 12)
    for chunks in ((Chunk(4), Chunk(5, 7)), (Chunk(1, 3), Chunk(10, 20), Chunk(1))):
        metadata, out = mixed_batch(WORKLOAD, chunks, 512).metadata, torch.full_like(q, float("nan"))
        with for_requests(metadata):
            mixed_attention(q, k, v, out, layer)
        asked = flash.asked.pop()
        assert asked["max_seqlen_q"] == max(chunk.query for chunk in chunks)
        assert asked["rows"] == metadata.num_tokens
        for name, given in (("cu_seqlens_q", "query_start_loc"), ("seqused_k", "seq_lens"), ("block_table",) * 2):
            assert asked[name] is getattr(metadata, given)
        assert asked["max_seqlen_k"] >= max(metadata.seq_lens_host)
        assert bool((out[: metadata.num_tokens] == 1).all())
        assert not out[metadata.num_tokens :].any()


def test_decoding_asks_flash_attention_for_one_token_each(llama: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    flash = Flash()
    monkeypatch.setattr(attention, "flash_attention", lambda q: flash)
    monkeypatch.setattr(attention, "_multiprocessors", lambda device: 132)
    llama(*WORKLOAD.batch(3, 512))
    assert [(asked["max_seqlen_q"], asked["rows"]) for asked in flash.asked] == [(1, 3)] * 2
    assert flash.asked[0]["cu_seqlens_q"].tolist() == [0, 1, 2, 3]


def test_padding_leaves_the_cache_alone(layer: Attention) -> None:
    metadata = mixed_batch(WORKLOAD, [Chunk(3), Chunk(1, 20)], 512).metadata
    q, k, v = heads(layer, 9)
    before = layer.k_cache.clone().view(-1, layer.num_kv_heads, layer.head_dim)
    with for_requests(metadata):
        mixed_attention(q, k, v, torch.empty_like(q), layer)
    after = layer.k_cache.view_as(before)
    assert torch.equal(after[metadata.slots], k[:4])
    before[metadata.slots] = k[:4]
    assert torch.equal(after, before)


def test_attention_without_requests_says_what_to_do(llama: Llama) -> None:
    with pytest.raises(RuntimeError, match=r"inside `with for_requests\(metadata\):`"):
        MixedLlama(llama)(torch.zeros(1).long(), torch.zeros(1).long())


def test_a_forward_with_too_few_rows_says_so(llama: Llama) -> None:
    ids, positions, metadata = batch_of(llama, Chunk(4))
    with for_requests(metadata), pytest.raises(RuntimeError, match="have 4 tokens, the forward only 3 rows"):
        MixedLlama(llama)(ids[:3], positions[:3])


@torch.no_grad()
def test_a_prompt_in_chunks_gives_what_decoding_it_token_by_token_gives(llama: Llama) -> None:
    ids, positions, metadata = batch_of(llama, Chunk(37))
    pages, chunked = metadata.block_table, MixedLlama(llama)
    steps = [
        llama(ids[i, None], positions[i, None], metadata.slots[i, None], torch.tensor([i + 1]).int(), pages)
        for i in range(37)
    ]
    found = []
    for begin, end in ((0, 20), (20, 21), (21, 37)):
        part = batch_of(llama, Chunk(end - begin, begin), start=begin)
        assert torch.equal(part.input_ids, ids[begin:end])
        with for_requests(part.metadata):
            found.append(chunked(part.input_ids, part.positions))
    torch.testing.assert_close(torch.cat(found), torch.cat(steps), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_decodes_alone_give_what_the_decoding_model_gives(llama: Llama) -> None:
    chunks = [Chunk(1, cached) for cached in (0, 15, 16, 199)]
    ids, positions, metadata = batch_of(llama, *chunks)
    expected = llama(ids, positions, metadata.slots, metadata.seq_lens, metadata.block_table)
    with for_requests(metadata):
        torch.testing.assert_close(MixedLlama(llama)(ids, positions), expected)


MIXTURES: Sequence[tuple[Chunk, ...]] = (
    (Chunk(16),),
    (Chunk(1, 30), Chunk(1, 7), Chunk(14, 2)),
    (*(Chunk(1, cached) for cached in range(9)), Chunk(2, 40)),
    (Chunk(5, 100), Chunk(4)),
)


@torch.no_grad()
def test_one_graph_serves_every_mixture_of_its_size(llama: Llama) -> None:
    eager = MixedLlama(llama)
    graphed = wrap(eager, mode="PIECEWISE", capture_sizes=[8, 16], capture="upfront", progress=False)
    ids, positions, metadata = batch_of(llama, *MIXTURES[0])
    with for_requests(metadata):
        graphed.capture_graphs(ids, positions)
    for index, chunks in enumerate(MIXTURES):
        ids, positions, metadata = batch_of(llama, *chunks, start=100 * index)
        with for_requests(metadata):
            expected = eager(ids, positions)
            torch.testing.assert_close(graphed(ids, positions), expected)
    assert graphed.graph_stats.replays == len(MIXTURES)
    assert not graphed.graph_stats.eager


def test_a_mixed_model_has_no_weights_of_its_own(llama: Llama) -> None:
    shared = MixedLlama(llama)
    assert {id(weight) for weight in shared.parameters()} == {id(weight) for weight in llama.parameters()}
    assert not shared.training
