"""Checks if Triton's kernels can run in tests: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from simplegraph.fused.operators import DTYPES

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter cuts numbers to bfloat16 off, where GPUs round them.
EXACT_DTYPES = [dtype for dtype in DTYPES if not (INTERPRETED and dtype is torch.bfloat16)]


def has_triton() -> bool:
    """True if Triton is there and has something to run on."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() or INTERPRETED


needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


def stand_in_kernels(monkeypatch: pytest.MonkeyPatch, kernels: Any) -> None:
    """Make `kernels` stand in for Triton's kernels, on any device: an object with the functions that are called."""
    from simplegraph import fused
    from simplegraph.fused import choice, triton_operators

    names = "row_kernels", "cache_kernels", "group_kernels", "image_kernels", "adaptive_kernels", "one_row_kernels"
    for name in names:
        monkeypatch.setitem(sys.modules, f"simplegraph.fused.{name}", kernels)
        monkeypatch.setattr(fused, name, kernels, raising=False)
    monkeypatch.setattr(triton_operators, "_INTERPRETED", True)
    monkeypatch.setattr(choice, "_has_launcher", lambda: True)
    for function in (choice._triton, choice._problem):
        plain = getattr(function, "__wrapped__", function)  # without what is known of the real ones
        monkeypatch.setattr(choice, function.__name__, plain)
