"""CUDA graphs for models of transformers: `graph_generation` for `generate`, `graph_encoder` for encoders."""

from simplegraph.integrations.transformers.encoding import GraphedEncoder, graph_encoder
from simplegraph.integrations.transformers.generation import GraphedGeneration, graph_generation

__all__ = ["GraphedEncoder", "GraphedGeneration", "graph_encoder", "graph_generation"]
