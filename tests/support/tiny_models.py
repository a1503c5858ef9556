"""Models of transformers with two layers and random weights, and batches for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers

# What models of the installed release call their cache.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaForCausalLM.forward).parameters else "past_key_values"
VOCABULARY, PAD, EOS = 100, 0, 2
COMMON = {"vocab_size": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": EOS}
LLAMA = COMMON | {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
HEADS = {"head_dim": 16}
GPT2 = COMMON | {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}
MOE = LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}
T5 = COMMON | {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": PAD,
}
WHISPER = COMMON | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 64,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": None,
    "suppress_tokens": None,
}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}

# Name -> how it is made. Windows of 8 tokens, so that the generations here run past them.
DECODERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**LLAMA)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**LLAMA, **HEADS)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=8)),
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**LLAMA, **HEADS)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**LLAMA, **HEADS, sliding_window=8)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**LLAMA, **HEADS, sliding_window=8)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
}
MIXTURES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**MOE)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**LLAMA, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    ),
}
# Sparse attention: layers of the cache hold keys of an indexer beside keys and values.
DEEPSEEK_V32 = LLAMA | {
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32},
    **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "num_key_value_heads": 4, "first_k_dense_replace": 1},
}
ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
    "whisper": lambda: transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER)),
}


def build(make: Callable[[], Any], device: torch.device, seed: int = 0) -> Any:
    """The model in evaluation mode, with weights large enough that its tokens vary."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.to(device).eval()


def prompts(lengths: list[int], device: torch.device, seed: int = 1) -> dict[str, torch.Tensor]:
    """Left-padded rows of random tokens of these lengths, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (len(lengths), max(lengths)), generator=generator)
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : max(lengths) - length] = PAD
        mask[row, : max(lengths) - length] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def features(rows: int, device: torch.device, seed: int = 1) -> dict[str, torch.Tensor]:
    """Random mel features of as many rows, for the tiny Whisper."""
    generator = torch.Generator().manual_seed(seed)
    return {"input_features": torch.randn(rows, 8, 40, generator=generator).to(device)}
