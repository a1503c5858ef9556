"""Text encoders of transformers, with and without a head."""

from __future__ import annotations

from collections.abc import Callable

import tiny_models

from bench.model_table.builders.decoders import ENDS, WIDE
from bench.model_table.builders.model import Call, Settings, TableModel, at_least, configured, tokens

Texts = Callable[[bool, list[int], int], Call]

NO_CACHE = at_least(1, use_cache=False)  # as the report advises for what else returns one
BERT = tiny_models.BERT | {"pad_token_id": 0}
SMALL = {"vocab_size": 100, "pad_token_id": 0}
DISTIL = SMALL | {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}
DEBERTA = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
DEBERTA |= {"max_relative_positions": -1, "type_vocab_size": 0}
BUCKETS = {"position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True}
BASE = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
FUNNEL = SMALL | {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_model": 64, "n_head": 4, "d_head": 16}
FUNNEL |= {"d_inner": 128}
CANINE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
CANINE |= {"num_hash_buckets": 64, "local_transformer_stride": 8, "pad_token_id": 0}
ALBERT = BERT | {"embedding_size": 32}
MODERN = BERT | {"local_attention": 8, "global_attn_every_n_layers": 2, "bos_token_id": 1, "eos_token_id": 2}
MODERN |= {"cls_token_id": 1, "sep_token_id": 2}


def _encoder(
    kind: str, tiny: Settings = BERT, real: Settings | None = None, head: str = "Model", call: Texts = tokens
) -> TableModel:
    return TableModel(configured(f"{kind}Config", f"{kind}{head}", tiny, real), call)


MODELS = {
    "bert": _encoder("Bert"),
    "roberta": _encoder("Roberta"),
    "distilbert": _encoder("DistilBert", DISTIL),
    "albert": _encoder("Albert", ALBERT, BASE),
    "electra": _encoder("Electra", ALBERT, BASE),
    "mpnet": _encoder("MPNet"),
    "deberta_v2": _encoder("DebertaV2", BERT | DEBERTA, BASE | DEBERTA),
    "deberta_v3": _encoder("DebertaV2", BERT | DEBERTA | BUCKETS, BASE | DEBERTA | BUCKETS | {"position_buckets": 256}),
    "funnel": _encoder("Funnel", FUNNEL, call=at_least(4, real=8)),
    "modernbert": _encoder("ModernBert", MODERN),
    "xlm_roberta": _encoder("XLMRoberta"),
    "esm": _encoder(
        "Esm",
        BERT | {"position_embedding_type": "rotary", "mask_token_id": 99},
        BASE | {"vocab_size": 100, "pad_token_id": 0, "position_embedding_type": "rotary", "mask_token_id": 99},
    ),
    "nomicbert": _encoder("NomicBert"),
    "longformer": _encoder("Longformer", BERT | {"attention_window": 8}),
    "canine": _encoder("Canine", CANINE, call=at_least(16)),
    "convbert": _encoder("ConvBert", BERT | {"embedding_size": 64}),
    "t5_encoder": _encoder("T5", tiny_models.T5, head="EncoderModel"),
    "gpt2_classifier": _encoder(
        "GPT2", tiny_models.GPT2, {"pad_token_id": 0}, head="ForSequenceClassification", call=NO_CACHE
    ),
    "llama_classifier": _encoder(
        "Llama", tiny_models.LLAMA, WIDE | ENDS, head="ForSequenceClassification", call=NO_CACHE
    ),
}
