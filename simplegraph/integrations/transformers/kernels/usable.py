"""Tries Triton's kernels once on each device, before anything is captured."""

from __future__ import annotations

import torch

from simplegraph.fused.choice import KernelTrial, operators_for


def triton_runs(device: torch.device, dtype: torch.dtype, elements: int) -> bool:
    """True if the kernels of a step, for heads of `elements` elements, compile, run and are correct; else logs why."""
    if elements % 2:
        return False
    names = ("rotate", "rms_norm", "write_pages")
    sizes = {"write_pages": (elements, "HND")}
    return operators_for(device, dtype, [KernelTrial(name, sizes.get(name, (elements,))) for name in names]).triton
