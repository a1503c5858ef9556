"""The modules whose calls are timed, by name: random weights, one request."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn

from bench.models.workload import Workload
from bench.optimized import shapes
from bench.optimized.shapes import ComparedModel

TOKENS = 16  # of a call of a decoder of transformers


class Layers(nn.Module):
    """Ten linear layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(10)))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Logits(nn.Module):
    """A decoder of transformers that returns only its logits, and keeps no cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return logits


def _layers(tiny: bool) -> nn.Module:
    return Layers(8 if tiny else 64)


def _features(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    return (torch.randn(rows, 8 if tiny else 64),)


def _decoder(layers: int, tiny: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width = 32 if tiny else 512
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 16 if tiny else width // 64,
        num_key_value_heads=2,
    )
    return Logits(LlamaForCausalLM(config))


def _words(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    return (torch.randint(1, 1000, (rows, TOKENS)),)


def _workload(tiny: bool, device: torch.device, rows: int = 1) -> Workload:
    return Workload("tiny" if tiny else "8b", (rows,), device)


def _step(tiny: bool) -> nn.Module:
    return _workload(tiny, torch.get_default_device()).build()


def _request(tiny: bool, rows: int) -> tuple[Tensor, ...]:
    workload = _workload(tiny, torch.device("cpu"), rows)
    return workload.batch(rows, workload.config().vocab_size)


TEN, STEP = "ten layers", "8b step"
MODELS: dict[str, ComparedModel] = {
    TEN: ComparedModel(_layers, _features, "torch"),
    **{name: shapes.MODELS[name] for name in ("resnet18", "resnet50", "efficientnet", "vit", "bert")},
    "llama 24": ComparedModel(functools.partial(_decoder, 24), _words, "transformers"),
    "decoder 2": ComparedModel(functools.partial(_decoder, 2), _words, "transformers"),
    STEP: ComparedModel(_step, _request, "transformers"),
}
TINY = (TEN, "decoder 2")  # of a smoke


def available() -> list[str]:
    """List the names of models whose package can be imported, but the largest, which takes 16 GB for each copy."""
    return [name for name in shapes.available(MODELS) if name != STEP]
