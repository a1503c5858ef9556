"""A small engine, requests for it, and the tokens that transformers generates for them."""

from __future__ import annotations

import random
from typing import Any

import torch

from bench.engine import Engine, EngineConfig
from bench.models.llama import Llama

VOCAB, PAGE = 97, 4
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": None,
}


def engine(llama: Llama, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 6, "max_num_tokens": 24, "max_model_len": 64, "num_pages": 100}
    settings |= {"page_size": PAGE, "capture_sizes": (1, 2, 4, 6, 8, 16, 24)}
    built = Engine(llama, EngineConfig(**settings | changes))
    built.capture()
    return built


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, longest))] for _ in range(count)]


def alone(reference: Any, prompt: list[int], count: int) -> list[int]:
    """Return the greedy tokens of transformers, one request at a time, without a cache."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.cat([ids, reference(ids).logits[:, -1:].argmax(-1)], dim=1)
    return ids[0, len(prompt) :].tolist()
