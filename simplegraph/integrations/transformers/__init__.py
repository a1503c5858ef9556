"""Holds CUDA graphs for models of transformers, `graph_generation` and `graph_encoder`; no model is written here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplegraph.integrations.transformers.encode.encoding import GraphedEncoder, graph_encoder
    from simplegraph.integrations.transformers.generate.generation import GraphedGeneration, graph_generation

__all__ = ["GraphedEncoder", "GraphedGeneration", "graph_encoder", "graph_generation"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "encode.encoding" if name in ("GraphedEncoder", "graph_encoder") else "generate.generation"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
