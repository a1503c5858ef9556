"""Tiny models of transformers that compute positions from the length of their cache, with ordinary operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tiny_models as tiny
import transformers

SEQUENCES = tiny.COMMON | {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 512,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}
TROCR = tiny.COMMON | {
    "d_model": 64,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": 512,
    "is_decoder": True,
    "add_cross_attention": False,
}
LED = SEQUENCES | {"attention_window": 8}
LED |= dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), 512)
SHAPE = tiny.COMMON | {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 512}
OPT = SHAPE | {"hidden_size": 64, "ffn_dim": 128, "word_embed_proj_dim": 64}
BIOGPT = SHAPE | {"hidden_size": 64, "intermediate_size": 128}
XGLM = tiny.COMMON | {"d_model": 64, "ffn_dim": 128, "num_layers": 2, "attention_heads": 4}
XGLM |= {"max_position_embeddings": 512}


def _trocr(**settings: Any) -> Any:
    return transformers.TrOCRForCausalLM(transformers.TrOCRConfig(**TROCR, **settings))


DECODERS: dict[str, Callable[[], Any]] = {
    "mpt": lambda: transformers.MptForCausalLM(
        transformers.MptConfig(**tiny.COMMON, d_model=64, n_heads=4, n_layers=2, max_seq_len=512, use_cache=True)
    ),
    "trocr": lambda: _trocr(use_learned_position_embeddings=True),
    "trocr_sinusoidal": lambda: _trocr(use_learned_position_embeddings=False),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)),
    "bloom": lambda: transformers.BloomForCausalLM(
        transformers.BloomConfig(**tiny.COMMON, hidden_size=64, n_layer=2, n_head=4)
    ),
    "xglm": lambda: transformers.XGLMForCausalLM(transformers.XGLMConfig(**XGLM)),
    "biogpt": lambda: transformers.BioGptForCausalLM(transformers.BioGptConfig(**BIOGPT)),
}
ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "m2m100": lambda: transformers.M2M100ForConditionalGeneration(transformers.M2M100Config(**SEQUENCES)),
    "nllb_moe": lambda: transformers.NllbMoeForConditionalGeneration(
        transformers.NllbMoeConfig(**SEQUENCES, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2)
    ),
    "led": lambda: transformers.LEDForConditionalGeneration(transformers.LEDConfig(**LED)),
    "bart": lambda: transformers.BartForConditionalGeneration(transformers.BartConfig(**SEQUENCES)),
    "mbart": lambda: transformers.MBartForConditionalGeneration(transformers.MBartConfig(**SEQUENCES)),
    "marian": lambda: transformers.MarianMTModel(transformers.MarianConfig(**SEQUENCES)),
    "pegasus": lambda: transformers.PegasusForConditionalGeneration(transformers.PegasusConfig(**SEQUENCES)),
    "blenderbot": lambda: transformers.BlenderbotForConditionalGeneration(transformers.BlenderbotConfig(**SEQUENCES)),
}
MODELS = DECODERS | ENCODER_DECODERS
