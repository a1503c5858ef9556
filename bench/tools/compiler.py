"""Prepares torch.compile before it is timed, and counts its graphs."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def load_cold() -> None:
    """Import the compiler's modules and disable its caches, so that a first call only compiles."""
    _load(force_disable_caches=True)


def load_warm() -> None:
    """Import the compiler's modules, with its caches on."""
    _load(force_disable_caches=False)


def _load(*, force_disable_caches: bool) -> None:
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.config

    torch._inductor.config.force_disable_caches = force_disable_caches


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled; 0 if the library decided not to compile."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))


@contextlib.contextmanager
def empty_caches() -> Iterator[None]:
    """Point the compile caches of this process to an empty folder."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, caches_in(folder):
        yield


@contextlib.contextmanager
def caches_in(folder: str) -> Iterator[None]:
    """Point the compile caches of this process, all of them switched on, to a folder."""
    before = dict(os.environ)
    os.environ |= {f"{name}_CACHE_DIR": str(Path(folder) / name.lower()) for name in ("TORCHINDUCTOR", "TRITON")}
    os.environ |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "1", "TORCHINDUCTOR_AUTOGRAD_CACHE": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
