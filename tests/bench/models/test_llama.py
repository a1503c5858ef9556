"""The reference model: what is benchmarked must be a Llama."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.models.checkpoint import load_checkpoint
from bench.models.fused import fused
from bench.models.llama import CacheShape, Llama, build_llama
from bench.models.workload import PAGE_SIZE, Workload

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


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Qwen3"])
@torch.no_grad()
def test_every_layer_of_every_family_gives_the_hidden_states_of_transformers(tmp_path: Path, kind: str) -> None:
    settings = getattr(transformers, f"{kind}Config")(**vars_of(config()), head_dim=8)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).float().eval()
    for weight in model.parameters():  # biases and norms start as 0 and 1, which hides mistakes
        if weight.dim() == 1:
            weight.add_(torch.randn_like(weight) * 0.2)
    ours = ours_of(model, tmp_path)
    ids = torch.randint(0, settings.vocab_size, (REQUESTS, TOKENS))
    expected = model(ids, output_hidden_states=True).hidden_states[1:-1]  # the last one is normed
    found: list[list[Tensor]] = [[] for _ in ours.model.layers]
    for layer, outputs in zip(ours.model.layers, found, strict=True):
        layer.register_forward_hook(lambda *call, outputs=outputs: outputs.append(call[-1]))
    logits = decode(ours, ids)
    for outputs, hidden in zip(found, expected, strict=False):
        torch.testing.assert_close(torch.stack(outputs, dim=1), hidden, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def vars_of(settings: transformers.LlamaConfig) -> dict[str, object]:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "initializer_range")
    return {name: getattr(settings, name) for name in names}


def test_another_architecture_is_refused() -> None:
    with pytest.raises(ValueError, match="model_type is 'gpt2'; expected llama, qwen2, qwen3"):
        build_llama(transformers.GPT2Config(), CACHE, 1)


def test_attention_over_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="use_sliding_window"):
        build_llama(transformers.Qwen2Config(use_sliding_window=True), CACHE, 1)


@torch.no_grad()
def test_multimodal_positions_turn_each_frequency_by_its_own_axis() -> None:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    rotary = build_llama(config(rope_scaling=rope), CACHE, REQUESTS).model.rotary_emb
    time, height, width = (torch.randint(0, 50, (5,)) for _ in range(3))
    cos, sin = rotary(torch.stack([time, height, width]), torch.float32)
    for part, axis in ((slice(0, 2), time), (slice(2, 3), height), (slice(3, 4), width)):
        alone_cos, alone_sin = rotary(axis, torch.float32)
        assert torch.equal(cos[..., part], alone_cos[..., part])
        assert torch.equal(sin[..., part], alone_sin[..., part])
    text_cos, _ = rotary(time.expand(3, -1), torch.float32)
    assert torch.equal(text_cos, rotary(time, torch.float32)[0])


def test_multimodal_positions_need_sections() -> None:
    rotary = build_llama(config(), CACHE, REQUESTS).model.rotary_emb
    with pytest.raises(ValueError, match="mrope_section"):
        rotary(torch.zeros(3, 4), torch.float32)


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


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_fused_layers_give_the_logits_of_the_plain_ones(kind: str) -> None:
    settings = getattr(transformers, f"{kind}Config")(
        **config().to_dict() | {"model_type": kind.lower(), "head_dim": 8}
    )
    model = build_llama(settings, CACHE, REQUESTS, dtype=torch.float32)
    ids = torch.randint(0, 97, (REQUESTS, 6), generator=torch.Generator().manual_seed(0))
    expected = decode(model, ids)
    model.reset_buffers()
    with fused(model):
        torch.testing.assert_close(decode(model, ids), expected, rtol=1e-4, atol=1e-5)
    assert model.model.fused is None


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
