"""Families of transformers that generate, by name: random weights, a real or a tiny shape, and batches for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Batch = dict[str, Tensor]
START = 4  # tokens that every generation of a speech model starts with: which language, which task


@dataclasses.dataclass(frozen=True)
class Family:
    """One family of models.

    Args:
        classes: transformers' config and model.
        real, tiny: settings of the config.
        max_length: tokens of the longest sequence that graphs are to serve.
        speech: True if the model takes audio features; other models take left-padded prompts.
    """

    classes: tuple[str, str]
    real: dict[str, Any]
    tiny: dict[str, Any]
    max_length: int = 2048
    speech: bool = False


_TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256} | {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def _decoder(name: str, real: dict[str, Any], tiny: dict[str, Any] | None = None, config: str = "Config") -> Family:
    return Family((f"{name}{config}", f"{name}ForCausalLM"), real, _TINY | (tiny or {}))


def _shape(hidden: int, inner: int, layers: int, heads: int, shared: int, words: int, **more: Any) -> dict[str, Any]:
    """Make the settings of a decoder with `shared` key-value heads and a vocabulary of `words`."""
    return {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": words,
        "max_position_embeddings": 8192,
    } | more


FAMILIES: dict[str, Family] = {
    "llama": _decoder("Llama", _shape(2048, 8192, 16, 32, 8, 128256)),  # Llama 3.2 1B's
    "qwen2": _decoder("Qwen2", _shape(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True)),  # 0.5B
    "qwen3": _decoder(  # 0.6B
        "Qwen3", _shape(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True), {"head_dim": 16}
    ),
    "mistral": _decoder(  # half as wide and deep as 7B
        "Mistral", _shape(2048, 7168, 16, 16, 4, 32000, sliding_window=4096), {"sliding_window": 8}
    ),
    "gemma3": _decoder(  # 1B
        "Gemma3",
        _shape(1152, 6912, 26, 4, 1, 262144, head_dim=256, sliding_window=512),
        {"head_dim": 16, "sliding_window": 8},
        config="TextConfig",
    ),
    "gpt2": Family(
        ("GPT2Config", "GPT2LMHeadModel"),
        {},  # the small one's
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "vocab_size": 256},
        max_length=1024,
    ),
    "mixtral": _decoder(
        "Mixtral",
        _shape(1024, 3584, 8, 16, 8, 32000, num_local_experts=8, num_experts_per_tok=2),
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "mamba": Family(
        ("MambaConfig", "MambaForCausalLM"),
        {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50280},  # 130M
        {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4, "vocab_size": 256},
    ),
    "hybrid": _decoder(  # 1B: 15 layers of states to 3 of attention
        "Bamba",
        _shape(2048, 4096, 18, 32, 8, 50000, attn_layer_indices=[5, 11, 17])
        | {"mamba_d_state": 128, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_n_groups": 1},
        {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 4}
        | {"attn_layer_indices": [1]},
    ),
    "t5": Family(
        ("T5Config", "T5ForConditionalGeneration"),
        {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}  # base's
        | {"decoder_start_token_id": 0},
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 256}
        | {"decoder_start_token_id": 0},
    ),
    "whisper": Family(
        ("WhisperConfig", "WhisperForConditionalGeneration"),
        {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "vocab_size": 51865}  # small's
        | {"encoder_attention_heads": 12, "decoder_attention_heads": 12}
        | {"encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "begin_suppress_tokens": None},
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 256, "num_mel_bins": 8}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_source_positions": 20}
        | {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "begin_suppress_tokens": None, "decoder_start_token_id": 1},
        max_length=448,
        speech=True,
    ),
}


def build(name: str, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> Any:
    """Build the model in evaluation mode, without end tokens."""
    import transformers

    family = FAMILIES[name]
    config_class, model_class = (getattr(transformers, one) for one in family.classes)
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    config = config_class(**(family.tiny if tiny else family.real), **ends, dtype=dtype)
    with device:
        return model_class(config).to(dtype).eval()


def batch(name: str, model: Any, lengths: Sequence[int]) -> Batch:
    """Make a row for each length; a speech model gets features of full length and the same first tokens in all rows."""
    if FAMILIES[name].speech:
        frames = (len(lengths), model.config.num_mel_bins, 2 * model.config.max_source_positions)
        start = torch.randint(1, 256, (1, START)).expand(len(lengths), START).clone()
        found = {"input_features": torch.randn(frames).to(model.dtype), "decoder_input_ids": start}
    else:
        found = _padded([torch.randint(1, model.config.vocab_size, (length,)) for length in lengths])
    return {key: tensor.to(model.device) for key, tensor in found.items()}


def _padded(rows: list[Tensor]) -> Batch:
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")
    mask = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": ids,
        "attention_mask": torch.nn.utils.rnn.pad_sequence(mask, batch_first=True, padding_side="left"),
    }
