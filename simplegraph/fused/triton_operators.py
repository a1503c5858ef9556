"""The fused operators by Triton's kernels, and by torch for inputs that these do not take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from simplegraph.fused.torch_operators import DTYPES, PRODUCT_FINISHES, Adapted, Grouped, Operators, RotaryWrite

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # then the kernels run on a CPU


class TritonOperators(Operators):
    """The kernels. Their results are rounded once, torch's often twice: they are as exact, but not equal to the bit.

    `rotate` is equal to the bit. Tensors that require gradients, other dtypes and other devices are for torch.
    """

    name = "Triton"
    triton = True

    def __init__(self) -> None:
        from simplegraph.fused import cache_kernels, image_kernels, one_row_kernels, row_kernels

        self._rows: Any = row_kernels
        self._cache: Any = cache_kernels
        self._images: Any = image_kernels
        self._one_row: Any = one_row_kernels

    def _takes(self, *tensors: Tensor | None) -> bool:
        """True for tensors on one GPU, of one dtype that the kernels know, without gradients and with elements.

        A tensor that is negated by a flag, such as the imaginary part of a conjugate, has other numbers in memory.
        """
        given = [tensor for tensor in tensors if tensor is not None]
        first = given[0]
        return (
            (first.is_cuda or _INTERPRETED)
            and first.dtype in DTYPES
            and all(
                tensor.dtype is first.dtype and tensor.device == first.device and not tensor.is_neg()
                for tensor in given
            )
            and first.numel() > 0
            and not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given))
        )

    def _norms(self, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None = None) -> bool:
        return (
            self._takes(x, residual, weight, bias)
            and weight.shape == x.shape[-1:]
            and weight.numel() <= self._rows.MAX_COLUMNS
            and (residual is None or residual.shape == x.shape)
        )

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        if not self._norms(x, None, weight):
            return super().rms_norm(x, weight, eps, offset)
        normed: Tensor = self._rows.norm(x, None, weight, None, eps, offset=offset)[0]
        return normed

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        if not self._norms(x, residual, weight):
            return super().add_rms_norm(x, residual, weight, eps, offset)
        return self._rows.norm(x, residual, weight, None, eps, offset=offset)  # type: ignore[no-any-return]

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        if not self._norms(x, residual, weight, bias):
            return super().add_layer_norm(x, residual, weight, bias, eps)
        return self._rows.norm(x, residual, weight, bias, eps, centered=True)  # type: ignore[no-any-return]

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
        if groups > 1 or not self._norms(x, gate, weight) or gate.stride(-1) != 1:
            return super().gated_rms_norm(x, gate, weight, eps, groups)
        return self._rows.norm(x, None, weight, None, eps, gate=gate)[0]  # type: ignore[no-any-return]

    def group_norm(self, x: Tensor, norm: Grouped) -> Tensor:
        fits = (
            x.dim() == 4
            and x.is_contiguous(memory_format=torch.channels_last)
            and not x.is_contiguous()
            and x.shape[1] <= norm.groups * self._images.MAX_SIZE
            and norm.kind in ("", "silu")
            and (norm.weight is None) == (norm.bias is None)
            and (norm.added is None or norm.added.stride(-1) == 1)
            and self._takes(x, norm.weight, norm.bias, norm.row, norm.added)
        )
        return self._images.group_norm(x, norm) if fits else super().group_norm(x, norm)

    def adapt(self, x: Tensor, norm: Adapted) -> tuple[Tensor, Tensor]:
        by_image = (norm.gate, norm.scale, norm.shift)
        fits = (
            x.dim() == 3
            and x.shape[-1] <= self._rows.MAX_COLUMNS
            and (norm.scale is None) == (norm.shift is None)
            and (norm.residual is None or norm.residual.shape == x.shape)
            and all(tensor is None or tensor.shape == (x.shape[0], x.shape[-1]) for tensor in by_image)
            and self._takes(x, norm.weight, norm.bias, norm.row, *by_image, norm.residual)
        )
        return self._rows.adapt(x, norm) if fits else super().adapt(x, norm)

    def finish(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str, factor: Tensor | None = None
    ) -> Tensor:
        alike = [(x, bias, residual)] if factor is None else [(x, residual), (factor, bias)]
        fits = (
            x.is_contiguous(memory_format=torch.channels_last)
            and x.numel() < 2**31 - 2**16
            and all(tensor is None or tensor.is_contiguous() for tensor in (bias, factor))
            and (residual is None or (residual.shape == x.shape and residual.stride() == x.stride()))
            and (factor is None or factor.device == x.device)
            and all(self._takes(*group) for group in alike)
        )
        if not fits:
            return super().finish(x, bias, residual, kind, factor)
        return self._images.finish(x, bias, residual, kind, factor)  # type: ignore[no-any-return]

    def pointwise(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        fits = kind in PRODUCT_FINISHES and x.is_contiguous(memory_format=torch.channels_last)
        if bias is None or not fits or not self._ends_products(x, weight, bias):
            return super().pointwise(x, weight, bias, kind)
        rows, matrix = x.permute(0, 2, 3, 1), weight.flatten(1)
        out = F.linear(rows, matrix, bias) if kind == "" else self._activated(rows, matrix, bias, use_gelu=False)
        return out.permute(0, 3, 1, 2)

    def linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], kind: str = ""
    ) -> list[Tensor]:
        inputs, rows = x.shape[-1], weights[0].stride(0)
        fits = (
            x.numel() == inputs
            and len(weights) <= self._one_row.MAX_TOGETHER
            and all(weight.stride() == (rows, 1) and weight.shape[1] == inputs for weight in weights)
            and (not kind or weights[0].shape == weights[1].shape)
            and len({bias is None for bias in biases}) == 1
            and all(bias is None or bias.is_contiguous() for bias in biases)
            and self._takes(x, *weights, *biases)
        )
        if not fits:
            return super().linears(x, weights, biases, kind)
        return self._one_row.linear(x, weights, biases, kind)  # type: ignore[no-any-return]

    def attends(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
        return (
            q.shape[-1] == v.shape[-1] <= self._one_row.MAX_ELEMENTS
            and k.numel() > 0
            and all(tensor.stride(-1) == 1 for tensor in (q, k, v))
            and self._takes(q, k, v, bias)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
        if not self.attends(q, k, v, bias):
            return super().attend(q, k, v, mask, bias, scale)
        return self._one_row.attend(q, k, v, mask, bias, scale)  # type: ignore[no-any-return]

    def depthwise(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, kind: str) -> Tensor:
        size, channels = weight.shape[2], x.shape[1]
        fits = (
            x.is_contiguous(memory_format=torch.channels_last)
            and bias.is_contiguous()
            and weight.shape == (channels, 1, size, size)
            and size <= self._images.MAX_WINDOW
            # So the result has at most the elements of the images.
            and 2 * padding < size <= min(x.shape[2:]) + 2 * padding
            and weight.permute(2, 3, 1, 0).is_contiguous()
            and x.numel() < 2**31 - 2**16
            and self._takes(x, weight, bias)
        )
        if not fits:
            return super().depthwise(x, weight, bias, stride, padding, kind)
        return self._images.depthwise(x, weight, bias, stride, padding, kind)  # type: ignore[no-any-return]

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is None or not self._ends_products(x, weight, bias):
            return super().linear_gelu(x, weight, bias)
        return self._activated(x, weight, bias, use_gelu=True)

    def _ends_products(self, *tensors: Tensor) -> bool:
        """True if cuBLAS computes biases and activations at the end of products of these tensors."""
        half = tensors[0].is_cuda and tensors[0].dtype is not torch.float32
        return half and hasattr(torch, "_addmm_activation") and self._takes(*tensors)

    def _activated(self, x: Tensor, weight: Tensor, bias: Tensor, *, use_gelu: bool) -> Tensor:
        """Return the ReLU of a linear layer, or its GELU, approximated by tanh."""
        flat = torch._addmm_activation(bias, x.reshape(-1, x.shape[-1]), weight.t(), use_gelu=use_gelu)
        return flat.view(*x.shape[:-1], -1)

    def excite(self, means: Tensor, narrow: tuple[Tensor, Tensor], wide: tuple[Tensor, Tensor], kind: str) -> Tensor:
        given = (means, *narrow, *wide)
        fits = (
            all(tensor.is_contiguous() for tensor in given)
            and len(narrow[1]) <= self._images.MAX_SQUEEZED
            and kind in ("relu", "silu")
            and self._takes(*given)
        )
        if not fits:
            return super().excite(means, narrow, wide, kind)
        return self._images.excite(means, narrow, wide, kind)  # type: ignore[no-any-return]

    def gated(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        if gate.shape != up.shape or not self._takes(gate, up):
            return super().gated(gate, up, kind)
        return self._rows.gated(gate, up, kind)  # type: ignore[no-any-return]

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        if not self._takes(q, k, cos, sin):
            return super().rotate(q, k, cos, sin)
        return self._cache.rotate(q, k, cos, sin)  # type: ignore[no-any-return]

    def rotate_and_write(self, qkv: Tensor, cached: RotaryWrite) -> None:
        head_dim, others = qkv.shape[-1], (*cached.pages, *(cached.norms or ()))
        alike = qkv.stride()[1:] == (head_dim, 1) and all(part.dtype is qkv.dtype for part in others)
        if head_dim & (head_dim - 1) or not alike or not self._takes(qkv):
            super().rotate_and_write(qkv, cached)
        else:
            self._cache.rotate_and_write(qkv, cached)

    def write_pages(self, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor], slots: Tensor, layout: str) -> None:
        if not self._takes(k, v):
            super().write_pages(k, v, pages, slots, layout)
        else:
            size = pages[0].shape[1 if layout == "NHD" else 2]
            self._cache.write_pages(k, v, *pages, slots, size, layout)
