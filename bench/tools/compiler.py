"""Prepares torch.compile before it is timed, and counts its graphs."""

from __future__ import annotations


def load_cold() -> None:
    """Import the compiler's modules and disable its caches, so that a first call only compiles."""
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.config

    torch._inductor.config.force_disable_caches = True


def compiled_graphs() -> int:
    """Return the number of graphs that this process has compiled; 0 if the library decided not to compile."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))
