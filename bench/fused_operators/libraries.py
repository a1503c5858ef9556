"""The operators of each library as calls on the same tensors, in the shapes of an 8B Llama and of BERT."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from simplegraph.fused.choice import operators_for
from simplegraph.fused.torch_operators import Grouped, KernelTrial, Operators, RotaryWrite

Call = Callable[[], Any]
PAGE_SIZE, PAGES = 16, 64


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Sizes of a model.

    Attributes:
        hidden, inner, heads, kv_heads, head_dim: of a Llama; layer_norm: columns of a layer norm; channels: of images,
            in 32 groups, of which a row is one of 16 x 16 pixels.
    """

    hidden: int = 4096
    inner: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    layer_norm: int = 768
    channels: int = 320

    def trials(self) -> dict[str, KernelTrial]:
        """Return the trials that compile the variants of this model, by the names in `inputs`."""
        heads = (self.heads, self.kv_heads, self.head_dim, PAGE_SIZE, 0)
        return {
            "add_rms_norm": KernelTrial("add_rms_norm", (self.hidden,)),
            "add_layer_norm": KernelTrial("add_layer_norm", (self.layer_norm,)),
            "silu_and_mul": KernelTrial("gated", (self.inner, "silu")),
            "gelu_and_mul": KernelTrial("gated", (self.inner, "gelu_tanh")),
            "rotate_and_write": KernelTrial("rotate_and_write", heads),
            "group_norm": KernelTrial("group_norm", (self.channels, 32)),
        }


TINY = Shapes(64, 96, 4, 2, 16, 32, 64)
Inputs = Mapping[str, Any]


def inputs(shapes: Shapes, rows: int, device: torch.device, dtype: torch.dtype) -> dict[str, Inputs]:
    """Make the tensors of every operator for a number of rows."""
    torch.manual_seed(0)
    draw = functools.partial(torch.randn, device=device, dtype=dtype)
    hidden, columns = shapes.hidden, shapes.layer_norm
    norm = {"x": draw(rows, hidden), "residual": draw(rows, hidden), "weight": draw(hidden)}
    layer = {"x": draw(rows, columns), "residual": draw(rows, columns), "weight": draw(columns), "bias": draw(columns)}
    both = {"both": draw(rows, 2 * shapes.inner)}
    angles = torch.arange(512, device=device)[:, None] / 10 ** torch.linspace(0, 4, shapes.head_dim // 2, device=device)
    heads = {
        "qkv": draw(rows, shapes.heads + 2 * shapes.kv_heads, shapes.head_dim),
        "positions": torch.arange(rows, device=device) % 512,
        "table": torch.cat((angles.cos(), angles.sin()), dim=-1).float(),
        "pages": tuple(
            torch.zeros(PAGES + 1, PAGE_SIZE, shapes.kv_heads, shapes.head_dim, device=device, dtype=dtype)
            for _ in range(2)
        ),
        "slots": torch.randperm(PAGES * PAGE_SIZE, device=device)[:rows],
        "num_heads": shapes.heads,
    }
    images = {
        "x": draw(rows, shapes.channels, 16, 16).contiguous(memory_format=torch.channels_last),
        "groups": 32,
        "weight": draw(shapes.channels),
        "bias": draw(shapes.channels),
    }
    return {
        "add_rms_norm": norm,
        "add_layer_norm": layer,
        "silu_and_mul": both,
        "gelu_and_mul": both,
        "rotate_and_write": heads,
        "group_norm": images,
    }


def ours(operators: Operators, name: str, given: Inputs) -> Call:
    """Return an operator of the library's room as a call."""
    if name == "add_rms_norm":
        return lambda: operators.add_rms_norm(**given, eps=1e-5)
    if name == "add_layer_norm":
        return lambda: operators.add_layer_norm(**given, eps=1e-5)
    if name == "rotate_and_write":
        cached = RotaryWrite(**{name: value for name, value in given.items() if name != "qkv"})
        return lambda: operators.rotate_and_write(given["qkv"], cached)
    if name == "group_norm":
        norm = Grouped(given["groups"], 1e-5, given["weight"], given["bias"])
        return lambda: operators.group_norm(given["x"], norm)
    gate, up = given["both"].chunk(2, dim=-1)
    return lambda: operators.gated(gate, up, "silu" if name == "silu_and_mul" else "gelu_tanh")


def simplegraph(name: str, given: Inputs, shapes: Shapes) -> Call:
    """Return Triton's kernel of this library, after its trial."""
    tensor = next(value for value in given.values() if isinstance(value, Tensor))
    operators = operators_for(tensor.device, tensor.dtype, [shapes.trials()[name]])
    if not operators.triton:
        raise RuntimeError("Triton's kernels do not run here")
    return ours(operators, name, given)


def by_torch(name: str, given: Inputs, shapes: Shapes) -> Call:
    """Return torch's operators."""
    return ours(Operators(), name, given)


def flashinfer_add_rms_norm(given: Inputs, shapes: Shapes) -> Call:
    """Return FlashInfer's sum and norm, which work in place."""
    library = importlib.import_module("flashinfer")
    x, residual = given["x"].clone(), given["residual"].clone()
    return lambda: library.fused_add_rmsnorm(x, residual, given["weight"], 1e-5)


def flashinfer_gated(function: str, given: Inputs, shapes: Shapes) -> Call:
    """Return the gated activation of FlashInfer that has this name."""
    gated = getattr(importlib.import_module("flashinfer"), function)
    return lambda: gated(given["both"])


def flashinfer_rotate_and_write(given: Inputs, shapes: Shapes) -> Call:
    """Return FlashInfer's rotary embedding, which works in place; torch writes the cache."""
    library = importlib.import_module("flashinfer")
    heads, kv_heads, size = shapes.heads, shapes.kv_heads, shapes.head_dim
    flat = given["qkv"].flatten(1)
    q, k, v = flat.split((heads * size, kv_heads * size, kv_heads * size), dim=-1)
    keys, values = (kept.flatten(0, 1).flatten(1) for kept in given["pages"])

    def run() -> None:
        library.rope.apply_rope_with_cos_sin_cache_inplace(given["positions"], q, k, size, given["table"], is_neox=True)
        keys.index_copy_(0, given["slots"], k)
        values.index_copy_(0, given["slots"], v)

    return run


OPERATORS = tuple(Shapes().trials())
# Returns an operator of a library as a call on these inputs.
Maker = Callable[[Inputs, Shapes], Call]
# The operators that each library has, by the names in `inputs`.
LIBRARIES: Mapping[str, Mapping[str, Maker]] = {
    "simplegraph": {name: functools.partial(simplegraph, name) for name in OPERATORS},
    "torch": {name: functools.partial(by_torch, name) for name in OPERATORS},
    "flashinfer": {
        "add_rms_norm": flashinfer_add_rms_norm,
        "silu_and_mul": functools.partial(flashinfer_gated, "silu_and_mul"),
        "gelu_and_mul": functools.partial(flashinfer_gated, "gelu_tanh_and_mul"),
        "rotate_and_write": flashinfer_rotate_and_write,
    },
}
