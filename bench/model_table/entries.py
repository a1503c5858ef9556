"""The models of the table, by category, listed before any of them is measured.

An entry names the model, the package that it comes from, the builder of its tiny shape, and what serves it. A model
without a tiny shape that a CPU can run in a test is marked by `GPU_ONLY`.
"""

from __future__ import annotations

import dataclasses
import re

GPU_ONLY = "gpu only"

# What serves a model.
GENERATION, ENCODER, WRAP, PIPELINE = "graph_generation", "graph_encoder", "wrap", "graph_pipeline"
CATEGORIES = ("transformers", "torch", "timm", "torchvision", "diffusers", "audio", "peft", "sentence-transformers")


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """One row of the table.

    Attributes:
        name: the row's name, and that of its tiny builder.
        category: of `CATEGORIES`; package: what must be installed.
        integration: what serves the model: `graph_generation`, `graph_encoder`, `wrap` or `graph_pipeline`.
        builder: name of the function that builds its tiny shape, or `GPU_ONLY`.
    """

    name: str
    category: str
    package: str
    integration: str
    builder: str


def _entries(category: str, package: str, integration: str, names: str, gpu_only: str = "") -> list[TableEntry]:
    """List models with a tiny shape, then those without one; a package of "" is the part of a name before its slash."""
    return [
        TableEntry(name, category, package or name.split("/")[0], integration, builder)
        for known, tiny in ((names, True), (gpu_only, False))
        for name in known.split()
        for builder in (re.sub(r"\W", "_", name).lower() if tiny else GPU_ONLY,)
    ]


_DECODERS = """
    Llama Qwen2 Qwen3 Mistral Gemma Gemma2 Gemma3 GPT2 GPT-Neo GPT-NeoX GPT-J OPT Bloom Falcon MPT Phi Phi3 StableLM
    StarCoder2 Cohere Olmo2 Granite SmolLM3 Mixtral Qwen3-MoE OlmoE GPT-OSS Gemma3n DeepSeek-V3
"""
_STATES = """
    Mamba Mamba2 FalconMamba Jamba Zamba Zamba2 Bamba GraniteMoeHybrid FalconH1 LFM2 NemotronH Qwen3-Next Qwen3.5
    RWKV RecurrentGemma MiniMax
"""
_SEQUENCE_TO_SEQUENCE = """
    T5 MT5 BART MBart Pegasus Marian NLLB M2M100 LED LongT5 Blenderbot ProphetNet TrOCR Whisper Speech2Text Moonshine
"""
_VISION_LANGUAGE = "Qwen2-VL Qwen2.5-VL Qwen3-VL Qwen2-Audio BLIP BLIP-2 LLaVA PaliGemma Idefics3 Florence2 Pix2Struct"
_TEXT_ENCODERS = """
    BERT RoBERTa DistilBERT ALBERT ELECTRA MPNet DeBERTa-v2 DeBERTa-v3 Funnel ModernBERT XLM-RoBERTa ESM NomicBert
    Longformer Canine ConvBert T5-encoder GPT2-classifier Llama-classifier
"""
_VISION = """
    ViT DINOv2 DeiT BEiT Swin ConvNeXt CLIP SigLIP SegFormer DPT DepthAnything OWL-ViT DETR RT-DETR SAM VideoMAE
    GroundingDINO
"""
_AUDIO = "Wav2Vec2 HuBERT WavLM AST CLAP Encodec VITS SpeechT5 Bark MusicGen"

_TIMM = """
    timm/resnet50 timm/convnext_tiny timm/efficientnet_b0 timm/vit_base timm/swin_tiny timm/mobilenetv3 timm/regnety
    timm/deit3 timm/eva02 timm/maxvit timm/coatnet timm/densenet121 timm/mixer_b16 timm/levit timm/xcit
"""
_TORCHVISION = """
    torchvision/resnet18 torchvision/mobilenet_v3 torchvision/vit_b_16 torchvision/swin_t torchvision/convnext_tiny
    torchvision/deeplabv3 torchvision/fcn torchvision/raft torchvision/r3d_18 torchvision/fasterrcnn
    torchvision/retinanet torchvision/ssdlite
"""
_DENOISERS = """
    diffusers/UNet2D diffusers/UNet2DCondition diffusers/SDXL-UNet diffusers/DiT diffusers/PixArt diffusers/SD3
    diffusers/Flux diffusers/AutoencoderKL diffusers/ControlNet diffusers/VQModel
"""
_PIPELINES = "diffusers/StableDiffusion diffusers/StableDiffusionXL diffusers/StableDiffusion-LoRA diffusers/DDPM"
_AUDIO_PACKAGES = """
    torchaudio/wav2vec2 torchaudio/conformer torchaudio/conv_tasnet torchaudio/tacotron2 torchaudio/wavernn
    torchcrepe/pitch vocos/vocoder silero-vad/vad lpips/perceptual
"""
_MODULES = "torch/LSTM torch/GRU torch/MultiheadAttention torch/TransformerEncoder torch/EmbeddingBag"
_PEFT = "peft/LoRA-Llama peft/LoRA-merged peft/DoRA peft/IA3 peft/prefix-tuning peft/LoRA-ViT"
_SENTENCES = """
    sentence-transformers/MiniLM sentence-transformers/mpnet sentence-transformers/e5 sentence-transformers/CrossEncoder
"""

ENTRIES: tuple[TableEntry, ...] = tuple(
    entry
    for entries in (
        _entries("transformers", "transformers", GENERATION, _DECODERS),
        _entries("transformers", "transformers", GENERATION, _STATES, "Mamba-130M Jamba-1B-shape Llama-1B-shape"),
        _entries("transformers", "transformers", GENERATION, _SEQUENCE_TO_SEQUENCE),
        _entries("transformers", "transformers", GENERATION, _VISION_LANGUAGE),
        _entries("transformers", "transformers", ENCODER, _TEXT_ENCODERS),
        _entries("transformers", "transformers", WRAP, _VISION),
        _entries("torch", "", WRAP, _MODULES),
        _entries("timm", "timm", WRAP, _TIMM),
        _entries("torchvision", "torchvision", WRAP, _TORCHVISION),
        _entries("diffusers", "diffusers", WRAP, _DENOISERS),
        _entries("diffusers", "diffusers", PIPELINE, _PIPELINES),
        _entries("audio", "transformers", WRAP, _AUDIO),
        _entries("audio", "", WRAP, _AUDIO_PACKAGES),
        _entries("peft", "peft", WRAP, _PEFT),
        _entries("sentence-transformers", "sentence-transformers", PIPELINE, _SENTENCES),
    )
    for entry in entries
)
