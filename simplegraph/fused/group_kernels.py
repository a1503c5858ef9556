"""Triton kernels of a group norm of images in channels_last, which torch's own would copy there and back.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching
from simplegraph.fused.torch_operators import Grouped

MAX_SIZE = 512  # channels of a group
_PROGRAMS = 264  # enough to fill a large GPU
_MAX_PARTS = 64  # of an image
_CHANNELS, _PIXELS = 128, 32  # that a program holds at a time


# Sizes are arguments, so that one variant serves every norm of a model, and images of any size.
@triton.jit(do_not_specialize=["pixels", "part"])  # type: ignore[untyped-decorator]
def _sum_channels(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, channels, pixels, part, CHANNELS: tl.constexpr, PIXELS: tl.constexpr, EARLY: tl.constexpr
):
    """Sum a part of an image's pixels, and their squares, less the first pixel: for some channels."""
    await_others(EARLY)
    image, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, row = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS), tl.arange(0, PIXELS)
    inside = channel < channels
    start = x_ptr + image * pixels * channels
    first = tl.load(start + channel, inside, 0.0).to(tl.float32)
    total, squares = tl.zeros((PIXELS, CHANNELS), tl.float32), tl.zeros((PIXELS, CHANNELS), tl.float32)
    end = tl.minimum((index + 1) * part, pixels)
    for begin in range(index * part, end, PIXELS):
        pixel = begin + row
        mask = (pixel < end)[:, None] & inside[None, :]
        x = tl.load(start + pixel[:, None].to(tl.int64) * channels + channel[None, :], mask, 0.0).to(tl.float32)
        x = tl.where(mask, x - first[None, :], 0.0)
        total += x
        squares += x * x
    target = sums_ptr + (image * tl.num_programs(1) + index) * (2 * channels) + channel
    tl.store(target, tl.sum(total, 0), inside)
    tl.store(target + channels, tl.sum(squares, 0), inside)


@triton.jit(do_not_specialize=["channels", "size", "pixels", "parts", "added_row"])  # type: ignore[untyped-decorator]
def _scale_channels(  # type: ignore[no-untyped-def]
    x_ptr,
    sums_ptr,
    weight_ptr,
    bias_ptr,
    row_ptr,
    added_ptr,
    scales_ptr,
    channels,
    size,
    pixels,
    parts,
    added_row,
    eps,
    AFFINE: tl.constexpr,
    ROW: tl.constexpr,
    ADDED: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute a group's mean and variance, and with them each channel's factor and summand."""
    await_others(EARLY)
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < size
    channel = group * size + column
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        place = sums_ptr + (image * parts + part)[:, None] * (2 * channels) + channel[None, :]
        total += tl.sum(tl.load(place, mask, 0.0), 0)
        squares += tl.sum(tl.load(place + channels, mask, 0.0), 0)
    shift = total / pixels
    means = shift + tl.load(x_ptr + image * pixels * channels + channel, inside, 0.0).to(tl.float32)
    # A summand of all pixels of a channel changes its mean only.
    summand = tl.zeros((BLOCK,), tl.float32)
    if ROW:
        summand += tl.load(row_ptr + channel, inside, 0.0).to(tl.float32)
    if ADDED:
        summand += tl.load(added_ptr + image * added_row + channel, inside, 0.0).to(tl.float32)
    means += summand
    mean = tl.sum(tl.where(inside, means, 0.0), 0) / size
    apart = tl.where(inside, means - mean, 0.0)
    variance = (tl.sum(squares - total * shift, 0) / pixels + tl.sum(apart * apart, 0)) / size
    factor = tl.div_rn(1.0, tl.sqrt_rn(variance + eps)) + tl.zeros((BLOCK,), tl.float32)
    summand = (summand - mean) * factor
    if AFFINE:
        weight = tl.load(weight_ptr + channel, inside, 0.0).to(tl.float32)
        factor *= weight
        summand = summand * weight + tl.load(bias_ptr + channel, inside, 0.0).to(tl.float32)
    target = scales_ptr + image * (2 * channels) + channel
    tl.store(target, factor, inside)
    tl.store(target + channels, summand, inside)


@triton.jit(do_not_specialize=["pixels"])  # type: ignore[untyped-decorator]
def _apply_scales(  # type: ignore[no-untyped-def]
    x_ptr,
    scales_ptr,
    out_ptr,
    channels,
    pixels,
    KIND: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIXELS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Multiply and add by channel, and activate."""
    await_others(EARLY)
    image = tl.program_id(0).to(tl.int64)
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    inside = channel < channels
    scales = scales_ptr + image * (2 * channels) + channel
    factor, summand = tl.load(scales, inside, 0.0), tl.load(scales + channels, inside, 0.0)
    place = image * pixels * channels + pixel[:, None].to(tl.int64) * channels + channel[None, :]
    mask = (pixel < pixels)[:, None] & inside[None, :]
    x = tl.load(x_ptr + place, mask, 0.0).to(tl.float32)
    x = x * factor[None, :] + summand[None, :]
    if KIND == "silu":
        x = x / (1.0 + tl.exp(-x))
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask)


def group_norm(x: Tensor, norm: Grouped) -> Tensor:
    """Compute the activation of a group norm of images in channels_last, in float32 and rounded once.

    Args:
        x: (images, channels, height, width), contiguous in channels_last, at most `MAX_SIZE` channels a group; float32,
            bfloat16 or float16.
        norm: what is computed; its tensors have the dtype of `x`, its activation is "silu" or none.

    Returns:
        As `x`, in channels_last.
    """
    images, channels, height, width = x.shape
    pixels, size, blocks = height * width, channels // norm.groups, triton.cdiv(channels, _CHANNELS)
    parts = max(1, min(_MAX_PARTS, _PROGRAMS // (images * blocks), triton.cdiv(pixels, _PIXELS)))
    part = triton.cdiv(triton.cdiv(pixels, parts), _PIXELS) * _PIXELS
    parts = triton.cdiv(pixels, part)
    sums = torch.empty(images, parts, 2, channels, dtype=torch.float32, device=x.device)
    scales = torch.empty(images, 2, channels, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)  # in channels_last as well
    tile = {"CHANNELS": _CHANNELS, "PIXELS": _PIXELS, "num_warps": 4}
    affine = norm.weight is not None and norm.bias is not None
    block = max(128, triton.next_power_of_2(size))
    with launching(x) as early:
        _sum_channels[(images, parts, blocks)](x, sums, channels, pixels, part, **tile, **early)
        _scale_channels[(images, norm.groups)](
            *(x, sums, norm.weight if affine else x, norm.bias if affine else x),
            *(x if norm.row is None else norm.row, x if norm.added is None else norm.added, scales),
            *(channels, size, pixels, parts, 0 if norm.added is None else norm.added.stride(0), norm.eps),
            AFFINE=affine,
            ROW=norm.row is not None,
            ADDED=norm.added is not None,
            BLOCK=block,
            PARTS=4096 // block,
            num_warps=4,
            **early,
        )
        _apply_scales[(images, triton.cdiv(pixels, _PIXELS), blocks)](
            *(x, scales, out, channels, pixels), KIND=norm.kind, **tile, **early
        )
    return out
