"""Triton kernels before attention: rotary embedding, writes to a KV cache, and both in one.

Imported only if Triton is installed. Nothing is specialized for the number of rows: there is one variant for each dtype
and shape of a model, so that no capture has to compile one.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from simplegraph.fused.launches import await_others, launching
from simplegraph.fused.torch_operators import RotaryWrite

_HEADS = 8  # heads per program of the kernel that rotates and writes


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
    EARLY: tl.constexpr,
):
    """Embed one head of one token of a row in each program; heads of the queries come first."""
    await_others(EARLY)
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
    # The heads of a token are contiguous, as in the results of the original for outputs of a projection.
    q_out, k_out = (x.new_empty(rows, tokens, x.shape[1], elements) for x in (q, k))
    with launching(q) as early:
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
            **early,
        )
    return q_out.transpose(1, 2), k_out.transpose(1, 2)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_write(  # type: ignore[no-untyped-def]
    qkv_ptr,
    positions_ptr,
    table_ptr,
    keys_ptr,
    values_ptr,
    slots_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    token_stride,
    page_stride,
    offset_stride,
    head_stride,
    PAGE_SIZE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Process one token and some of its heads in each program: queries, keys and values, in this order."""
    await_others(EARLY)
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[:, None]
    column = tl.arange(0, HALF)[None, :]
    is_query, is_value = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    exists = head < NUM_HEADS + 2 * NUM_KV_HEADS
    row = qkv_ptr + token * token_stride + head * (2 * HALF) + column
    first, second = tl.load(row, exists, 0.0), tl.load(row + HALF, exists, 0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    if NORMED:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / (2 * HALF) + eps)[:, None]
        norm = tl.where(is_query, q_norm_ptr + column, k_norm_ptr + column)
        x = x * scale * tl.load(norm).to(tl.float32)
        y = y * scale * tl.load(norm + HALF).to(tl.float32)
    angle = table_ptr + tl.load(positions_ptr + token) * (2 * HALF) + column
    cos, sin = tl.load(angle), tl.load(angle + HALF)
    first = tl.where(is_value, first, (x * cos - y * sin).to(first.dtype))
    second = tl.where(is_value, second, (y * cos + x * sin).to(second.dtype))
    tl.store(row, first, is_query)
    tl.store(row + HALF, second, is_query)
    slot = tl.load(slots_ptr + token)
    place = (slot // PAGE_SIZE) * page_stride + (slot % PAGE_SIZE) * offset_stride
    kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
    target = tl.where(is_value, values_ptr + place, keys_ptr + place) + kv_head * head_stride + column
    written = exists & (head >= NUM_HEADS) & (slot >= 0)
    tl.store(target, first, written)
    tl.store(target + HALF, second, written)


def rotate_and_write(qkv: Tensor, cached: RotaryWrite) -> None:
    """Norm and rotate queries in place; norm and rotate keys, and write them and the values to their pages.

    Args:
        qkv: (T, num_heads + 2 * num_kv_heads, head_dim), its heads contiguous; head_dim a power of 2.
        cached: how, and where to; keys and values have the same strides.
    """
    tokens, heads, head_dim = qkv.shape
    keys, values = cached.pages
    q_norm, k_norm = (qkv, qkv) if cached.norms is None else cached.norms
    with launching(qkv) as early:
        _rotate_and_write[(tokens, triton.cdiv(heads, _HEADS))](
            *(qkv, cached.positions, cached.table, keys, values, cached.slots),
            *(q_norm, k_norm, cached.eps, qkv.stride(0), *keys.stride()[:3]),
            PAGE_SIZE=keys.shape[1],
            NUM_HEADS=cached.num_heads,
            NUM_KV_HEADS=(heads - cached.num_heads) // 2,
            HALF=head_dim // 2,
            NORMED=cached.norms is not None,
            BLOCK=_HEADS,
            **early,
        )


@triton.jit  # type: ignore[untyped-decorator]
def _write_pages(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    k_row,
    k_head,
    v_row,
    v_head,
    page_stride,
    offset_stride,
    head_stride,
    page_size,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Write keys and values to their slots, one program per token and head."""
    await_others(EARLY)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    column = tl.arange(0, BLOCK)
    inside = column < HEAD_DIM
    target = (slot // page_size) * page_stride + (slot % page_size) * offset_stride + head * head_stride + column
    key = tl.load(k_ptr + token * k_row + head * k_head + column, mask=inside)
    tl.store(k_cache_ptr + target, key, mask=inside)
    value = tl.load(v_ptr + token * v_row + head * v_head + column, mask=inside)
    tl.store(v_cache_ptr + target, value, mask=inside)


def write_pages(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, page_size: int, layout: str
) -> None:
    """Write tokens to their slots.

    Args:
        k: (T, num_kv_heads, head_dim).
        v: as `k`.
        k_cache: (num_pages, ...), the pages of one layer; written.
        v_cache: as `k_cache`, with the same strides.
        slots: (T,) int64, page * page_size + offset; rows with -1 are skipped.
        page_size: tokens in a page.
        layout: "NHD" or "HND".
    """
    tokens, heads, head_dim = k.shape
    k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (k, v))
    offset, head = (1, 2) if layout == "NHD" else (2, 1)
    with launching(k) as early:
        _write_pages[(tokens, heads)](
            *(k, v, k_cache, v_cache, slots),
            *(*k.stride()[:2], *v.stride()[:2]),
            *(k_cache.stride(0), k_cache.stride(offset), k_cache.stride(head)),
            page_size,
            HEAD_DIM=head_dim,
            BLOCK=triton.next_power_of_2(head_dim),
            num_warps=1,
            **early,
        )
