"""Backends of attention for tests of a GPU; those whose library is not installed are skipped."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from simplegraph.attention import FlashAttentionBackend, FlashInferBackend
from simplegraph.attention.backends.flash_attention import MODULES, problem_of

HAS_FA3 = any(problem_of(name) is None for name in MODULES)
needs_fa3 = pytest.mark.skipif(not (HAS_FA3 and torch.cuda.is_available()), reason="needs FlashAttention-3")
needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer")

FA3 = [pytest.param(FlashAttentionBackend, marks=needs_fa3, id="FA3")]
OTHERS = [pytest.param(FlashInferBackend, marks=needs_flashinfer, id="FlashInfer")]
ATTENTION = [  # of the engine, by name
    pytest.param("fa3", marks=needs_fa3),
    pytest.param("flashinfer", marks=needs_flashinfer),
    "triton",
]
SHAPE: dict[str, Any] = {"num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
ERROR = 4e-3  # bfloat16 rounding, relative to the largest output
