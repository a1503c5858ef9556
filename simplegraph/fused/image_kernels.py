"""Triton kernels of images in channels_last: depthwise convolutions, what follows others, excitation, group norms.

Torch's own group norm would copy such images there and back. Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching
from simplegraph.fused.torch_operators import Grouped

MAX_SQUEEZED = 128  # channels
MAX_WINDOW = 7  # pixels a side, of depthwise convolutions
_BLOCK = 1024
_PIXELS, _CHANNELS = 32, 32  # of a depthwise convolution that a program holds
_KINDS = ("", "relu", "silu")
MAX_SIZE = 512  # channels of a group of a norm
_PROGRAMS = 264  # of a group norm, enough to fill a large GPU
_MAX_PARTS = 64  # of an image
_NORM_CHANNELS, _NORM_PIXELS = 128, 32  # that a program of a group norm holds at a time


@triton.jit
def _activate(x, kind):  # type: ignore[no-untyped-def]
    """Compute an activation of float32 numbers, by its place in `_KINDS`."""
    if kind == 1:
        x = tl.where(x < 0.0, 0.0, x)  # keeps NaN
    if kind == 2:
        x = x / (1.0 + tl.exp(-x))
    return x


# The added tensors and the activation are arguments, so that one variant serves every convolution of a model.
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
    # Masked instead of branches, so that all are read at once. Multiplying by 1 and adding -0.0 change no number.
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
            *(x if tensor is None else tensor for tensor in (factor, bias, residual)),
            x.shape[1],
            x.numel(),
            _KINDS.index(kind),
            *(int(tensor is not None) for tensor in (factor, bias, residual)),
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
    # For all pixels, so that the threads that use a channel's weights read them.
    channel = (tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS))[None, :] + tl.zeros((PIXELS, 1), tl.int32)
    is_channel = channel < channels
    image, pixel = place // (out_height * out_width), place % (out_height * out_width)
    top, left = pixel // out_width * stride - padding, pixel % out_width * stride - padding
    first = x_ptr + ((image * height + top) * width + left) * channels + channel
    weight = weight_ptr + channel
    total = tl.zeros((PIXELS, CHANNELS), tl.float32)
    for down in range(SIZE):
        row = top + down
        there = is_channel & (place < count) & (row >= 0) & (row < height)
        for right in tl.static_range(SIZE):
            column = left + right
            x = tl.load(first + right * channels, there & (column >= 0) & (column < width), 0.0).to(tl.float32)
            total += x * tl.load(weight + right * channels, is_channel, 0.0).to(tl.float32)
        first += width * channels
        weight += SIZE * channels
    total += tl.load(bias_ptr + channel, is_channel, 0.0).to(tl.float32)
    written = is_channel & (place < count)
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
    """Run two small layers on an image's means, and the sigmoid of the result for a part of its channels."""
    await_others(EARLY)
    image = tl.program_id(0).to(tl.int64)
    inner = tl.arange(0, SQUEEZED)
    is_inner = inner < squeezed
    total = tl.zeros((SQUEEZED,), tl.float32)
    for begin in range(0, channels, BLOCK):
        channel = begin + tl.arange(0, BLOCK)
        inside = channel < channels
        mean = tl.load(means_ptr + image * channels + channel, inside, 0.0).to(tl.float32)
        mask = is_inner[:, None] & inside[None, :]
        weight = tl.load(narrow_ptr + inner[:, None] * channels + channel[None, :], mask, 0.0).to(tl.float32)
        total += tl.sum(weight * mean[None, :], 1)
    total += tl.load(narrow_bias_ptr + inner, is_inner, 0.0).to(tl.float32)
    total = tl.where(total < 0.0, 0.0, total) if KIND == "relu" else total / (1.0 + tl.exp(-total))
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    mask = inside[:, None] & is_inner[None, :]
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
    # A number added to all pixels of a channel changes only its mean.
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
        norm: the norm; its tensors have the dtype of `x`, its activation is "silu" or none.

    Returns:
        As `x`, in channels_last.
    """
    images, channels, height, width = x.shape
    pixels, size, blocks = height * width, channels // norm.groups, triton.cdiv(channels, _NORM_CHANNELS)
    parts = max(1, min(_MAX_PARTS, _PROGRAMS // (images * blocks), triton.cdiv(pixels, _NORM_PIXELS)))
    part = triton.cdiv(triton.cdiv(pixels, parts), _NORM_PIXELS) * _NORM_PIXELS
    parts = triton.cdiv(pixels, part)
    sums = torch.empty(images, parts, 2, channels, dtype=torch.float32, device=x.device)
    scales = torch.empty(images, 2, channels, dtype=torch.float32, device=x.device)
    out = torch.empty_like(x)  # in channels_last as well
    tile = {"CHANNELS": _NORM_CHANNELS, "PIXELS": _NORM_PIXELS, "num_warps": 4}
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
        _apply_scales[(images, triton.cdiv(pixels, _NORM_PIXELS), blocks)](
            *(x, scales, out, channels, pixels), KIND=norm.kind, **tile, **early
        )
    return out
