"""Backends of paged attention, one file for each library or kernel; their base class is in `attention.backend`."""

from __future__ import annotations

from simplegraph.attention.backend import AttentionBackend
from simplegraph.attention.backends.flash_attention import FlashAttention2Backend, FlashAttentionBackend
from simplegraph.attention.backends.flashinfer import FlashInferBackend
from simplegraph.attention.backends.sdpa import SDPABackend
from simplegraph.attention.backends.triton_decode import TritonDecodeBackend

BACKENDS: tuple[type[AttentionBackend], ...] = (
    FlashAttentionBackend,
    FlashAttention2Backend,
    FlashInferBackend,
    TritonDecodeBackend,
    SDPABackend,
)
TritonDecodeBackend.fallbacks = (FlashAttentionBackend, FlashInferBackend, SDPABackend)
