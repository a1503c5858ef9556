"""Holds CUDA graphs for models of transformers, `graph_generation` and `graph_encoder`; no model is written here."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simplegraph.integrations.transformers.encode.encoding import GraphedEncoder as GraphedEncoder
    from simplegraph.integrations.transformers.encode.encoding import graph_encoder as graph_encoder
    from simplegraph.integrations.transformers.generate.generation import GraphedGeneration as GraphedGeneration
    from simplegraph.integrations.transformers.generate.generation import graph_generation as graph_generation

_HOMES = {
    "GraphedEncoder": "encode.encoding",
    "GraphedGeneration": "generate.generation",
    "graph_encoder": "encode.encoding",
    "graph_generation": "generate.generation",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
