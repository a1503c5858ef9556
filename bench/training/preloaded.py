"""Imports what the workloads need, as far as it is installed, for all processes that are forked after it."""

from bench.tools import fresh

fresh.import_installed(
    "bench.training.training_steps",
    "simplegraph.training.step",
    "simplegraph.training.runner",
    "timm",
    "torchvision",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)
