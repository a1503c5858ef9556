"""Triton kernels of images in channels_last: what follows a convolution, and squeeze and excitation.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_SQUEEZED = 128  # channels
_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    x_ptr,
    bias_ptr,
    residual_ptr,
    channels,
    count,
    KIND: tl.constexpr,
    BIASED: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add a bias and a residual and activate, in place and rounded once."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    if BIASED:
        x += tl.load(bias_ptr + place % channels, inside, 0.0).to(tl.float32)
    if ADDED:
        x += tl.load(residual_ptr + place, inside, 0.0).to(tl.float32)
    if KIND == "relu":
        x = tl.where(x < 0.0, 0.0, x)  # keeps NaN
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    tl.store(x_ptr + place, x.to(x_ptr.dtype.element_ty), inside)


def finish(x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str) -> Tensor:
    """Compute ``activation(x + bias + residual)`` in the memory of `x`, in float32 and rounded once.

    Args:
        x: (images, channels, height, width), contiguous in channels_last, fewer than 2**31 elements; float32, bfloat16
            or float16.
        bias: (channels,), the dtype of `x`; None for nothing.
        residual: as `x`; None for nothing.
        kind: "relu", "silu", or "" for no activation.
    """
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches on the current device else
        _finish[(triton.cdiv(x.numel(), _BLOCK),)](
            x,
            x if bias is None else bias,
            x if residual is None else residual,
            x.shape[1],
            x.numel(),
            KIND=kind,
            BIASED=bias is not None,
            ADDED=residual is not None,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return x


@triton.jit(do_not_specialize=["squeezed"])  # type: ignore[untyped-decorator]
def _excite(  # type: ignore[no-untyped-def]
    means_ptr,
    narrow_ptr,
    narrow_bias_ptr,
    wide_ptr,
    wide_bias_ptr,
    out_ptr,
    channels,
    squeezed,
    KIND: tl.constexpr,
    SQUEEZED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Run two small layers on an image's means, and the sigmoid of what they give for a part of its channels."""
    image = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, SQUEEZED)
    known = inner < squeezed
    total = tl.zeros((SQUEEZED,), tl.float32)
    for begin in range(0, channels, BLOCK):
        channel = begin + tl.arange(0, BLOCK)
        inside = channel < channels
        mean = tl.load(means_ptr + image * channels + channel, inside, 0.0).to(tl.float32)
        mask = known[:, None] & inside[None, :]
        weight = tl.load(narrow_ptr + inner[:, None] * channels + channel[None, :], mask, 0.0).to(tl.float32)
        total += tl.sum(weight * mean[None, :], 1)
    total += tl.load(narrow_bias_ptr + inner, known, 0.0).to(tl.float32)
    total = tl.where(total < 0.0, 0.0, total) if KIND == "relu" else total / (1.0 + tl.exp(-total))
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    mask = inside[:, None] & known[None, :]
    weight = tl.load(wide_ptr + channel[:, None] * squeezed + inner[None, :], mask, 0.0).to(tl.float32)
    out = tl.sum(weight * total[None, :], 1) + tl.load(wide_bias_ptr + channel, inside, 0.0).to(tl.float32)
    out = 1.0 / (1.0 + tl.exp(-out))
    tl.store(out_ptr + image * channels + channel, out.to(out_ptr.dtype.element_ty), inside)


def excite(means: Tensor, narrow: tuple[Tensor, Tensor], wide: tuple[Tensor, Tensor], kind: str) -> Tensor:
    """Compute ``sigmoid(wide(activation(narrow(means))))``, in float32 and rounded once.

    Args:
        means: (images, channels), contiguous; float32, bfloat16 or float16.
        narrow: weight and bias of a layer to at most `MAX_SQUEEZED` channels, (squeezed, channels) and (squeezed,).
        wide: those of a layer back, (channels, squeezed) and (channels,).
        kind: "relu" or "silu".
    """
    images, channels = means.shape
    squeezed = len(narrow[1])
    out = torch.empty_like(means)
    width = max(64, triton.next_power_of_2(squeezed))  # one variant for all layers of most models
    block = 8192 // width
    with torch.cuda.device_of(means):  # type: ignore[no-untyped-call]
        # Every program computes the narrow layer again: cheaper than a second launch.
        _excite[(images, triton.cdiv(channels, block))](
            *(means, *narrow, *wide, out),
            *(channels, squeezed),
            KIND=kind,
            SQUEEZED=width,
            BLOCK=block,
            num_warps=8,
        )
    return out
