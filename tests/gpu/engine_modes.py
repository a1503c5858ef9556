"""The engine's tokens in every mode, for tests of models with several kinds of layers."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

VOCAB = 997
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
Generate = Callable[..., list[list[int]]]


def generate(llama: Any, look: Callable[[Any], Callable[[], object]], **changes: Any) -> list[list[int]]:
    """Answer 64 random prompts with 128 tokens each; `look` sees the engine, and what it returns is called after."""
    from bench.engine import Engine, EngineConfig, SamplingParams

    draw = random.Random(0)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 200))] for _ in range(64)]
    settings: dict[str, Any] = {"max_num_seqs": 64, "max_num_tokens": 512, "max_model_len": 400, "num_pages": 1700}
    engine = Engine(llama, EngineConfig(**settings | changes))
    assert engine.capture().failed == {}
    look_again = look(engine)
    found: list[list[int]] = engine.generate(prompts, SamplingParams(max_tokens=128))
    look_again()
    assert all(pages.num_free == pages.num_pages for pages in engine.scheduler.groups)
    engine.runner.manager.reset()
    return found


def assert_same_in_every_mode(answer: Generate, **waits: Any) -> None:
    """Compare tokens in float32 with eager's; `waits` is a setting with which requests wait for each other."""
    expected = answer(mode="NONE", overlap=False, attention="sdpa")
    assert all(len(tokens) == 128 for tokens in expected)
    for mode in ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE"):
        assert answer(mode=mode, attention="sdpa", capture_sizes=SIZES) == expected, mode
    assert answer(attention="triton") == expected
    assert answer(attention="sdpa", num_pages=300) == expected  # requests give way
    if waits:
        assert answer(attention="sdpa", **waits) == expected
    assert answer(mode="PIECEWISE", compiled=True, attention="sdpa") == expected


def assert_nearly_same_in_half_precision(answer: Generate, attention: str) -> None:
    """Compare tokens of graphs, fused layers among them, with eager's on the same attention."""
    expected = answer(mode="NONE", attention=attention)
    found = answer(attention=attention)
    same = sum(one == other for one, other in zip(found, expected, strict=True))
    assert same >= 48, f"{same} of 64 requests; rounding may decide some near ties"
