"""Checks if Triton's kernels can run in tests: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import os

import pytest
import torch

from simplegraph.fused.torch_operators import DTYPES

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
