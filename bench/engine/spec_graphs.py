"""The graphs of speculative decoding: the target's and the draft's for each K, all in one pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.engine.spec_config import SpecConfig
from bench.models.eagle import Eagle, Eagle3
from simplegraph import CudaGraphManager, CudaGraphMode
from simplegraph.attention import AttentionBackend
from simplegraph.batch.sizes import default_sizes
from simplegraph.device.protocol import GraphPool
from simplegraph.spec_decode import EagleDrafter, Proposals


def target_managers(
    config: SpecConfig, backend: AttentionBackend, pool: GraphPool | None
) -> dict[int, CudaGraphManager]:
    """Make the managers of the target's graphs, by K; prompts run in those of the first K.

    Args:
        config: of the engine.
        backend: the target's attention.
        pool: graph memory to share with other engines.
    """
    managers: dict[int, CudaGraphManager] = {}
    for count in config.drafts:
        mode, query_len, most = _mode(config.mode, first=not managers), count + 1, config.max_num_seqs
        settings: dict[str, Any] = {}
        if mode.separate_routine():
            sizes = {min(size, most) * query_len for size in config.capture_sizes or default_sizes(most)}
            settings = {"uniform_query_len": query_len, "decode_capture_sizes": sizes}
        managers[count] = CudaGraphManager(
            mode=mode,
            device=backend.device,
            pool=pool,
            support=backend.support,
            capture_sizes=config.mixed_capture_sizes,
            max_num_seqs=most,
            max_num_tokens=config.max_num_tokens,
            progress=config.progress,
            name=f"target, {count} drafts",
            **settings,
        )
        managers[count].add_hooks(backend)
        pool = managers[count].pool
    return managers


def drafters(
    config: SpecConfig,
    draft: Eagle | Eagle3,
    backends: Sequence[AttentionBackend],
    proposals: Proposals,
    managers: Mapping[int, CudaGraphManager],
) -> dict[int, EagleDrafter]:
    """Make the drafters, by K.

    Args:
        config: of the engine.
        draft: the draft model.
        backends: its attention in the prefill, and in its decode steps.
        proposals: receives the drafts.
        managers: the target's managers, whose pool is shared.
    """
    prefill, decode = backends
    return {
        count: EagleDrafter(
            draft,
            prefill,
            decode,
            proposals,
            num_draft_tokens=count,
            mode=_mode(config.draft_mode or config.mode, first=count == config.drafts[0]),
            capture_sizes=config.capture_sizes,
            mixed_capture_sizes=config.mixed_capture_sizes,
            pool=manager.pool,
            progress=config.progress,
        )
        for count, manager in managers.items()
    }


def _mode(name: str, *, first: bool) -> CudaGraphMode:
    """Choose the mode of one K: prompts run in the first K's graphs, so the others need none for mixed batches."""
    mode = CudaGraphMode.parse(name)
    return CudaGraphMode.FULL_DECODE_ONLY if mode is CudaGraphMode.FULL_AND_PIECEWISE and not first else mode
