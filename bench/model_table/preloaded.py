"""Imports what most rows need, as far as it is installed, for all processes that are forked after it."""

from __future__ import annotations

import contextlib
import importlib
import os

# Asked at import whether there is a GPU, torch would otherwise start CUDA, which no forked process can use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

for _name in (
    "bench.model_table.row",
    "bench.model_table.builders.sequences",
    "simplegraph.integrations.transformers.generate.generation",
    "simplegraph.integrations.transformers.encode.encoding",
    "timm",
):
    # Not installed, or built for another torch: the rows that need it say so.
    with contextlib.suppress(ImportError, RuntimeError, OSError):
        importlib.import_module(_name)
