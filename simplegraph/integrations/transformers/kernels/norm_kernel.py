"""One Triton kernel: an RMS norm, in float32 and rounded once, which for few rows takes less time than torch's.

Imported only where Triton is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COLUMNS = 16384  # that a program holds


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm(  # type: ignore[no-untyped-def]
    x_ptr, weight_ptr, out_ptr, eps, OFFSET: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr
):
    """One program for each row."""
    start = tl.program_id(0).to(tl.int64) * COLUMNS
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    x = tl.load(x_ptr + start + column, inside, 0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, inside, 0.0).to(tl.float32) + OFFSET
    variance = tl.sum(x * x, 0) * (1.0 / COLUMNS)
    scale = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    tl.store(out_ptr + start + column, (x * scale * weight).to(out_ptr.dtype.element_ty), inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """As `torch.nn.functional.rms_norm` over the last dimension.

    Args:
        x: (..., columns), of at most `MAX_COLUMNS`.
        weight: (columns,), of the same dtype.
        eps: what is added to the mean of squares.
        offset: what is added to the weights.
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
