"""Greedy generations of tiny models, plain or through graphs, for tests that compare the two."""

from __future__ import annotations

import inspect
from typing import Any

import tiny_models as tiny
import torch
import transformers

from simplegraph.integrations.transformers import GraphedGeneration, graph_generation

TOKENS = 12
GREEDY = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
# Name of the argument that holds a cache: "past_key_values" until transformers 5.24.
CACHE = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(transformers.LlamaForCausalLM.forward).parameters
)
MODELS = tiny.DECODERS | tiny.MIXTURES | tiny.ENCODER_DECODERS


def inputs(name: str, lengths: list[int], device: torch.device, seed: int = 1) -> dict[str, torch.Tensor]:
    """A batch for a model of `MODELS`: prompts of these lengths, or as many features and how a text begins."""
    if name == "whisper":
        start = torch.tensor([[1, 5]] * len(lengths), device=device)
        return tiny.features(len(lengths), device, seed) | {"decoder_input_ids": start}
    return tiny.prompts(lengths, device, seed)


def graphed(model: Any, **sizes: Any) -> GraphedGeneration:
    """Give a model graphs for four rows of 64 tokens, or other sizes."""
    return graph_generation(model, **({"max_batch_size": 4, "max_length": 64} | sizes))
