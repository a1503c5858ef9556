"""torch's own modules, called as their documentation does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.model_table.builders.model import Call, TableModel, noise, numbers

TEXTS = 256  # of each length


def _width(tiny: bool) -> int:
    return 32 if tiny else 512


def _steps_first(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make a sequence whose batch is its second dimension, torch's default."""
    return (noise(8 if tiny else 64, len(lengths), _width(tiny), seed=seed),), {}


def _attended(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make a sequence that attends to itself; of a few tokens, kernels take less than copies to and from a graph."""
    sequence = noise(8 if tiny else 1024, len(lengths), _width(tiny), seed=seed)
    return (sequence, sequence, sequence), {}


def _masked(tiny: bool, lengths: list[int], seed: int) -> Call:
    longest = max(lengths)
    hidden = torch.arange(longest)[None] >= torch.tensor(lengths)[:, None]
    return (noise(len(lengths), longest, _width(tiny), seed=seed),), {"src_key_padding_mask": hidden}


def _bags(tiny: bool, lengths: list[int], seed: int) -> Call:
    """Make bags of as many words as the lengths say, one after the other; really, a batch of as many texts as fit."""
    lengths = lengths * (1 if tiny else TEXTS)
    starts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    return (numbers(100, sum(lengths), seed=seed), starts), {}


class _TextClassifier(nn.Module):
    """Classifies bags of words; of bags alone a graph would be one kernel, and cost more than it saves."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(100, width, mode="sum", padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        scores: Tensor = self.layers(self.embedding(text, offsets))
        return scores


def _encoder(tiny: bool) -> nn.Module:
    """Make an encoder with what the report of one with torch's defaults advises: nested tensors have no sizes."""
    layer = nn.TransformerEncoderLayer(_width(tiny), 4, 4 * _width(tiny), dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2 if tiny else 6, enable_nested_tensor=False)


MODELS = {
    "torch_lstm": TableModel(lambda tiny: nn.LSTM(_width(tiny), _width(tiny), 2), _steps_first),
    "torch_gru": TableModel(lambda tiny: nn.GRU(_width(tiny), _width(tiny), 2), _steps_first),
    "torch_multiheadattention": TableModel(lambda tiny: nn.MultiheadAttention(_width(tiny), 4), _attended),
    "torch_transformerencoder": TableModel(_encoder, _masked),
    "torch_embeddingbag": TableModel(
        lambda tiny: _TextClassifier(_width(tiny)),
        _bags,
        {"exact_shapes": True},  # words and bags are two numbers
    ),
}
