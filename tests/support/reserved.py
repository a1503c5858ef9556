"""How much memory a device's allocator has taken."""

from __future__ import annotations

import torch

from simplegraph.device.protocol import GraphDevice


def reserved(device: GraphDevice) -> int:
    """Return bytes to compare with what it returned before; on the emulator what is free, as a negative number."""
    return -device.free_memory() if device.emulated else torch.cuda.memory_reserved(device.torch_device)
