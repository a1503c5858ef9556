"""Models that are trained: tiny ones that need torch alone, and those of timm, torchvision, transformers and peft."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RANK = 16  # of LoRA's two factors


class Logits(nn.Module):
    """A causal language model of transformers that returns only its logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=ids, use_cache=False).logits
        return logits


class Block(nn.Module):
    """A residual block of two convolutions with batch norm."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
        self.second = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Patches(nn.Module):
    """A vision transformer: patches, encoder layers with dropout, the mean's logits."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, 8, stride=8)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.encoder(self.embed(images).flatten(2).transpose(1, 2)).mean(1))
        return logits


class LowRank(nn.Module):
    """A frozen linear layer with a trained product of two thin matrices added."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.frozen(x) + self.up(self.down(x.float())).to(x.dtype)
        return changed


def mlp(inputs: int, width: int, outputs: int, depth: int = 2) -> nn.Module:
    """Make an MLP of the size that reinforcement learning uses."""
    layers: list[nn.Module] = [nn.Linear(inputs, width), nn.Tanh()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, outputs))


def vit(tiny: bool) -> nn.Module:
    """Make timm's ViT-B/16, or a tiny vision transformer."""
    if tiny:
        return Patches(32, 2, 10)
    import timm

    model: nn.Module = timm.create_model("vit_base_patch16_224", pretrained=False)
    return model


def resnet(tiny: bool) -> nn.Module:
    """Make torchvision's ResNet-50, or a tiny residual network."""
    if tiny:
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
        return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Block(8), Block(8), *head)
    import torchvision

    model: nn.Module = torchvision.models.resnet50(weights=None)
    return model


def gpt2(tiny: bool) -> nn.Module:
    """Make GPT-2 small with its dropout, or a tiny one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 128}
    return Logits(GPT2LMHeadModel(GPT2Config(**(shape if tiny else {}))))


def lora(tiny: bool) -> nn.Module:
    """Make a Llama of half a billion parameters in bfloat16, frozen, with peft's LoRA; tiny with one written here."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {
        "hidden_size": 32 if tiny else 896,
        "intermediate_size": 64 if tiny else 4864,
        "num_hidden_layers": 2 if tiny else 24,
        "num_attention_heads": 4 if tiny else 14,
        "num_key_value_heads": 2,
        "vocab_size": 128 if tiny else 32000,
    }
    frozen = LlamaForCausalLM(LlamaConfig(**shape)).bfloat16().requires_grad_(False)
    if not tiny:
        from peft import LoraConfig, get_peft_model

        return Logits(get_peft_model(frozen, LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"])))
    for layer in frozen.model.layers:
        layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj, 4)
        layer.self_attn.v_proj = LowRank(layer.self_attn.v_proj, 4)
    return Logits(frozen)


def two_linears(tiny: bool) -> nn.Module:
    """Make the first model that torch tests `make_graphed_callables` with."""
    widths = (16, 8, 4) if tiny else (4096, 2048, 1024)
    pairs = [nn.Sequential(nn.Linear(into, out), nn.Dropout(0.1)) for into, out in itertools.pairwise(widths)]
    return nn.Sequential(*pairs)


def token_ids(rows: int, length: int, vocabulary: int) -> tuple[Tensor]:
    """Draw token ids, (rows, length)."""
    return (torch.randint(0, vocabulary, (rows, length)),)
