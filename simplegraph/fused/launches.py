"""Launches of Triton's kernels, each of which may begin while the one before it still runs.

Imported only if Triton is installed. Where a GPU has programmatic dependent launches, a kernel is launched before what
it reads is there, and waits for that itself: the GPU has no pause between the two. Beside that, what several compute.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

_HOPPER = (9, 0)
_CAPTURES = 12_040  # drivers from this version of CUDA on capture such launches
_PLAIN: Mapping[str, bool] = MappingProxyType({"EARLY": False})
_EARLY: Mapping[str, bool] = MappingProxyType({"EARLY": True, "launch_pdl": True})


@triton.jit  # type: ignore[untyped-decorator]
def await_others(EARLY: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for all that was launched before, then let the next kernel be launched; a kernel calls this first."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def times_active(up, gate, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Multiply numbers by the activation of a gate, all in float32."""
    if KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z, without the difference that cancels.
        z = gate
        if KIND == "gelu_tanh":
            z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        active = gate / (1.0 + tl.exp(-z))
    return active * up


@contextlib.contextmanager
def launching(tensor: Tensor) -> Iterator[Mapping[str, bool]]:
    """Make a tensor's device the current one, where Triton launches, and yield keyword arguments for the launch.

    A kernel passes `EARLY` on to `await_others`; the others are Triton's own.
    """
    with torch.cuda.device_of(tensor):  # type: ignore[no-untyped-call]
        yield _EARLY if _can_begin_early(tensor.device) else _PLAIN


@functools.cache
def _can_begin_early(device: torch.device) -> bool:
    interpreted = not isinstance(await_others, triton.JITFunction)
    if device.type != "cuda" or interpreted or torch.cuda.get_device_capability(device) < _HOPPER:
        return False
    return hasattr(getattr(tl.extra, "cuda", None), "gdc_wait") and _driver_version() >= _CAPTURES


def _driver_version() -> int:
    version = ctypes.c_int()
    with contextlib.suppress(OSError):  # not on Linux, or not NVIDIA's
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return version.value
