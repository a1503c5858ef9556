"""Kernels that torch does not dispatch, as ones of Triton, CuPy or an extension are; here on the emulator."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor

from simplegraph.base.modes import outside_modes
from simplegraph.device.emulator.arena import RecordedCall
from simplegraph.device.emulator.device import emulator


def launch(kernel: Callable[..., Any], *tensors: Tensor) -> None:
    """Run a kernel on tensors, which it may write to; no operator mode sees it, and a capture only records it."""
    recording = emulator()._thread.recording
    if recording is not None:
        views = tuple(recording.view(kernel, tensor) for tensor in tensors)
        recording.calls.append(RecordedCall(kernel, views, {}, ()))
        return
    with outside_modes():
        kernel(*tensors)


class JITFunction:
    """Stands in for Triton's class of that name: its kernels take no values but tensors.

    Attributes:
        module: where the kernel is written.
    """

    def __init__(self, kernel: Callable[..., Any], module: str = "__main__") -> None:
        self.kernel, self.module = kernel, module

    def run(self, *args: Any, grid: Any = None, **kwargs: Any) -> None:
        launch(self.kernel, *(arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)))


def stand_in_triton(monkeypatch: pytest.MonkeyPatch) -> type[JITFunction]:
    """Make `JITFunction` stand where Triton's class is when it is loaded; return the class for kernels of one test."""
    kind: Any = type("JITFunction", (JITFunction,), {"run": JITFunction.run})
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", ModuleType("triton.runtime.jit"))
    monkeypatch.setattr(sys.modules["triton.runtime.jit"], "JITFunction", kind, raising=False)
    return kind  # type: ignore[no-any-return]
