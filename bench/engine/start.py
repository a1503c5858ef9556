"""Starts the engine that a config describes, with every graph captured, and loads its kernels before that."""

from __future__ import annotations

import copy
import dataclasses
import gc
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from bench.engine.config import EngineConfig
from bench.engine.engine import Engine
from bench.engine.spec import SpecEngine
from bench.engine.spec_config import SpecConfig
from bench.models.eagle import Eagle, Eagle3
from bench.models.llama import Attention, CacheShape, Llama, build_llama
from bench.models.serving import ServingLlama
from bench.tools.replays import PLANNED, Replays
from simplegraph import BatchDescriptor, CudaGraphMode, RankGroup
from simplegraph.attention import AttentionBackend, attending

if TYPE_CHECKING:
    from transformers import LlamaConfig


def start(
    config: EngineConfig, target: Llama, draft: Eagle | Eagle3 | None = None, ranks: RankGroup | None = None
) -> Engine:
    """Build an engine and capture its graphs; a `SpecEngine` if the config is for one.

    Raises:
        ValueError: the config is for speculation, and there is no draft.
        RuntimeError: a graph could not be captured.
    """
    engine: Engine
    if isinstance(config, SpecConfig):
        if draft is None:
            raise ValueError("the config is for speculation; expected a draft.")
        engine = SpecEngine(target, draft, config)
        summaries = engine.capture()
    else:
        engine = Engine(target, config, ranks)
        summaries = [engine.capture()]
    for summary in summaries:
        if summary.failed:
            raise RuntimeError(f"not captured: {summary.failed}")
    return engine


def drop_graphs(engine: Engine) -> None:
    """Drop every graph of an engine that is not used any more, and give their memory back."""
    for manager in engine.managers:
        manager.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def replays_of(engine: Engine, name: str) -> Replays:
    """Return what checks that graphs serve an engine's steps, except those that its mode or sizes leave eager."""
    return Replays(*([] if engine.config.mode == "NONE" else engine.managers), name=name, expected=PLANNED)


@torch.inference_mode()
def load_kernels(shape: LlamaConfig, config: EngineConfig, device: torch.device, prompt: int) -> None:
    """Run a prompt and a decode step on one layer of a model's shape, eagerly, so that kernels are compiled and loaded.

    For a thread beside the reading of weights; see `simplegraph.preload`. The layer's memory is given back. Models with
    sliding windows or recurrent layers are left alone.

    Args:
        shape: the model's config.
        config: of the engine that comes after.
        device: the engine's device.
        prompt: tokens of the prompt.
    """
    shape = copy.copy(shape)
    shape.num_hidden_layers = 1
    llama = build_llama(shape, CacheShape(1, 16), 1, device=device, random_weights=False, windows=True)
    weight = llama.model.embed_tokens.weight
    pages = -(-(prompt + 1) // config.page_size)
    config = dataclasses.replace(config, num_pages=1 + pages)
    layer = llama.model.layers[0].self_attn
    if layer is None or layer.window is not None:
        return
    for parameter in llama.parameters():
        parameter.zero_()
    (backend,) = config.backends([layer], weight)
    table = [list(range(1, 1 + pages))]
    with ThreadPoolExecutor(1) as beside:  # attention's kernel is compiled beside the operators'
        attended = beside.submit(_attend, backend, layer, prompt + 1, table)
        model = ServingLlama(llama, backend, config.max_num_tokens, fused=config.fused)
        attended.result()
    for length, rows in ((prompt, prompt), (prompt + 1, 1)):
        backend.metadata.set([rows], [length], table, num_tokens=rows, num_reqs=1)
        positions = torch.arange(length - rows, length, device=device)
        with attending(backend, CudaGraphMode.NONE, BatchDescriptor(rows, 1)):
            hidden = model(torch.zeros_like(positions), positions)
        llama.head(hidden[-1:]).argmax(dim=-1).cpu()
    del llama, model, backend
    if device.type == "cuda":
        torch.cuda.empty_cache()


@torch.inference_mode()
def _attend(backend: AttentionBackend, layer: Attention, length: int, table: Sequence[Sequence[int]]) -> None:
    """Run the attention of a decode step, on this thread's default stream."""
    backend.metadata.set([1], [length], table, num_tokens=1, num_reqs=1)
    cache = backend.cache
    q = torch.zeros(1, layer.num_heads, layer.head_dim, dtype=cache.dtype, device=cache.device)
    with attending(backend, CudaGraphMode.NONE, BatchDescriptor(1, 1)):
        backend.run(layer.index, q, torch.zeros_like(q), backend.live)
