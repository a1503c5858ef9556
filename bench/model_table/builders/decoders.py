"""Decoders and models with states, which `generate` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import tiny_lengths
import tiny_models
import tiny_multimodal
import tiny_states

from bench.model_table.builders.model import Settings, TableModel, configured, prompts, resized
from bench.transformers_generate.families import FAMILIES

L, HEADS = tiny_models.LLAMA, tiny_models.HEADS
# A layer as wide as those of a model of 3 B; eight of them, so that a row takes seconds.
WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"intermediate_size": 2048, "num_experts_per_tok": 2}
FALCON = tiny_models.COMMON | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT_NEO = tiny_models.COMMON | {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 512}
GPT_NEO |= {"window_size": 8, "attention_types": [[["global", "local"], 1]]}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
GEMMA3N = {
    "num_hidden_layers": 4,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 100,
    "num_kv_shared_layers": 2,
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


def _decoder(kind: str, tiny: Settings, real: Settings) -> Callable[[bool], Any]:
    return configured(f"{kind}Config", f"{kind}ForCausalLM", tiny, real)


def _shared(name: str, small: Callable[[], Any]) -> Callable[[bool], Any]:
    """Return a builder of a family that another benchmark measures at its real shape."""
    return resized(small, FAMILIES[name].real | ENDS)


# Widths that every config with Llama's names takes, and what it takes in addition: at the tiny shape, at the real one.
_LIKE_LLAMA: dict[str, tuple[str, Settings, Settings]] = {
    "gpt_neox": ("GPTNeoX", {}, {}),
    "phi": ("Phi", {}, {}),
    "phi3": ("Phi3", {}, {}),
    "stablelm": ("StableLm", {}, {}),
    "starcoder2": ("Starcoder2", {}, {}),
    "cohere": ("Cohere", {}, {}),
    "olmo2": ("Olmo2", {}, {}),
    "granite": ("Granite", {}, {}),
    "smollm3": ("SmolLM3", {}, {}),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2}, EXPERTS | {"num_experts": 8}),
    "deepseek_v3": (
        "DeepseekV3",
        {"num_key_value_heads": 4, "moe_intermediate_size": 32} | DEEPSEEK | LATENT,
        {"num_key_value_heads": 16, "moe_intermediate_size": 1024, "n_routed_experts": 16}
        | {"num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
}


def _decoders() -> Iterator[tuple[str, Callable[[bool], Any]]]:
    small = tiny_models.DECODERS | tiny_models.MIXTURES
    for name in ("llama", "qwen2", "qwen3", "mistral", "gemma3", "gpt2", "mixtral"):
        yield name, _shared(name, small[name])
    yield "gemma", resized(small["gemma"], WIDE | {"head_dim": 128} | ENDS)
    yield "gemma2", resized(small["gemma2"], WIDE | {"head_dim": 128} | ENDS)
    experts = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 1024}
    yield "qwen3_moe", resized(small["qwen3_moe"], WIDE | {"head_dim": 128} | experts | ENDS)
    oss = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 2048, "head_dim": 64}
    yield "gpt_oss", resized(tiny_multimodal.MODELS["gpt_oss"][0], WIDE | oss | ENDS)
    yield "opt", resized(tiny_lengths.DECODERS["opt"], {})
    yield "bloom", resized(tiny_lengths.DECODERS["bloom"], {"hidden_size": 1024, "n_layer": 24, "n_head": 16} | ENDS)
    yield "mpt", resized(tiny_lengths.DECODERS["mpt"], {"n_layers": 12, "use_cache": True} | ENDS)
    for name, (kind, tiny, real) in _LIKE_LLAMA.items():
        yield name, _decoder(kind, L | tiny, WIDE | real | ENDS)
    yield "gpt_neo", _decoder("GPTNeo", GPT_NEO, {"num_layers": 12, "attention_types": [[["global", "local"], 6]]})
    yield "gpt_j", _decoder("GPTJ", tiny_models.GPT2 | {"rotary_dim": 8}, {"n_embd": 2048, "n_layer": 8, "n_head": 16})
    yield "falcon", _decoder("Falcon", FALCON, {"hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 32})
    real = WIDE | {"head_dim": 256, "num_kv_shared_layers": 4, "activation_sparsity_pattern": [0.0] * 8}
    real |= {"intermediate_size": 4096, "vocab_size_per_layer_input": 32000}
    real |= {"layer_types": ["sliding_attention", "full_attention"] * 4}
    yield "gemma3n", configured("Gemma3nTextConfig", "Gemma3nForCausalLM", L | HEADS | GEMMA3N, real | ENDS)


HYBRID = WIDE | ENDS | {"intermediate_size": 4096}
MOE = {"num_experts": 8, "num_experts_per_tok": 2}
# Without their own kernels, models of states pad a prompt to whole chunks, whose square is the size of their tensors.
CHUNK = 64
# By the name in `tiny_states`: settings of the real shape, over the class's defaults.
_REAL_STATES: dict[str, Settings] = {
    "Mamba": FAMILIES["mamba"].real,
    "Mamba2": {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "n_groups": 1, "num_hidden_layers": 24}
    | {"chunk_size": CHUNK},
    "FalconMamba": {"hidden_size": 1024, "num_hidden_layers": 24},
    "Jamba": HYBRID | MOE | {"attn_layer_period": 8, "attn_layer_offset": 4},
    "Zamba": HYBRID
    | {"num_key_value_heads": 16, "n_mamba_heads": 2, "attention_head_dim": 256, "mamba_dt_rank": 128}
    | {"num_hidden_layers": 24, "layers_block_type": (["mamba"] * 5 + ["hybrid"]) * 4},
    "Zamba2": HYBRID
    | {"num_key_value_heads": 16, "n_mamba_heads": 64, "layers_block_type": ["mamba", "hybrid"] * 4}
    | {"chunk_size": CHUNK},
    "Bamba": FAMILIES["hybrid"].real | {"mamba_chunk_size": CHUNK},
    "GraniteMoeHybrid": HYBRID
    | {"mamba_n_heads": 64, "mamba_d_head": 64, "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"mamba_chunk_size": CHUNK, "intermediate_size": 2048}
    | {"layer_types": ["mamba", "mamba", "mamba", "attention"] * 2},
    "FalconH1": HYBRID | {"mamba_d_ssm": 4096, "mamba_n_heads": 64, "mamba_d_head": 64, "mamba_chunk_size": CHUNK},
    "Lfm2": HYBRID | {"layer_types": ["conv", "full_attention"] * 4},
    "NemotronH": HYBRID
    | {"layers_block_type": ["mamba", "mlp", "mamba", "attention"] * 2, "head_dim": 128}
    | {"chunk_size": CHUNK},
    "Qwen3Next": HYBRID | MOE | {"head_dim": 128, "moe_intermediate_size": 1024},
    "Qwen3_5": HYBRID | {"head_dim": 128},
    "RecurrentGemma": HYBRID | {"lru_width": 2048, "attention_window_size": 512},
    "Rwkv": {"hidden_size": 1024, "num_hidden_layers": 12, "attention_hidden_size": 1024},
    "MiniMax": HYBRID | {"head_dim": 128, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 2048},
}
_REAL_STATES["NemotronH"].pop("num_hidden_layers")
_NAMES = {"qwen3next": "qwen3_next", "qwen3_5": "qwen3_5"}


def _states() -> Iterator[tuple[str, Callable[[bool], Any]]]:
    for kind, make in (tiny_states.MODELS | tiny_states.ELSEWHERE).items():
        yield _NAMES.get(kind.lower(), kind.lower()), resized(make, _REAL_STATES[kind])
    yield "mamba_130m", resized(tiny_states.MODELS["Mamba"], FAMILIES["mamba"].real)
    one_billion = WIDE | ENDS | {"num_hidden_layers": 16, "num_experts": 1, "num_experts_per_tok": 1}
    one_billion |= {"intermediate_size": 5632, "attn_layer_period": 8, "attn_layer_offset": 4}
    yield "jamba_1b_shape", resized(tiny_states.MODELS["Jamba"], one_billion)
    yield "llama_1b_shape", _shared("llama", tiny_models.DECODERS["llama"])


MODELS = {name: TableModel(build, prompts) for name, build in (*_decoders(), *_states())}
