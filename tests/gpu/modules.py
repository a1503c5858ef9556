"""Wrapped modules on a real GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg

SIZES = [1, 2, 4, 8]


def mlp(width: int = 64, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    layers = [nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width)]
    return nn.Sequential(*layers).to("cuda", dtype).eval()


def captured(module: nn.Module, example: Tensor, **settings: Any) -> Any:
    settings.setdefault("capture_sizes", SIZES)
    model = sg.wrap(module, progress=False, **settings)
    summary = model.capture_graphs(example)
    assert summary.failed == {}
    return model


def poison(model: Any) -> None:
    """Make whatever the last replay wrote unusable, so that only a replay can bring the right numbers."""
    for program in model.graph_manager.programs.values():
        for leaf in program.outputs:
            if isinstance(leaf, Tensor):
                leaf.fill_(float("nan") if leaf.is_floating_point() else -1)
