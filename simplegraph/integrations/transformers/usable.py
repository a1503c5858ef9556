"""Whether Triton's kernels run on this machine: tried once, before anything is captured."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch

from simplegraph.integrations.transformers.rotary import DTYPES, apply_rotary_pos_emb

_log = logging.getLogger("simplegraph")


@functools.cache
def triton_runs(device: torch.device, dtype: torch.dtype, elements: int) -> bool:
    """Whether a kernel for heads of so many elements compiles, runs, and answers to the bit; else a log line says why.

    Triton needs a C compiler, and knows some GPUs only.
    """
    if device.type != "cuda" or dtype not in DTYPES or elements % 2:
        return False
    try:
        from simplegraph.integrations.transformers import rotary_kernel

        found = _wrong(rotary_kernel, device, dtype, elements)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found is not None:
        _log.warning(
            "Triton's kernels do not run on %s, so that decode steps have more of torch's own: %s", device, found
        )
    return found is None


def _wrong(kernel: ModuleType, device: torch.device, dtype: torch.dtype, elements: int) -> str | None:
    """What is wrong with the kernel; None if nothing."""
    with torch.no_grad():
        # From numbers that are not random: nobody's generator is to move.
        numbers = torch.arange(4 * elements, device=device).reshape(4, 1, elements)
        q, k, cos, sin = torch.cos(1.7 * numbers + 0.3).to(dtype)
        tensors = (q.view(1, 1, 1, -1), k.view(1, 1, 1, -1), cos.view(1, 1, -1), sin.view(1, 1, -1))
        pairs = zip(kernel.rotate(*tensors), apply_rotary_pos_emb(*tensors), strict=True)
        if all(torch.equal(actual, expected) for actual, expected in pairs):
            return None
    return "its products are not rounded as torch's are"
