"""The reference engine on a GPU: every arm generates the same tokens, and fused layers are the plain ones."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from bench.engine import Engine, EngineConfig, EngineError, SamplingParams  # noqa: E402
from bench.models.llama import CacheShape, Llama, build_llama  # noqa: E402
from bench.models.serving import ServingLlama  # noqa: E402
from simplegraph import BatchDescriptor, CudaGraphMode  # noqa: E402
from simplegraph.attention import BatchMetadata, PagedKVCache, SDPABackend, attending  # noqa: E402

VOCAB = 997
MODES = ["NONE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE"]
FUSED = importlib.util.find_spec("triton") is not None


def model(dtype: torch.dtype, kind: str = "Llama") -> Llama:
    settings = getattr(transformers, f"{kind}Config")(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        initializer_range=0.1,
    )
    return build_llama(settings, CacheShape(1, 16), 512, device="cuda", dtype=dtype, seed=3)


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 200))] for _ in range(count)]


def generate(llama: Llama, count: int, tokens: int, **changes: Any) -> list[list[int]]:
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_tokens": 512, "max_model_len": 400, "num_pages": 1700}
    engine = Engine(llama, EngineConfig(**settings | changes))
    assert engine.capture().failed == {}
    found = engine.generate(prompts(count), SamplingParams(max_tokens=tokens))
    if engine.runner.several is not None:
        assert engine.runner.several.stats.replays > 0
        engine.runner.several.reset()
    engine.runner.manager.reset()
    return found


def test_every_arm_generates_the_same_greedy_tokens() -> None:
    llama = model(torch.float32)
    expected = generate(llama, 64, 128, mode="NONE", overlap=False, attention="sdpa")
    assert all(len(tokens) == 128 for tokens in expected)
    for mode in MODES:
        assert generate(llama, 64, 128, mode=mode, attention="sdpa") == expected, mode
    assert generate(llama, 64, 128, mode="PIECEWISE", compiled=True, attention="sdpa") == expected
    assert generate(llama, 64, 128, attention="triton") == expected
    for attention in ("sdpa", "triton"):
        assert generate(llama, 64, 128, attention=attention, tokens_per_launch=8) == expected, attention


def test_requests_that_give_way_generate_the_same_tokens() -> None:
    llama = model(torch.float32)
    expected = generate(llama, 16, 60, mode="NONE", attention="sdpa")
    assert generate(llama, 16, 60, attention="sdpa", num_pages=90) == expected


@pytest.mark.skipif(not FUSED, reason="needs Triton")
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_fused_layers_are_the_plain_ones(kind: str) -> None:
    llama = model(torch.bfloat16, kind)
    attention = llama.model.layers[0].self_attn
    for norm in (module.q_norm for module in (layer.self_attn for layer in llama.model.layers)):
        if norm is not None:
            norm.weight.data.uniform_(0.5, 1.5)
    results = []
    for fused in (False, True):
        rows = {"dtype": torch.bfloat16, "device": "cuda"}
        cache = PagedKVCache(3, 60, 16, attention.num_kv_heads, attention.head_dim, **rows)
        metadata = BatchMetadata(max_num_tokens=64, max_num_reqs=8, max_model_len=256, page_size=16, device="cuda")
        backend = SDPABackend(cache, metadata, num_heads=attention.num_heads)
        served = ServingLlama(llama, backend, 64, fused=fused)
        assert served.fused is fused
        queries, lengths = [1, 17, 1, 30], [100, 17, 33, 180]
        pages = iter(range(1, 60))
        table = [[next(pages) for _ in range(-(-length // 16))] for length in lengths]
        cache._memory.normal_(generator=torch.Generator("cuda").manual_seed(1))
        metadata.set(queries, lengths, table, num_tokens=64, num_reqs=8)
        spans = [torch.arange(length - query, length) for query, length in zip(queries, lengths, strict=True)]
        positions = torch.cat(spans).cuda()
        positions = torch.nn.functional.pad(positions, (0, 64 - len(positions)))
        ids = torch.randint(0, VOCAB, (64,), generator=torch.Generator().manual_seed(2)).cuda()
        with torch.inference_mode(), attending(backend, CudaGraphMode.NONE, BatchDescriptor(64, 8)):
            hidden = served(ids, positions)
        results.append((hidden[:49].double(), cache._memory[:, :, :60].double()))
    for plain, fused_result in zip(*results, strict=True):
        assert float((plain - fused_result).norm() / plain.norm()) < 2e-2


def next_logits(llama: Llama, tokens: list[int]) -> torch.Tensor:
    """Compute the logits of the token after `tokens` by plain layers, in float64."""
    attention, count, pages = llama.model.layers[0].self_attn, len(tokens), -(-len(tokens) // 16)
    weight = llama.model.embed_tokens.weight
    rows = {"dtype": weight.dtype, "device": weight.device}
    cache = PagedKVCache(3, 1 + pages, 16, attention.num_kv_heads, attention.head_dim, **rows)
    sizes = {"max_num_tokens": count, "max_num_reqs": 1, "max_model_len": count, "page_size": 16}
    metadata = BatchMetadata(**sizes, device=weight.device)
    backend = SDPABackend(cache, metadata, num_heads=attention.num_heads)
    metadata.set([count], [count], [list(range(1, 1 + pages))], num_tokens=count, num_reqs=1)
    ids, positions = torch.tensor(tokens, device=weight.device), torch.arange(count, device=weight.device)
    with torch.inference_mode(), attending(backend, CudaGraphMode.NONE, BatchDescriptor(count, 1)):
        hidden = ServingLlama(llama, backend, count, fused=False)(ids, positions)
        return llama.head(hidden[-1:])[0].double()


@pytest.mark.skipif(not FUSED, reason="needs Triton")
@pytest.mark.parametrize("attention", ["triton", "fa3", "flashinfer"])
def test_first_tokens_in_bfloat16_agree_with_eager_plain_layers(attention: str) -> None:
    llama = model(torch.bfloat16)
    try:
        found = generate(llama, 48, 24, attention=attention)
    except EngineError as error:
        pytest.skip(str(error))
    expected = generate(llama, 48, 24, attention=attention, mode="NONE", fused=False)
    first = [
        next(filter(lambda at: one[at] != other[at], range(24)), 24) for one, other in zip(found, expected, strict=True)
    ]
    assert sum(at > 0 for at in first) >= 44
    # Rounding decides near ties, and one other token changes all that follow: eager's own error must explain the first.
    exact = model(torch.float32)
    exact.load_state_dict(llama.state_dict())
    for prompt, one, other, at in zip(prompts(48), found, expected, first, strict=True):
        if at < 24:
            wanted, plain = (next_logits(each, prompt + other[:at]) for each in (exact, llama))
            assert wanted.max() - wanted[one[at]] <= 3 * (plain - wanted).abs().max()
