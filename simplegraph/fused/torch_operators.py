"""The fused operators by torch: the reference for the kernels, and their substitute where they cannot run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of the kernels
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}
)
# After a convolution; "" is none.
FINISHES: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {"": lambda x: x, "relu": torch.relu, "silu": F.silu}
)
_PART, _MAX_ROWS = 128, 48  # words of a part, and rows from which on `argmax` is faster than parts
PRODUCT_FINISHES = ("", "relu")  # of these, what cuBLAS computes at the end of a product


def sample_numbers(dtype: torch.dtype, *shape: int, phase: float = 0.0) -> Tensor:
    """Make numbers between -1 and 1. They are not random: the user's generators must not advance."""
    count = torch.Size(shape).numel()
    places = torch.arange(count, dtype=torch.float32, device="cpu")  # the default dtype may have too few digits
    return torch.cos(1.7 * places + 0.3 + phase).to(dtype).view(shape)


class KernelTrial(NamedTuple):
    """A kernel in the shape that a model has: the trial compiles the variant that the model will run.

    Attributes:
        operator: name of a method of `Operators`.
        sizes: see the functions of `simplegraph.fused.choice`.
    """

    operator: str
    sizes: tuple[int | str, ...]


class Grouped(NamedTuple):
    """A group norm of images, the tensors added before it, and its activation; None for nothing.

    Attributes:
        groups: of channels.
        eps: added to the variance.
        weight: (channels,); bias: as `weight`; both or neither.
        row: (channels,), added to the input, which is (images, channels, height, width).
        added: (images, channels), added to the input, too.
        kind: a name in `FINISHES`.
    """

    groups: int
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    row: Tensor | None = None
    added: Tensor | None = None
    kind: str = ""


class Adapted(NamedTuple):
    """A layer norm whose scale and shift depend on the image, and the tensors added before it; None for nothing.

    Attributes:
        eps: added to the variance.
        weight: (columns,); bias: as `weight`.
        row: (columns,), added to the input, which is (images, tokens, columns).
        gate: (images, columns), multiplies the input; residual: as the input, added to it then.
        scale: (images, columns), to which one is added; shift: as `scale`; both or neither.
    """

    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    row: Tensor | None = None
    gate: Tensor | None = None
    residual: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None


class RotaryWrite(NamedTuple):
    """A rotary embedding of tokens, and where their keys and values go in the cache.

    Attributes:
        positions: (T,) int64.
        table: (max_model_len, head_dim) float32: the cosines of a position, then its sines.
        pages: keys and values, (num_pages + 1, page_size, num_kv_heads, head_dim); the last page is scratch.
        slots: (T,) int64, page * page_size + offset; -1 for none.
        num_heads: heads of the queries.
        norms: weights of the RMS norms of queries and keys, (head_dim,); None for no norm.
        eps: of the norms.
    """

    positions: Tensor
    table: Tensor
    pages: tuple[Tensor, Tensor]
    slots: Tensor
    num_heads: int
    norms: tuple[Tensor, Tensor] | None = None
    eps: float = 0.0


class Operators:
    """Torch's operators. Norms are (..., columns) to the same; weights and biases (columns,).

    Attributes:
        name: of the library that runs them; triton: True for Triton's kernels.
    """

    name = "torch"
    triton = False

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        """Normalize by the root of the mean of squares; `offset` is added to the weights."""
        if not offset:
            return F.rms_norm(x, weight.shape, weight, eps)
        # In half precision the sum of the offset and a small weight would lose the weight.
        return F.rms_norm(x.float(), weight.shape, weight.float() + offset, eps).type_as(x)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return the RMS norm of ``x + residual``, and that sum."""
        total = x + residual
        return self.rms_norm(total, weight, eps, offset), total

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Return the layer norm of ``x + residual``, and that sum."""
        total = x + residual
        return F.layer_norm(total, weight.shape, weight, bias, eps), total

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 1) -> Tensor:
        """Return the RMS norm of ``x * silu(gate)``, by so many groups of columns; in float32 up to the weight."""
        product = (x.float() * F.silu(gate.float())).view(*x.shape[:-1], groups, x.shape[-1] // groups)
        normed = product * torch.rsqrt(product.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.view(x.shape).to(x.dtype)

    def group_norm(self, x: Tensor, norm: Grouped) -> Tensor:
        """Return the activation of the group norm of ``x + row + added``; see `Grouped`.

        Args:
            x: (images, channels, height, width).
            norm: the norm, its sum and its activation.
        """
        x = x if norm.row is None else x + norm.row.view(-1, 1, 1)
        x = x if norm.added is None else x + norm.added[:, :, None, None]
        return FINISHES[norm.kind](F.group_norm(x, norm.groups, norm.weight, norm.bias, norm.eps))

    def adapt(self, x: Tensor, norm: Adapted) -> tuple[Tensor, Tensor]:
        """Return the layer norm of ``residual + gate * (x + row)``, scaled and shifted; see `Adapted`.

        Args:
            x: (images, tokens, columns).
            norm: the norm and its sum.

        Returns:
            The norm, and the sum; `x` in its place without a residual.
        """
        total = x if norm.row is None else x + norm.row
        total = total if norm.gate is None else norm.gate.unsqueeze(1) * total
        total = total if norm.residual is None else norm.residual + total
        normed = F.layer_norm(total, x.shape[-1:], norm.weight, norm.bias, norm.eps)
        if norm.scale is not None and norm.shift is not None:
            normed = normed * (1 + norm.scale.unsqueeze(1)) + norm.shift.unsqueeze(1)
        return normed, x if norm.residual is None else total

    def finish(
        self, x: Tensor, bias: Tensor | None, residual: Tensor | None, kind: str, factor: Tensor | None = None
    ) -> Tensor:
        """Return ``activation(factor * x + bias + residual)`` of images.

        Args:
            x: (images, channels, height, width); may be overwritten.
            bias: (channels,); None for nothing.
            residual: as `x`; None for nothing.
            kind: a name in `FINISHES`.
            factor: (channels,), float32 or wider, and so is `bias` then; None for one.
        """
        dtype = x.dtype
        x = x if factor is None else x * factor.view(-1, 1, 1)  # wider, and so is the sum
        x = x if bias is None else x + bias.view(-1, 1, 1)
        return FINISHES[kind](x if residual is None else x + residual).to(dtype)

    def pointwise(self, x: Tensor, weight: Tensor, bias: Tensor | None, kind: str) -> Tensor:
        """Return the activation of a 1x1 convolution.

        Args:
            x: (images, inputs, height, width).
            weight: (outputs, inputs, 1, 1).
            bias: (outputs,); None for nothing.
            kind: a name in `PRODUCT_FINISHES`.
        """
        return self.finish(F.conv2d(x, weight), bias, None, kind)

    def linears(
        self, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], kind: str = ""
    ) -> list[Tensor]:
        """Return the outputs of linear layers of one input; for a gate and the layer that it multiplies also `gated`.

        Args:
            x: (..., inputs).
            weights: (outputs, inputs) of each layer.
            biases: (outputs,) of each; None for nothing.
            kind: of the gate's activation, if there are two layers, and the first is a gate; "" for none.
        """
        results = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return [*results, self.gated(results[0], results[1], kind)] if kind else results

    def attends(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
        """True if `attend` has a kernel for these, which copies no keys and values."""
        return False

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, bias: Tensor | None, scale: float) -> Tensor:
        """Attend with one query per row.

        Args:
            q: (rows, heads, 1, elements).
            k: (rows, kv_heads, keys, elements); `heads` is a multiple of `kv_heads`.
            v: as `k`.
            mask: (rows or 1, 1, 1, keys) bool, True for keys that are seen; None for all.
            bias: (rows or 1, heads or 1, 1, keys), added to the scores; None for nothing.
            scale: of the scores.

        Returns:
            (rows, 1, heads, elements).
        """
        group = q.shape[1] // k.shape[1]
        keys, values = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
        if bias is not None and mask is not None:
            mask = bias.masked_fill(mask.logical_not(), float("-inf"))
        seen = bias if mask is None else mask
        return F.scaled_dot_product_attention(q, keys, values, seen, scale=scale).transpose(1, 2)

    def depthwise(self, x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: int, kind: str) -> Tensor:
        """Return the activation of a depthwise convolution.

        Args:
            x: (images, channels, height, width).
            weight: (channels, 1, size, size).
            bias: (channels,).
            stride: between the windows of neighbouring pixels.
            padding: zeros on each side.
            kind: a name in `FINISHES`.
        """
        return self.finish(F.conv2d(x, weight, None, stride, padding, 1, len(weight)), bias, None, kind)

    def linear_gelu(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the GELU, approximated by tanh, of a linear layer.

        Args:
            x: (..., inputs).
            weight: (outputs, inputs).
            bias: (outputs,); None for nothing.
        """
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    def excite(self, means: Tensor, narrow: tuple[Tensor, Tensor], wide: tuple[Tensor, Tensor], kind: str) -> Tensor:
        """Return ``sigmoid(wide(activation(narrow(means))))``.

        Args:
            means: (images, channels).
            narrow: weight and bias of a linear layer, (squeezed, channels) and (squeezed,).
            wide: those of a layer back, (channels, squeezed) and (channels,).
            kind: a name in `FINISHES`.
        """
        return torch.sigmoid(F.linear(FINISHES[kind](F.linear(means, *narrow)), *wide))

    def gated(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        """Return ``activation(gate) * up``; `kind` is a name in `ACTIVATIONS`."""
        return ACTIVATIONS[kind](gate) * up

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Embed queries and keys at once.

        Args:
            q: (rows, heads, tokens, elements).
            k: as `q`, with any number of heads.
            cos: (rows or 1, tokens, elements), the dtype of `q`.
            sin: as `cos`.
        """
        both = torch.cat((q, k), dim=1)
        low, high = both.chunk(2, dim=-1)
        turned = both * cos.unsqueeze(1) + torch.cat((-high, low), dim=-1) * sin.unsqueeze(1)
        return turned[:, : q.shape[1]], turned[:, q.shape[1] :]

    def rotate_and_write(self, qkv: Tensor, cached: RotaryWrite) -> None:
        """Norm and rotate queries in place; norm and rotate keys, and write them and the values to their pages.

        Args:
            qkv: (T, num_heads + 2 * num_kv_heads, head_dim); keys are rotated in place, too, or left as they are.
            cached: how, and where to.
        """
        num_heads, norms = cached.num_heads, cached.norms
        rotated = (qkv.shape[1] + num_heads) // 2
        cos, sin = cached.table.index_select(0, cached.positions).unsqueeze(1).chunk(2, dim=-1)
        for index, part in enumerate((qkv[:, :num_heads], qkv[:, num_heads:rotated])):
            heads = part if norms is None else F.rms_norm(part, norms[index].shape, norms[index], cached.eps)
            low, high = heads.float().chunk(2, dim=-1)
            part.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))
        self.write_pages(qkv[:, num_heads:rotated], qkv[:, rotated:], cached.pages, cached.slots, "NHD")

    def write_pages(self, k: Tensor, v: Tensor, pages: tuple[Tensor, Tensor], slots: Tensor, layout: str) -> None:
        """Write tokens to their slots.

        Args:
            k: (T, num_kv_heads, head_dim).
            v: as `k`.
            pages: keys and values of one layer, with equal strides; the last page is scratch.
            slots: (T,) int64, page * page_size + offset; rows with -1 are skipped.
            layout: "NHD", a page is (page_size, num_kv_heads, head_dim); "HND", (num_kv_heads, page_size, head_dim).
        """
        for kept, part in zip(pages, (k, v), strict=True):
            by_token = kept if layout == "NHD" else kept.transpose(1, 2)
            size = by_token.shape[1]
            place = torch.where(slots < 0, len(by_token) * size - 1, slots)
            by_token.index_put_((place // size, place % size), part)


def most_likely(scores: Tensor) -> Tensor:
    """Return the index of each row's largest score, as ``scores.argmax(-1)`` does.

    For 128,256 words on an H100 `argmax` takes 27 us for 1 row and 39 us for 64: one block of threads reads a row.
    Blocks that read a part each take 11 us and 44 us.

    Args:
        scores: (rows, words).

    Returns:
        (rows,) int64.
    """
    if scores.shape[-1] % _PART or not 0 < len(scores) <= _MAX_ROWS:
        return scores.argmax(dim=-1)
    values, places = scores.reshape(len(scores), -1, _PART).max(dim=-1)
    part = values.argmax(dim=-1, keepdim=True)
    return torch.add(places.gather(-1, part), part, alpha=_PART).squeeze(-1)
