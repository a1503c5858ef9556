"""Tiny models of transformers whose caches hold states: Mamba and its kin, and hybrids with attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny_models as tiny
import transformers

MAMBA = tiny.COMMON | {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "time_step_rank": 4}
MAMBA2 = tiny.COMMON | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 8,
    "head_dim": 8,
    "state_size": 8,
    "n_groups": 2,
    "chunk_size": 4,
}
HYBRID = tiny.LLAMA | {"num_hidden_layers": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
MAMBA_LAYERS = {"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2}
MAMBA2_LAYERS = MAMBA_LAYERS | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_chunk_size": 4}
LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


def _make(kind: str, **settings: Any) -> Callable[[], Any]:
    """Return what makes a causal language model of that name from settings of its config."""

    def make() -> Any:
        config = getattr(transformers, f"{kind}TextConfig", None) or getattr(transformers, f"{kind}Config")
        return getattr(transformers, f"{kind}ForCausalLM")(config(**settings))

    return make


# Name -> how it is made; those whose class the installed transformers lacks are left out below.
_ALL = {
    "Mamba": _make("Mamba", **MAMBA),
    "Mamba2": _make("Mamba2", **MAMBA2),
    "FalconMamba": _make("FalconMamba", **MAMBA),
    "Jamba": _make(
        "Jamba",
        **HYBRID,
        **EXPERTS,
        **MAMBA_LAYERS,
        mamba_dt_rank=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
    ),
    "Zamba": _make(
        "Zamba",
        **(HYBRID | {"num_hidden_layers": 4, "num_key_value_heads": 4}),
        **MAMBA_LAYERS,
        mamba_dt_rank=4,
        n_mamba_heads=2,
        attention_head_dim=32,
        attention_hidden_size=128,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid"],
    ),
    "Zamba2": _make(
        "Zamba2",
        **(HYBRID | {"num_hidden_layers": 3, "num_key_value_heads": 4}),
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_ngroups=2,
        n_mamba_heads=8,
        chunk_size=4,
        layers_block_type=["mamba", "hybrid", "mamba"],
        use_mem_rope=True,
        adapter_rank=4,
    ),
    "Bamba": _make("Bamba", **HYBRID, **MAMBA2_LAYERS, attn_layer_indices=[1]),
    "GraniteMoeHybrid": _make(
        "GraniteMoeHybrid",
        **HYBRID,
        **MAMBA2_LAYERS,
        layer_types=["mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
    ),
    "FalconH1": _make("FalconH1", **HYBRID, **MAMBA2_LAYERS, mamba_d_ssm=128),
    "Lfm2": _make("Lfm2", **HYBRID, layer_types=["conv", "full_attention"]),
    "NemotronH": _make(
        "NemotronH",
        **(HYBRID | {"num_hidden_layers": 4}),
        layers_block_type=["mamba", "attention", "mlp", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=2,
        chunk_size=4,
        conv_kernel=4,
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
    ),
    "Qwen3Next": _make("Qwen3Next", **HYBRID, **tiny.HEADS, **LINEAR, **EXPERTS),
    "Qwen3_5": _make("Qwen3_5", **HYBRID, **tiny.HEADS, **LINEAR),
}
# States on modules, in an argument, and in a cache of the model's own.
ELSEWHERE = {
    "RecurrentGemma": _make(
        "RecurrentGemma", **tiny.LLAMA, lru_width=64, attention_window_size=64, block_types=["recurrent", "attention"]
    ),
    "Rwkv": _make(
        "Rwkv", **tiny.COMMON, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32, intermediate_size=64
    ),
    "MiniMax": _make(
        "MiniMax", **tiny.MOE, **tiny.HEADS, layer_types=["linear_attention", "full_attention"], block_size=4
    ),
}
MODELS = {name: make for name, make in _ALL.items() if hasattr(transformers, f"{name}ForCausalLM")}
