"""Stand-ins for Triton's kernels and for a GPU, by torch on a CPU."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor

from simplegraph.fused.torch_operators import ACTIVATIONS, Operators, RotaryWrite

# Sizes of a trial of each operator that has a kernel.
TRIALS = {
    "rms_norm": (64, 1),
    "add_rms_norm": (64,),
    "add_layer_norm": (64,),
    "group_norm": (16, 4),
    "activated_group_norm": (16, 4),
    "adapt": (64, "gate", "residual", "scale", "shift"),
    "finish": ("silu", 1),
    "depthwise": (3,),
    "excite": (32, 8, "relu"),
    "linears": (100, 1),
    "attend": (2, 16, 1, 300),
    "gated": (64, "gelu_tanh"),
    "rotate": (64,),
    "rotate_and_write": (4, 2, 16, 8, 1),
    "write_pages": (64, "HND"),
}


def stand_in_kernels(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    """Make `kernels` stand in for Triton's kernels, on any device: an object with the functions that are called."""
    from simplegraph import fused
    from simplegraph.fused import choice, triton_operators

    for name in ("row_kernels", "cache_kernels", "image_kernels", "one_row_kernels"):
        monkeypatch.setitem(sys.modules, f"simplegraph.fused.{name}", kernels)
        monkeypatch.setattr(fused, name, kernels, raising=False)
    monkeypatch.setattr(triton_operators, "_INTERPRETED", True)
    monkeypatch.setattr(choice, "_has_launcher", lambda: True)
    for function in (choice._triton, choice._problem):
        plain = getattr(function, "__wrapped__", function)  # without what is known of the real ones
        monkeypatch.setattr(choice, function.__name__, plain)


class Kernels(Operators):
    """The functions of the kernels' modules, by torch's operators; most are called as these are."""

    MAX_COLUMNS = MAX_SIZE = MAX_SQUEEZED = MAX_WINDOW = MAX_ELEMENTS = 64
    MAX_TOGETHER = 3
    linear = Operators.linears

    def norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        offset: float = 0.0,
        centered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        total = x if residual is None else x + residual
        if centered:
            return F.layer_norm(total, weight.shape, weight, bias, eps), total
        return F.rms_norm(total.float(), weight.shape, weight.float() + offset, eps).type_as(x), total

    def gated(self, gate: Tensor, up: Tensor, kind: str) -> Tensor:
        return (ACTIVATIONS[kind](gate.float()) * up).to(gate.dtype)

    def rotate_and_write(self, qkv: Tensor, cached: RotaryWrite) -> None:
        Operators().rotate_and_write(qkv, cached)

    def write_pages(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *rest: Any) -> None:
        Operators().write_pages(k, v, (keys, values), slots, rest[-1])


class Device:
    """A GPU, as far as the question goes; see `move_to_devices`."""

    type = "cuda"

    def __str__(self) -> str:
        return "cuda:7"


def move_to_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `Tensor.to` a `Device` a copy on the CPU."""
    to = Tensor.to
    monkeypatch.setattr(Tensor, "to", lambda x, *args: x.clone() if isinstance(args[0], Device) else to(x, *args))
