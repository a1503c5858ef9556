"""Backends of attention for tests of a GPU; those whose library is not installed are skipped."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import pytest
import torch

from simplegraph.attention import FlashAttentionBackend, FlashInferBackend
from simplegraph.attention.backends.flash_attention import kernels_of
from simplegraph.attention.backends.flash_kernels import MODULES

SHAPE: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
ERROR = 4e-3  # bfloat16 rounding, relative to the largest output


def _has_flash(version: int) -> bool:
    """True if a build is installed that has a version, and reads the pages of the tests."""
    found = [kernels_of(name, version) for name in MODULES]
    return any(SHAPE["page_size"] % each[1].page_multiple == 0 for each in found if not isinstance(each, str))


HAS_FA2, HAS_FA3 = map(_has_flash, (2, 3))
needs_fa2 = pytest.mark.skipif(not (HAS_FA2 and torch.cuda.is_available()), reason="needs FlashAttention-2")
needs_fa3 = pytest.mark.skipif(not (HAS_FA3 and torch.cuda.is_available()), reason="needs FlashAttention-3")
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer")

# On Hopper the driver compiles version 2 for minutes at its first call, by head size and dtype: few
# tests have it, and all in the shape below.
FA2 = [pytest.param(functools.partial(FlashAttentionBackend, version=2), marks=needs_fa2, id="FA2")]
FA3 = [pytest.param(functools.partial(FlashAttentionBackend, version=3), marks=needs_fa3, id="FA3")]
OTHERS = [pytest.param(FlashInferBackend, marks=needs_flashinfer, id="FlashInfer")]
ATTENTION = [  # of the engine, by name
    pytest.param("fa3", marks=needs_fa3),
    pytest.param("flashinfer", marks=needs_flashinfer),
    "triton",
]
