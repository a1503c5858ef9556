"""Two Triton kernels: an RMS norm, and the rotary embedding of queries and keys.

Imported only if Triton is installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 16384  # the most that one program can hold


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, eps, OFFSET: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """Normalize a row in each program."""
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(x_ptr + start + column, inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32) + OFFSET
    variance = tl.sum(x * x, 0) * (1.0 / COLUMNS)
    scale = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    tl.store(out_ptr + start + column, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Compute `torch.nn.functional.rms_norm` over the last dimension, in float32 and rounded once.

    For few rows it is faster than torch's.

    Args:
        x: (..., columns), at most `MAX_COLUMNS`; float32, bfloat16 or float16.
        weight: (columns,), the dtype of `x`.
        eps: added to the mean of squares.
        offset: added to the weights.

    Returns:
        (..., columns), the dtype of `x`.
    """
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    block = triton.next_power_of_2(columns)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # Triton launches on the current device else
        _rms_norm[(x.numel() // columns,)](
            x, weight, out, eps, OFFSET=offset, COLUMNS=columns, BLOCK=block, num_warps=min(16, max(1, block // 256))
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_products(a, b, c, d, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute ``a * b + c * d`` of float32, in which products are rounded to `dtype` before they are added."""
    return ((a * b).to(dtype).to(tl.float32) + (c * d).to(dtype).to(tl.float32)).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(x_ptr, cos_ptr, sin_ptr, out_ptr, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rotate one head of one token: its first half against its second."""
    low = tl.arange(0, BLOCK)
    inside = low < half
    high = low + half
    x1 = tl.load(x_ptr + low, inside).to(tl.float32)
    x2 = tl.load(x_ptr + high, inside).to(tl.float32)
    cos1 = tl.load(cos_ptr + low, inside).to(tl.float32)
    cos2 = tl.load(cos_ptr + high, inside).to(tl.float32)
    sin1 = tl.load(sin_ptr + low, inside).to(tl.float32)
    sin2 = tl.load(sin_ptr + high, inside).to(tl.float32)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + low, _sum_of_products(x1, cos1, -x2, sin1, dtype), inside)
    tl.store(out_ptr + high, _sum_of_products(x2, cos2, x1, sin2, dtype), inside)


# No integer is specialized: there is one variant for each dtype and head size, so that no capture has to compile one.
@triton.jit(do_not_specialize=list(range(6, 17)))  # type: ignore[untyped-decorator]
def _rotate(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    q_out_ptr,
    k_out_ptr,
    tokens,
    q_heads,
    half,
    q_row,
    q_head,
    q_token,
    k_row,
    k_head,
    k_token,
    trig_row,
    trig_token,
    BLOCK: tl.constexpr,
):
    """Embed one head of one token of a row in each program; heads of the queries come first."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, token = place // tokens, place % tokens
    trig = row * trig_row + token * trig_token
    if head < q_heads:
        source = q_ptr + row * q_row + head * q_head + token * q_token
        target = q_out_ptr + (place * q_heads + head) * (2 * half)
        _turn(source, cos_ptr + trig, sin_ptr + trig, target, half, BLOCK)
    else:
        head -= q_heads
        source = k_ptr + row * k_row + head * k_head + token * k_token
        target = k_out_ptr + (place * (tl.num_programs(1) - q_heads) + head) * (2 * half)
        _turn(source, cos_ptr + trig, sin_ptr + trig, target, half, BLOCK)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Embed queries and keys, rounding where the models' code rounds.

    Args:
        q: (rows, heads, tokens, elements), an even number of elements; float32, bfloat16 or float16.
        k: as `q`, with any number of heads.
        cos: (rows or 1, tokens, elements), the dtype of `q`.
        sin: as `cos`.

    Returns:
        Embedded queries and keys, in the shapes of `q` and `k`.
    """
    q, k = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (q, k))
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, tokens, elements = q.shape
    # The heads of a token are contiguous, as in the original's results for the outputs of a projection.
    q_out, k_out = (x.new_empty(rows, tokens, x.shape[1], elements) for x in (q, k))
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]  # Triton launches on the current device else
        _rotate[(rows * tokens, heads + k.shape[1])](
            q,
            k,
            cos,
            sin,
            q_out,
            k_out,
            tokens,
            heads,
            elements // 2,
            *q.stride()[:3],
            *k.stride()[:3],
            cos.stride(0) if cos.shape[0] > 1 else 0,
            cos.stride(1),
            BLOCK=triton.next_power_of_2(elements // 2),
            num_warps=1,
            enable_fp_fusion=False,  # a fused multiply-add does not round the product, as the models' code does
        )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)
