"""A flush on a GPU gives device memory back, and adapters switched by Python never meet another one's graph."""

from __future__ import annotations

import gc

import torch
from torch import nn

import simplegraph as sg


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@torch.inference_mode()
def test_traffic_that_moves_from_resolution_to_resolution_keeps_its_memory_bounded(device):
    module = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 3, 3, padding=1)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], max_signatures=2, on_too_many_signatures="flush")
    kept = []
    for _ in range(4):
        for resolution in (128, 160, 192, 224, 256, 288):
            for _ in range(3):
                x = torch.randn(4, 3, resolution, resolution, device=device)
                torch.testing.assert_close(model(x), module(x), rtol=1e-2, atol=1e-3)
            del x
        kept.append(reserved())
    assert model.graph_stats.captures == 24
    assert model.graph_stats.flushes == 11
    assert max(kept[1:]) <= kept[0] + (4 << 20)
    model.reset_graphs()
    assert reserved() < kept[0]


@torch.inference_mode()
def test_python_state_named_by_a_key(device):
    class Gated(nn.Linear):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model = sg.wrap(Gated(64, 64).to(device).eval(), capture_sizes=[8], state_key=lambda module: module.scale)
    x = torch.randn(8, 64, device=device)
    for scale in (1.0, 2.0, 3.0) * 4:
        model.scale = scale
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-2, atol=1e-3)
    assert model.graph_stats.captures == 3
    assert model.graph_stats.replays == 9
