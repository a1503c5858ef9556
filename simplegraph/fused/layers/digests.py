"""The digests of functions of other libraries that are recognized, each with one function that has it.

Many functions share a text, and so a digest. ``python -m tests.fused`` prints the digests of the installed versions. A
function of a new version is added beside the old one, under the same name if what replaces it still does the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

DIGESTS: Mapping[str, str] = MappingProxyType(
    {
        # transformers 5.17 to 5.23
        "3267934aa0b5c9a2": "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward",
        "cce93556f9ee9eb3": "transformers.models.mixtral.modeling_mixtral:MixtralDecoderLayer.forward",
        "871053042f7e8fa4": "transformers.models.gemma2.modeling_gemma2:Gemma2DecoderLayer.forward",
        "7457dacc1d39a0cd": "transformers.models.clip.modeling_clip:CLIPEncoderLayer.forward",
        "461cbda9b7e031cf": "transformers.models.vit.modeling_vit:ViTLayer.forward",
        "c257cc3ee22788c2": "transformers.models.bert.modeling_bert:BertSelfOutput.forward",
        "902933f654951079": "transformers.models.whisper.modeling_whisper:WhisperDecoderLayer.forward",
        "bcf014e78db4eec4": "transformers.models.t5.modeling_t5:T5LayerSelfAttention.forward",
        "799afebfe6a5f5ed": "transformers.models.t5.modeling_t5:T5LayerCrossAttention.forward",
        "9b9c1749b19f3cd4": "transformers.models.t5.modeling_t5:T5LayerFF.forward",
        "ff2319d02ea0b098": "transformers.models.gpt2.modeling_gpt2:GPT2Block.forward",
        "fa85382465787e41": "transformers.models.llama.modeling_llama:LlamaRMSNorm.forward",
        "29861fb52e97a7de": "transformers.models.olmo2.modeling_olmo2:Olmo2RMSNorm.forward",
        "120b04907c6b9561": "transformers.models.t5.modeling_t5:T5LayerNorm.forward",
        "0ad30f87a4ded1a1": "transformers.models.gemma.modeling_gemma:GemmaRMSNorm.forward",
        "70a692341dc47196": "transformers.models.gemma.modeling_gemma:GemmaRMSNorm._norm",
        "881f9b88c74309fb": "transformers.models.mamba2.modeling_mamba2:MambaRMSNormGated.forward",  # in one group
        "facfcdfcb4dd59ad": "transformers.models.mamba2.modeling_mamba2:MambaRMSNormGated.forward",
        "bf6c663d53e5af35": "transformers.models.llama.modeling_llama:LlamaMLP.forward",
        "3c9741377361bd3a": "transformers.models.phi3.modeling_phi3:Phi3MLP.forward",
        "76cb58d612050dae": "transformers.activations:SiLUActivation.forward",
        "6ae90f289abc2911": "transformers.activations:NewGELUActivation.forward",
        "bffec265055c42de": "transformers.activations:GELUActivation.forward",
        "d7b8134f24708f09": "transformers.models.llama.modeling_llama:apply_rotary_pos_emb",
        # transformers 5.24, which calls the argument for the cache `cache`
        "416f8eb85d07948e": "transformers.models.llama.modeling_llama:LlamaDecoderLayer.forward",
        "aa45fe7f577d3c23": "transformers.models.mixtral.modeling_mixtral:MixtralDecoderLayer.forward",
        "e15677adefdda1ff": "transformers.models.gemma2.modeling_gemma2:Gemma2DecoderLayer.forward",
        "21594d8c64ca687b": "transformers.models.whisper.modeling_whisper:WhisperDecoderLayer.forward",
        "00fdbfc9aa86bd81": "transformers.models.t5.modeling_t5:T5LayerSelfAttention.forward",
        "c4bf5038930da96c": "transformers.models.t5.modeling_t5:T5LayerCrossAttention.forward",
        "fea73ab86c5e54b6": "transformers.models.gpt2.modeling_gpt2:GPT2Block.forward",
        # timm 1.0.31
        "6f38625e7ce9fd4b": "timm.models.vision_transformer:Block.forward",
        "d89cb1f155a32eb4": "timm.layers.norm:LayerNorm.forward",
        # torchvision 0.28
        "637a1dd02e841c55": "torchvision.models.vision_transformer:EncoderBlock.forward",
    }
)
