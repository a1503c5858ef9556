"""The reference model: what is benchmarked must be a Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.models.checkpoint import load_checkpoint
from bench.models.llama import CacheShape, Llama, build_llama
from bench.workload import PAGE_SIZE, Workload

transformers = pytest.importorskip("transformers")

REQUESTS, TOKENS = 3, 20
BLOCKS = 2
CACHE = CacheShape(1 + REQUESTS * BLOCKS, PAGE_SIZE)
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def config(**changes: object) -> transformers.LlamaConfig:
    settings = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # so that a wrong layer shows in the logits
    }
    return transformers.LlamaConfig(**settings | changes)


def reference(settings: transformers.LlamaConfig) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(settings).float().eval()


def ours_of(model: transformers.LlamaForCausalLM, folder: Path, **save: object) -> Llama:
    model.save_pretrained(folder, **save)
    ours = build_llama(model.config, CACHE, REQUESTS, dtype=torch.float32, random_weights=False)
    load_checkpoint(ours, folder)
    return ours


def decode(model: Llama, ids: Tensor) -> Tensor:
    """(REQUESTS, TOKENS, vocab) logits, one token of every request at a time."""
    pages = 1 + torch.arange(REQUESTS * BLOCKS).view(REQUESTS, BLOCKS)
    steps = []
    for position in range(ids.shape[1]):
        positions = torch.full((REQUESTS,), position)
        slots = pages[:, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
        steps.append(model(ids[:, position], positions, slots, (positions + 1).int(), pages.int()))
    return torch.stack(steps, dim=1)


@pytest.mark.parametrize(
    "changes",
    [{}, {"rope_scaling": LLAMA3}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}],
    ids=["plain", "llama3 rope", "tied", "biases"],
)
@torch.no_grad()
def test_decoding_through_the_paged_cache_gives_the_logits_of_transformers(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    model = reference(config(**changes))
    ids = torch.randint(0, model.config.vocab_size, (REQUESTS, TOKENS))
    torch.testing.assert_close(decode(ours_of(model, tmp_path), ids), model(ids).logits, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_sharded_checkpoint_loads_like_a_single_one(tmp_path: Path) -> None:
    model = reference(config())
    ours = ours_of(model, tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    for name, weight in model.named_parameters():
        assert torch.equal(weight, ours.get_parameter(name)), name


@torch.no_grad()
def test_padding_rows_leave_live_requests_and_their_cache_alone() -> None:
    model = build_llama(config(), CACHE, REQUESTS, dtype=torch.float32)
    live = (
        torch.tensor([5]),
        torch.tensor([17]),
        torch.tensor([2 * PAGE_SIZE + 1]),
        torch.tensor([18], dtype=torch.int32),
        torch.tensor([[1, 2]], dtype=torch.int32),
    )
    padding = (0, 0, -1, 0, 0)
    padded = tuple(torch.cat([t, torch.full_like(t, v)]) for t, v in zip(live, padding, strict=True))
    alone = model(*live).clone()
    caches = [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("cache")]
    with_padding = model(*padded)
    after = [buffer for name, buffer in model.named_buffers() if name.endswith("cache")]
    torch.testing.assert_close(with_padding[:1], alone)
    assert with_padding.isfinite().all()
    for old, new in zip(caches, after, strict=True):
        torch.testing.assert_close(new[1:], old[1:])  # page 0 is scratch


def test_the_same_seed_gives_the_same_model() -> None:
    one, other = (build_llama(config(), CACHE, REQUESTS, seed=3) for _ in range(2))
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())


def test_hidden_states_without_lm_head() -> None:
    model = build_llama(config(), CACHE, REQUESTS, lm_head=False)
    assert model.lm_head is None
    assert model(*_first_step()).shape == (REQUESTS, model.config.hidden_size)


def _first_step() -> tuple[Tensor, ...]:
    pages = 1 + torch.arange(REQUESTS * BLOCKS).view(REQUESTS, BLOCKS)
    ones = torch.ones(REQUESTS, dtype=torch.int32)
    return torch.arange(REQUESTS), torch.zeros(REQUESTS).long(), pages[:, 0] * PAGE_SIZE, ones, pages.int()


def test_frequencies_stay_in_float32_in_a_bfloat16_model() -> None:
    model = build_llama(config(), CACHE, REQUESTS, dtype=torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_unknown_rotary_scaling_is_refused() -> None:
    settings = config(rope_scaling={"rope_type": "linear", "factor": 2.0})
    with pytest.raises(ValueError, match=r"'linear'.*'default' and 'llama3'"):
        build_llama(settings, CACHE, REQUESTS)


def test_the_8b_config_is_eight_billion_parameters() -> None:
    settings = Workload("8b", (1,), torch.device("cpu")).config()
    with torch.device("meta"):
        model = Llama(settings, CACHE, REQUESTS)
    assert round(sum(weight.numel() for weight in model.parameters()) / 1e7) == 803
