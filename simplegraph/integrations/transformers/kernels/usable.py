"""Tries Triton's kernels once on each device, before anything is captured."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor, nn

from simplegraph.integrations.transformers.kernels.rotary import DTYPES, apply_rotary_pos_emb

_log = logging.getLogger("simplegraph")


@functools.cache
def triton_runs(device: torch.device, dtype: torch.dtype, elements: int) -> bool:
    """True if the kernels of a step, for heads of `elements` elements, compile, run and are correct; else logs why.

    Triton needs a C compiler, and supports only some GPUs.
    """
    if device.type != "cuda" or dtype not in DTYPES or elements % 2:
        return False
    try:
        found = _find_error(device, dtype, elements)
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if found is not None:
        _log.warning(
            "Triton's kernels do not run on %s, so decode steps run torch's operators instead: %s", device, found
        )
    return found is None


def _find_error(device: torch.device, dtype: torch.dtype, elements: int) -> str | None:
    """Say what is wrong with a kernel; None if all are correct."""
    with torch.no_grad():
        # Not random numbers: the user's generators must not advance.
        numbers = torch.arange(4 * elements, device=device).reshape(4, elements)
        rows = torch.cos(1.7 * numbers + 0.3).to(dtype)
        if not _rotates(rows):
            return "the rotary embedding's products are not rounded as torch's are"
        if not _normalizes(rows):
            return "the norm's results differ from torch's"
        return None if _writes(rows) else "the cache does not hold the keys and values that were written"


def _rotates(rows: Tensor) -> bool:
    from simplegraph.integrations.transformers.kernels.triton_kernels import rotate

    q, k, cos, sin = rows.unsqueeze(1)
    tensors = (q.view(1, 1, 1, -1), k.view(1, 1, 1, -1), cos.view(1, 1, -1), sin.view(1, 1, -1))
    pairs = zip(rotate(*tensors), apply_rotary_pos_emb(*tensors), strict=True)
    return all(torch.equal(actual, expected) for actual, expected in pairs)


def _normalizes(rows: Tensor) -> bool:
    from simplegraph.integrations.transformers.kernels.triton_kernels import rms_norm

    weight, unit = rows[0], torch.finfo(rows.dtype).eps
    expected = nn.functional.rms_norm(rows.float(), weight.shape, weight.float(), 1e-5)
    return torch.allclose(rms_norm(rows, weight, 1e-5).float(), expected, rtol=4 * unit, atol=unit)


def _writes(rows: Tensor) -> bool:
    from simplegraph.attention.kernels.pages import write_pages

    states = rows[:2].view(2, 1, 1, -1)  # keys and values: of one token, and one head
    kept = torch.zeros_like(rows).view(2, 1, 1, 2, -1)
    position = torch.ones(1, dtype=torch.int64, device=rows.device)
    write_pages(states[0], states[1], kept[0], kept[1], position, 2, "HND")
    return torch.equal(kept[..., 1, :], states) and not kept[..., 0, :].any()
