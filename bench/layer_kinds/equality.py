"""Greedy tokens in float32 of every mode, compared with those of eager steps."""

from __future__ import annotations

import dataclasses
import random

import torch

from bench.engine import Engine, EngineConfig, SamplingParams
from bench.engine.start import drop_graphs, replays_of
from bench.layer_kinds.shapes import Kind
from bench.tools.measure import Figures, say

MODES = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
OTHER_KERNELS = ("triton", "compiled piecewise")  # which may round another way


def compare(kind: Kind, device: torch.device, *, requests: int, tokens: int) -> Figures:
    """Generate with every arm; return for each the number of requests whose tokens all equal eager's.

    Each arm's attention is torch's, whose kernels are the same with a graph and without. One more arm has few pages and
    few state slots, so that requests wait and give way; on a GPU one has its decode attention from Triton, and one
    is compiled piecewise.
    """
    llama = kind.build(device, small=True)
    vocab, draw = llama.config.vocab_size, random.Random(0)
    prompt, most = (200, 512) if device.type == "cuda" else (40, 32)  # an emulated step takes long enough
    prompts = [[draw.randrange(vocab) for _ in range(draw.randint(1, prompt))] for _ in range(requests)]
    longest = prompt + tokens
    sizes = tuple(size for size in (1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512) if size <= most)
    plain = EngineConfig(
        mode="NONE",
        attention="sdpa",
        max_num_seqs=min(requests, 64, most),
        max_num_tokens=most,
        max_model_len=longest,
        num_pages=1 + min(requests, 64) * -(-longest // 16),
        capture_sizes=sizes,
        overlap=False,
        fused=False,
    )
    graphs = dataclasses.replace(plain, mode="FULL_AND_PIECEWISE", overlap=True)
    few = {"num_pages": max(1 + -(-longest // 16), requests * 4), "num_state_slots": max(1, requests // 4)}
    arms = {mode: dataclasses.replace(graphs, mode=mode) for mode in MODES}
    arms["few pages and slots"] = dataclasses.replace(graphs, **few)
    if device.type == "cuda":
        triton, compiled = OTHER_KERNELS
        arms[triton] = dataclasses.replace(graphs, attention="triton")
        arms[compiled] = dataclasses.replace(graphs, mode="PIECEWISE", compiled=True)
    expected = _generate(llama, plain, prompts, tokens)
    figures: Figures = {"requests": requests, "tokens": tokens, "equal": {}}
    for name, config in arms.items():
        found = _generate(llama, config, prompts, tokens)
        equal = sum(one == other for one, other in zip(found, expected, strict=True))
        figures["equal"][name] = equal
        say(f"{name}: {equal} of {requests} requests have eager's tokens")
    return figures


def _generate(llama: object, config: EngineConfig, prompts: list[list[int]], tokens: int) -> list[list[int]]:
    torch._dynamo.reset()
    engine = Engine(llama, config)  # type: ignore[arg-type]
    failed = engine.capture().failed
    if failed:
        raise RuntimeError(f"not captured: {failed}")
    replays = replays_of(engine, config.mode)
    found = engine.generate(prompts, SamplingParams(max_tokens=tokens))
    replays.end(tokens)
    drop_graphs(engine)
    return found
