"""What benchmarks do before torch.compile's clock runs."""

from __future__ import annotations


def load_cold() -> None:
    """Import what the compiler imports at its first use, and turn its caches off: a first call only compiles."""
    import torch._dynamo
    import torch._inductor.compile_fx
    import torch._inductor.config

    torch._inductor.config.force_disable_caches = True


def compiled_graphs() -> int:
    """Graphs that this process's compiler was given; 0 where whoever was to call it found that it could not."""
    from torch._dynamo.utils import counters

    return int(counters["stats"].get("unique_graphs", 0))
