"""Imports what the rows need, as far as it is installed, for all processes that are forked after it."""

from bench.tools import fresh

fresh.import_installed(
    "bench.optimized.rows",
    "simplegraph.fused.optimizing.optimize",
    "torchvision",
    "transformers.models.bert.modeling_bert",
    "diffusers",
)
