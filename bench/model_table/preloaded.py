"""Imports what most rows need, as far as it is installed, for all processes that are forked after it."""

from bench.tools import fresh

fresh.import_installed(
    "bench.model_table.row",
    "bench.model_table.builders.sequences",
    "simplegraph.integrations.transformers.generate.generation",
    "simplegraph.integrations.transformers.encode.encoding",
    "timm",
)
