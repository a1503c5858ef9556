"""Kernels that torch does not dispatch, as ones of Triton, CuPy or an extension are; here on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from simplegraph.graph.emulator import emulator
from simplegraph.graph.emulator.memory import RecordedCall
from simplegraph.graph.modes import outside_modes


def launch(kernel: Callable[..., Any], *tensors: Tensor) -> None:
    """Run a kernel on tensors, which it may write to; no operator mode sees it, and a capture only records it."""
    recording = emulator()._thread.recording
    if recording is not None:
        views = tuple(recording._view(kernel, tensor) for tensor in tensors)
        recording._calls.append(RecordedCall(kernel, views, {}, ()))
        return
    with outside_modes():
        kernel(*tensors)
