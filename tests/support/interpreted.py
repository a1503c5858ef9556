"""Checks if Triton's kernels can run in tests: on a GPU, or interpreted on a CPU."""

from __future__ import annotations

import os
from typing import Any

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
    return INTERPRETED or (torch.cuda.is_available() and os.environ.get("TESTS_DEVICE") != "cpu")


def keep_conditions() -> None:
    """Let the interpreter's scalar conditions stay conditions: Triton 3.9 spreads them over a block as integers.

    Its masked loads and stores refuse such a mask.
    """
    from triton.runtime.interpreter import InterpreterBuilder

    spread = InterpreterBuilder.create_splat

    def create_splat(self: Any, to: Any, value: Any) -> Any:
        found = spread(self, to, value)
        found.data = found.data.astype(value.data.dtype)
        return found

    InterpreterBuilder.create_splat = create_splat


if INTERPRETED and has_triton():
    keep_conditions()
needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton, and a GPU or TRITON_INTERPRET=1")
# Kernels that other tests run on a GPU as part of a whole: these alone are for the interpreter.
needs_interpreter = pytest.mark.skipif(
    not (INTERPRETED and has_triton()), reason="needs Triton and TRITON_INTERPRET=1, as .ci/run has them"
)
