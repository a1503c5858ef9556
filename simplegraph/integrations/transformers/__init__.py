"""CUDA graphs for models of transformers: `graph_generation` and `graph_encoder`. Defines no models."""

from __future__ import annotations

from simplegraph._lazy import public_names

__all__, __getattr__ = public_names(__name__, __file__)
