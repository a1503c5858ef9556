"""Triton kernels of a group norm of images in channels_last, which torch's own would copy there and back.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_CHANNELS, MAX_SIZE = 8192, 512  # of an image, and of a group
_MAX_PARTS = 64  # of an image
_PROGRAMS = 264  # enough to fill a large GPU
_ELEMENTS = 8192  # that a program holds at a time


# No integer is specialized: images of any size run one variant for each number of channels.
@triton.jit(do_not_specialize=["pixels", "part"])  # type: ignore[untyped-decorator]
def _sum_channels(  # type: ignore[no-untyped-def]
    x_ptr, sums_ptr, pixels, part, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr
):
    """Sum a part of an image's pixels, and their squares, less the first pixel: for each channel."""
    image, index = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel, row = tl.arange(0, BLOCK), tl.arange(0, PIXELS)
    inside = channel < CHANNELS
    start = x_ptr + image * pixels * CHANNELS
    first = tl.load(start + channel, inside, 0.0).to(tl.float32)
    total, squares = tl.zeros((PIXELS, BLOCK), tl.float32), tl.zeros((PIXELS, BLOCK), tl.float32)
    end = tl.minimum((index + 1) * part, pixels)
    for begin in range(index * part, end, PIXELS):
        pixel = begin + row
        mask = (pixel < end)[:, None] & inside[None, :]
        x = tl.load(start + pixel[:, None].to(tl.int64) * CHANNELS + channel[None, :], mask, 0.0).to(tl.float32)
        x = tl.where(mask, x - first[None, :], 0.0)
        total += x
        squares += x * x
    target = sums_ptr + (image * tl.num_programs(1) + index) * (2 * CHANNELS) + channel
    tl.store(target, tl.sum(total, 0), inside)
    tl.store(target + CHANNELS, tl.sum(squares, 0), inside)


@triton.jit(do_not_specialize=["pixels", "parts"])  # type: ignore[untyped-decorator]
def _scale_channels(  # type: ignore[no-untyped-def]
    x_ptr,
    sums_ptr,
    weight_ptr,
    bias_ptr,
    scales_ptr,
    pixels,
    parts,
    eps,
    AFFINE: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Compute a group's mean and variance, and with them each channel's factor and summand."""
    image, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    channel = group * SIZE + column
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for begin in range(0, parts, PARTS):
        part = begin + tl.arange(0, PARTS)
        mask = (part < parts)[:, None] & inside[None, :]
        place = sums_ptr + (image * parts + part)[:, None] * (2 * CHANNELS) + channel[None, :]
        total += tl.sum(tl.load(place, mask, 0.0), 0)
        squares += tl.sum(tl.load(place + CHANNELS, mask, 0.0), 0)
    shift = total / pixels
    means = shift + tl.load(x_ptr + image * pixels * CHANNELS + channel, inside, 0.0).to(tl.float32)
    mean = tl.sum(tl.where(inside, means, 0.0), 0) / SIZE
    apart = tl.where(inside, means - mean, 0.0)
    variance = (tl.sum(squares - total * shift, 0) / pixels + tl.sum(apart * apart, 0)) / SIZE
    factor = tl.div_rn(1.0, tl.sqrt_rn(variance + eps)) + tl.zeros((BLOCK,), tl.float32)
    summand = -mean * factor
    if AFFINE:
        weight = tl.load(weight_ptr + channel, inside, 0.0).to(tl.float32)
        factor *= weight
        summand = summand * weight + tl.load(bias_ptr + channel, inside, 0.0).to(tl.float32)
    target = scales_ptr + image * (2 * CHANNELS) + channel
    tl.store(target, factor, inside)
    tl.store(target + CHANNELS, summand, inside)


@triton.jit(do_not_specialize=["pixels"])  # type: ignore[untyped-decorator]
def _apply_scales(  # type: ignore[no-untyped-def]
    x_ptr, scales_ptr, out_ptr, pixels, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, PIXELS: tl.constexpr
):
    """Multiply and add by channel."""
    image = tl.program_id(0).to(tl.int64)
    channel, pixel = tl.arange(0, BLOCK), tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    inside = channel < CHANNELS
    scales = scales_ptr + image * (2 * CHANNELS) + channel
    factor, summand = tl.load(scales, inside, 0.0), tl.load(scales + CHANNELS, inside, 0.0)
    place = image * pixels * CHANNELS + pixel[:, None].to(tl.int64) * CHANNELS + channel[None, :]
    mask = (pixel < pixels)[:, None] & inside[None, :]
    x = tl.load(x_ptr + place, mask, 0.0).to(tl.float32)
    x = x * factor[None, :] + summand[None, :]
    tl.store(out_ptr + place, x.to(out_ptr.dtype.element_ty), mask)


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute `torch.nn.functional.group_norm` of images in channels_last, in float32 and rounded once.

    Args:
        x: (images, channels, height, width), contiguous in channels_last, at most `MAX_CHANNELS` and
            `MAX_SIZE` a group; float32, bfloat16 or float16.
        groups: of channels.
        weight: (channels,), the dtype of `x`; None for none.
        bias: as `weight`; both or neither.
        eps: added to the variance.

    Returns:
        As `x`, in channels_last.
    """
    images, channels, height, width = x.shape
    pixels, size = height * width, channels // groups
    block = triton.next_power_of_2(channels)
    rows = max(1, _ELEMENTS // block)
    parts = max(1, min(_MAX_PARTS, _PROGRAMS // images, triton.cdiv(pixels, rows)))
    part = triton.cdiv(triton.cdiv(pixels, parts), rows) * rows
    parts = triton.cdiv(pixels, part)
    sums = torch.empty(images, parts, 2, channels, dtype=torch.float32, device=x.device)
    scales = torch.empty(images, 2, channels, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)  # in channels_last as well
    shape = {"CHANNELS": channels, "BLOCK": block, "PIXELS": rows, "num_warps": 8}
    affine = weight is not None and bias is not None
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches on the current device else
        _sum_channels[(images, parts)](x, sums, pixels, part, **shape)
        _scale_channels[(images, groups)](
            *(x, sums, weight if affine else x, bias if affine else x, scales),
            *(pixels, parts, eps),
            AFFINE=affine,
            CHANNELS=channels,
            SIZE=size,
            BLOCK=triton.next_power_of_2(size),
            PARTS=min(_MAX_PARTS, 4096 // triton.next_power_of_2(size)),
            num_warps=4,
        )
        _apply_scales[(images, triton.cdiv(pixels, rows))](x, scales, out, pixels, **shape)
    return out
