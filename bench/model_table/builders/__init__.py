"""Builders of the table's models by name: tiny shapes, which tests share, and real ones."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bench.model_table.builders.model import TableModel
    from bench.model_table.entries import TableEntry

# The tiny models of the tests are those of the table.
_TINY = str(Path(__file__).parents[3] / "tests" / "support")
if _TINY not in sys.path:
    sys.path.append(_TINY)

# By category; what one of them needs is imported for its own entries alone.
_HOMES = {
    "transformers": ("decoders", "sequences", "encoders", "vision"),
    "torch": ("torch_modules",),
    "timm": ("images",),
    "torchvision": ("images",),
    "diffusers": ("diffusion",),
    "audio": ("audio",),
    "peft": ("adapted",),
    "sentence-transformers": ("adapted",),
}


def find(entry: TableEntry) -> TableModel:
    """Return what builds an entry's model.

    Raises:
        KeyError: no home has a builder of that name.
    """
    for home in _HOMES[entry.category]:
        models: dict[str, TableModel] = importlib.import_module(f"bench.model_table.builders.{home}").MODELS
        if entry.builder in models:
            return models[entry.builder]
    raise KeyError(f"none of {', '.join(_HOMES[entry.category])} builds {entry.builder}")
