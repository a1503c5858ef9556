"""Imports what the workloads need, as far as it is installed, for all processes that are forked after it."""

from __future__ import annotations

import contextlib
import importlib
import os

# Asked at import whether there is a GPU, torch would otherwise start CUDA, which no forked process can use then.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

for _name in (
    "bench.training.one_run",
    "timm",
    "torchvision",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
):
    # Not installed, or built for another torch: the workload that needs it says so.
    with contextlib.suppress(Exception):
        importlib.import_module(_name)
