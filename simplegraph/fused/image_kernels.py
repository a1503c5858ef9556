"""Triton kernels of images in channels_last: depthwise convolutions, what follows others, squeeze and excitation.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching

MAX_SQUEEZED = 128  # channels
MAX_WINDOW = 7  # pixels a side, of depthwise convolutions
_BLOCK = 1024
_PIXELS, _CHANNELS = 32, 32  # of a depthwise convolution that a program holds
_KINDS = ("", "relu", "silu")


@triton.jit
def _activate(x, kind):  # type: ignore[no-untyped-def]
    """Compute an activation of float32 numbers, by its place in `_KINDS`."""
    if kind == 1:
        x = tl.where(x < 0.0, 0.0, x)  # keeps NaN
    if kind == 2:
        x = x / (1.0 + tl.exp(-x))
    return x


# What is added and the activation are arguments, so that one variant serves every convolution of a model.
@triton.jit(do_not_specialize=["kind", "scaled", "biased", "added"])  # type: ignore[untyped-decorator]
def _finish(  # type: ignore[no-untyped-def]
    x_ptr,
    factor_ptr,
    bias_ptr,
    residual_ptr,
    channels,
    count,
    kind,
    scaled,
    biased,
    added,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply by a factor, add a bias and a residual and activate, in place and rounded once."""
    await_others(EARLY)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(x_ptr + place, inside, 0.0).to(tl.float32)
    # Masked, not in branches: all are read at once. Multiplying by 1 and adding -0.0 change no number.
    channel = place % channels
    factor = tl.load(factor_ptr + channel, inside & (scaled != 0), 1.0).to(tl.float32)
    bias = tl.load(bias_ptr + channel, inside & (biased != 0), -0.0).to(tl.float32)
    residual = tl.load(residual_ptr + place, inside & (added != 0), -0.0).to(tl.float32)
    x = factor * x + bias + residual
    tl.store(x_ptr + place, _activate(x, kind).to(x_ptr.dtype.element_ty), inside)


def finish(x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str, factor: Tensor | None = None) -> Tensor:
    """Compute ``activation(factor * x + bias + residual)`` in the memory of `x`, in float32 and rounded once.

    Args:
        x: (images, channels, height, width), contiguous in channels_last, fewer than 2**31 elements; float32, bfloat16
            or float16.
        bias: (channels,), the dtype of `x`, or float32 with a factor; None for nothing.
        residual: as `x`; None for nothing.
        kind: "relu", "silu", or "" for no activation.
        factor: (channels,) float32; None for one.
    """
    with launching(x) as early:
        _finish[(triton.cdiv(x.numel(), _BLOCK),)](
            x,
            *(x if each is None else each for each in (factor, bias, residual)),
            x.shape[1],
            x.numel(),
            _KINDS.index(kind),
            *(int(each is not None) for each in (factor, bias, residual)),
            BLOCK=_BLOCK,
            num_warps=4,
            **early,
        )
    return x


# Sizes are arguments, so that one variant serves all depthwise convolutions of a model that have one size of kernel.
@triton.jit(do_not_specialize=list(range(5, 13)))  # type: ignore[untyped-decorator]
def _depthwise(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    channels,
    height,
    width,
    out_height,
    out_width,
    count,
    stride,
    padding,
    kind,
    SIZE: tl.constexpr,
    PIXELS: tl.constexpr,
    CHANNELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Sum the products of some pixels and channels, add a bias and activate, rounded once."""
    await_others(EARLY)
    place = (tl.program_id(0) * PIXELS + tl.arange(0, PIXELS))[:, None]
    # Of all pixels: so the weights of a channel are read by the threads that use them.
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :] + tl.zeros((PIXELS, 1), tl.int32)
    known = channel < channels
    image, pixel = place // (out_height * out_width), place % (out_height * out_width)
    top, left = pixel // out_width * stride - padding, pixel % out_width * stride - padding
    first = x_ptr + ((image * height + top) * width + left) * channels + channel
    weight = weight_ptr + channel
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for down in range(SIZE):
        row = top + down
        there = known & (place < count) & (row >= 0) & (row < height)
        for right in tl.static_range(SIZE):
            column = left + right
            x = tl.load(first + right * channels, there & (column >= 0) & (column < width), 0.0).to(tl.float32)
            total += x * tl.load(weight + right * channels, known, 0.0).to(tl.float32)
        first += width * channels
        weight += SIZE * channels
    total += tl.load(bias_ptr + channel, known, 0.0).to(tl.float32)
    written = known & (place < count)
    tl.store(out_ptr + place * channels + channel, _activate(total, kind).to(out_ptr.dtype.element_ty), written)


def depthwise(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, kind: str) -> Tensor:
    """Compute the activation of a depthwise convolution, in float32 and rounded once.

    Args:
        x: (images, channels, height, width), contiguous in channels_last, fewer than 2**31 elements; float32, bfloat16
            or float16.
        weight: (channels, 1, size, size), in memory (size, size, channels); size at most `MAX_WINDOW`.
        bias: (channels,), the dtype of `x`.
        stride: between the windows of neighbouring pixels.
        padding: zeros on each side.
        kind: "relu", "silu", or "" for no activation.

    Returns:
        As `x`, in channels_last.
    """
    images, channels, height, width = x.shape
    size = weight.shape[2]
    out_height, out_width = ((side + 2 * padding - size) // stride + 1 for side in (height, width))
    out = torch.empty(images, out_height, out_width, channels, dtype=x.dtype, device=x.device).permute(0, 3, 1, 2)
    count = images * out_height * out_width
    with launching(x) as early:
        _depthwise[(triton.cdiv(count, _PIXELS), triton.cdiv(channels, _CHANNELS))](
            *(x, weight, bias, out, channels, height, width, out_height, out_width),
            *(count, stride, padding, _KINDS.index(kind)),
            SIZE=size,
            PIXELS=_PIXELS,
            CHANNELS=_CHANNELS,
            num_warps=4,
            **early,
        )
    return out


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
    EARLY: tl.constexpr,
):
    """Run two small layers on an image's means, and the sigmoid of what they give for a part of its channels."""
    await_others(EARLY)
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
    with launching(means) as early:
        # Every program computes the narrow layer again: cheaper than a second launch.
        _excite[(images, triton.cdiv(channels, block))](
            *(means, *narrow, *wide, out),
            *(channels, squeezed),
            KIND=kind,
            SQUEEZED=width,
            BLOCK=block,
            num_warps=8,
            **early,
        )
    return out
