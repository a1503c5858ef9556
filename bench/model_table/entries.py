"""The models of the table, by category, listed before any of them is measured.

An entry names the model, what serves it, and if it has a tiny shape that a CPU can run in a test.
"""

from __future__ import annotations

import dataclasses
import re

# What serves a model.
GENERATION, ENCODER, WRAP, PIPELINE = "graph_generation", "graph_encoder", "wrap", "graph_pipeline"
CATEGORIES = ("transformers", "torch", "timm", "torchvision", "diffusers", "audio", "peft", "sentence-transformers")


@dataclasses.dataclass(frozen=True)
class TableEntry:
    """One row of the table.

    Attributes:
        name: the row's name, unique; after a package and a slash if the model is not one of transformers.
        category: of `CATEGORIES`.
        integration: what serves the model: `graph_generation`, `graph_encoder`, `wrap` or `graph_pipeline`.
        has_tiny_shape: False for a model that is measured on a GPU alone.
    """

    name: str
    category: str
    integration: str
    has_tiny_shape: bool = True

    @property
    def package(self) -> str:
        """The package that has the model."""
        return self.name.split("/")[0] if "/" in self.name else "transformers"

    @property
    def builder(self) -> str:
        """The name of its builder in `builders`."""
        return re.sub(r"\W", "_", self.name).lower()


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
    torchvision/retinanet torchvision/ssdlite facenet_pytorch/landmarks
"""
_DENOISERS = """
    diffusers/UNet2D diffusers/UNet2DCondition diffusers/SDXL-UNet diffusers/DiT diffusers/PixArt diffusers/SD3
    diffusers/Flux diffusers/AutoencoderKL diffusers/ControlNet diffusers/VQModel
"""
_PIPELINES = "diffusers/StableDiffusion diffusers/StableDiffusionXL diffusers/StableDiffusion-LoRA diffusers/DDPM"
_AUDIO_PACKAGES = """
    torchaudio/wav2vec2 torchaudio/conformer torchaudio/conv_tasnet torchaudio/tacotron2 torchaudio/wavernn
    torchcrepe/pitch pesto/pitch vocos/vocoder silero-vad/vad lpips/perceptual
"""
_MODULES = "torch/LSTM torch/GRU torch/MultiheadAttention torch/TransformerEncoder torch/EmbeddingBag"
_PEFT = "peft/LoRA-Llama peft/LoRA-merged peft/DoRA peft/IA3 peft/prefix-tuning peft/LoRA-ViT"
_SENTENCES = """
    sentence-transformers/MiniLM sentence-transformers/mpnet sentence-transformers/e5 sentence-transformers/CrossEncoder
"""

_GPU_ONLY = "Mamba-130M Jamba-1B-shape Llama-1B-shape"

_NAMES = (
    ("transformers", GENERATION, _DECODERS),
    ("transformers", GENERATION, _STATES + _GPU_ONLY),
    ("transformers", GENERATION, _SEQUENCE_TO_SEQUENCE),
    ("transformers", GENERATION, _VISION_LANGUAGE),
    ("transformers", ENCODER, _TEXT_ENCODERS),
    ("transformers", WRAP, _VISION),
    ("torch", WRAP, _MODULES),
    ("timm", WRAP, _TIMM),
    ("torchvision", WRAP, _TORCHVISION),
    ("diffusers", WRAP, _DENOISERS),
    ("diffusers", PIPELINE, _PIPELINES),
    ("audio", WRAP, _AUDIO),
    ("audio", WRAP, _AUDIO_PACKAGES),
    ("peft", WRAP, _PEFT),
    ("sentence-transformers", PIPELINE, _SENTENCES),
)

ENTRIES = tuple(
    TableEntry(name, category, integration, has_tiny_shape=name not in _GPU_ONLY.split())
    for category, integration, names in _NAMES
    for name in names.split()
)
