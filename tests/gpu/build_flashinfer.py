"""Builds the modules of FlashInfer that the GPU's tests run, side by side: on a new machine each takes up to minutes.

``python -m tests.gpu.build_flashinfer``: a process for each module, which share the cores. What is built already is
loaded.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from typing import Any

import torch

# Heads, their dtype, and how scores are changed: each of these is compiled into a module of its own.
MODULES: list[dict[str, Any]] = [
    {"head_dim": 128},
    {"head_dim": 128, "window": 128},
    {"head_dim": 64},
    {"head_dim": 64, "window": 128},
    {"head_dim": 64, "dtype": torch.float16},
    {"head_dim": 256, "softcap": 2.0},
    {"head_dim": 256, "softcap": 2.0, "window": 128},
]


def build(head_dim: int, dtype: torch.dtype = torch.bfloat16, window: int | None = None, **scores: Any) -> None:
    """Run one decode step of one layer, with and without the sums of its scores."""
    from simplegraph import BatchDescriptor, CudaGraphMode
    from simplegraph.attention import BatchMetadata, FlashInferBackend, PagedKVCache, attending

    device = torch.device("cuda", torch.cuda.current_device())
    cache = PagedKVCache(1, 3, 16, 2, head_dim, dtype=dtype, device=device)
    limits = {"max_num_tokens": 1, "max_num_reqs": 1, "max_model_len": 32, "page_size": 16, "window": window}
    metadata = BatchMetadata(**limits, device=device)
    backend = FlashInferBackend(cache, metadata, num_heads=4, **scores)
    metadata.set([1], [8], [[1]])
    q = torch.zeros(1, 4, head_dim, dtype=dtype, device=device)
    with attending(backend, CudaGraphMode.NONE, BatchDescriptor(1, 1)):
        backend.run(0, q, torch.zeros_like(q), backend.live)
    torch.cuda.synchronize()


def main() -> int:
    """Build every module; return 1 if one could not be built, so that its tests will say why."""
    if importlib.util.find_spec("flashinfer") is None:
        print("FlashInfer is not installed")
        return 0
    began, cores = time.monotonic(), len(os.sched_getaffinity(0))
    environment = {"MAX_JOBS": str(max(1, cores // len(MODULES)))} | os.environ
    command = [sys.executable, "-W", "ignore", "-m", "tests.gpu.build_flashinfer"]
    started = [subprocess.Popen([*command, str(index)], env=environment) for index in range(len(MODULES))]
    failed = [module for module, process in zip(MODULES, started, strict=True) if process.wait()]
    for module in failed:
        print(f"FAILED to build {module}")
    ready = len(MODULES) - len(failed)
    print(f"{ready} of {len(MODULES)} modules of FlashInfer after {time.monotonic() - began:.0f} s")
    return int(bool(failed))


if __name__ == "__main__":
    if sys.argv[1:]:
        build(**MODULES[int(sys.argv[1])])
    else:
        sys.exit(main())
