"""Sets up the thread in which torch runs a device's backwards, before a capture has one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from simplegraph.device.protocol import GraphDevice


class _InBackward(torch.autograd.Function):
    """Calls a function from the thread that runs the backwards of a device."""

    @staticmethod
    def forward(ctx: Any, function: Any, scratch: Tensor) -> Tensor:
        ctx.function = function
        return scratch.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        ctx.function()
        return None, grads[0]


def set_up_backwards(device: GraphDevice) -> None:
    """Let cuBLAS have its workspaces for the thread that will run the backward on the capture stream."""
    with device.on_capture_stream(), torch.enable_grad():
        scratch = torch.zeros(1, device=device.torch_device, requires_grad=True)
        run: Any = _InBackward.apply  # typed loosely because torch leaves it untyped
        torch.autograd.grad(run(device.keep_workspaces, scratch), scratch)
