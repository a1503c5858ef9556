"""Select the `GraphDevice` that serves a torch device."""

from __future__ import annotations

import torch

from simplegraph.base.errors import ConfigError
from simplegraph.device.cuda.device import cuda_device
from simplegraph.device.emulator.device import emulator
from simplegraph.device.protocol import GraphDevice


def graph_device(device: torch.device | str | GraphDevice) -> GraphDevice:
    """Return the `GraphDevice` for a torch device: CUDA graphs on a GPU, the emulator on the CPU.

    Raises:
        ConfigError: the device is of another type, or not available.
    """
    if not isinstance(device, (str, torch.device)):
        return device
    device = torch.device(device)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device is 'cuda', but this machine or this torch has none; 'cpu' runs on the emulator.")
        return cuda_device(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "cpu":
        return emulator()
    raise ConfigError(f"device is {str(device)!r}; expected 'cuda' or 'cpu' (which is emulated).")
