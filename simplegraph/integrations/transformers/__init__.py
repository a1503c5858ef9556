"""CUDA graphs for models of transformers: `graph_generation` for `generate`."""

from simplegraph.integrations.transformers.generation import GraphedGeneration, graph_generation

__all__ = ["GraphedGeneration", "graph_generation"]
