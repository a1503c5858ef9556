"""The table's list is large enough, names each model once, and leaves out none that users were told of."""

from __future__ import annotations

import collections

import pytest

from bench.model_table.entries import CATEGORIES, ENCODER, ENTRIES, GENERATION, PIPELINE, WRAP

PROMISED = """
    Mamba Mamba2 FalconMamba Jamba Zamba2 Bamba GraniteMoeHybrid FalconH1 LFM2 NemotronH Qwen3-Next Qwen3.5 RWKV
    RecurrentGemma MiniMax Qwen2-VL Qwen2.5-VL Qwen3-VL Qwen2-Audio Speech2Text BLIP BLIP-2 Moonshine GPT-OSS NLLB
    M2M100 TrOCR MPT LED DeBERTa-v2 DeBERTa-v3 Funnel Wav2Vec2 ViT BERT torch/LSTM torch/MultiheadAttention
    torch/EmbeddingBag VITS Longformer Canine ConvBert Gemma3n Mamba-130M sentence-transformers/MiniLM torchcrepe/pitch
    vocos/vocoder lpips/perceptual diffusers/StableDiffusion diffusers/StableDiffusion-LoRA torchvision/fasterrcnn
"""


def test_at_least_120_models_each_once() -> None:
    names = collections.Counter(entry.name for entry in ENTRIES)
    assert len(names) >= 120
    assert [name for name, count in names.items() if count > 1] == []


@pytest.mark.parametrize("name", PROMISED.split())
def test_no_promised_model_is_left_out(name: str) -> None:
    assert any(entry.name == name for entry in ENTRIES)


def test_every_category_has_models_and_every_model_has_something_that_serves_it() -> None:
    assert {entry.category for entry in ENTRIES} == set(CATEGORIES)
    assert {entry.integration for entry in ENTRIES} == {GENERATION, ENCODER, WRAP, PIPELINE}
    assert all(entry.package and entry.builder.isidentifier() for entry in ENTRIES)
    builders = [entry.builder for entry in ENTRIES]
    assert len(builders) == len(set(builders))
