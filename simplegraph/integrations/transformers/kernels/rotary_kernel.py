"""One Triton kernel: the rotary embedding of queries and keys, rounded where the models' text rounds.

Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _sum_of_products(a, b, c, d, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """``a * b + c * d`` of float32, in which products are rounded to `dtype` before they are added."""
    return ((a * b).to(dtype).to(tl.float32) + (c * d).to(dtype).to(tl.float32)).to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def _turn(x_ptr, cos_ptr, sin_ptr, out_ptr, half, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One head of one token: its first half is turned against its second."""
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


# Not by any whole number: one variant for all shapes of a dtype and head size, so that no capture meets a new one.
@triton.jit(do_not_specialize=list(range(6, 23)))  # type: ignore[untyped-decorator]
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
    q_out_row,
    q_out_head,
    q_out_token,
    k_out_row,
    k_out_head,
    k_out_token,
    BLOCK: tl.constexpr,
):
    """One program for each token of each row, and each head: those of the queries first."""
    place, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, token = place // tokens, place % tokens
    cos = cos_ptr + row * trig_row + token * trig_token
    sin = sin_ptr + row * trig_row + token * trig_token
    if head < q_heads:
        source = q_ptr + row * q_row + head * q_head + token * q_token
        _turn(source, cos, sin, q_out_ptr + row * q_out_row + head * q_out_head + token * q_out_token, half, BLOCK)
    else:
        head -= q_heads
        source = k_ptr + row * k_row + head * k_head + token * k_token
        _turn(source, cos, sin, k_out_ptr + row * k_out_row + head * k_out_head + token * k_out_token, half, BLOCK)


def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys, embedded.

    Args:
        q: (rows, heads, tokens, elements), of an even number of elements.
        k: as `q`, of as many heads as there are.
        cos: (rows or 1, tokens, elements), of the same dtype.
        sin: as `cos`.
    """
    q, k = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (q, k))
    if cos.stride() != sin.stride() or cos.stride(2) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    rows, heads, tokens, elements = q.shape
    # Heads of a token one after the other, as the text's results are for what a projection gave.
    q_out, k_out = (x.new_empty(rows, tokens, x.shape[1], elements).transpose(1, 2) for x in (q, k))
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
            *q_out.stride()[:3],
            *k_out.stride()[:3],
            BLOCK=triton.next_power_of_2(elements // 2),
            num_warps=1,
            enable_fp_fusion=False,  # a fused product is not rounded, which the text's is
        )
    return q_out, k_out
