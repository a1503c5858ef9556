"""`wrap_parts` on a real GPU: parts of a model that reads values back are replayed, and answers stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.gpu.modules import mlp


class Chooser(nn.Module):
    """Returns the rows that its scores choose."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(*(mlp() for _ in range(4)))
        self.heads = nn.ModuleList(nn.Sequential(mlp(), mlp(), mlp()) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = [head(self.backbone(x)) for head in self.heads]
        return scores[0][scores[1].sum(1) > 0], x[(scores[0].argmax(1) % len(x)).tolist()]


@pytest.mark.proofs
def test_parts_are_replayed_and_answers_stay() -> None:
    model = Chooser().cuda().eval()
    batches = [torch.randn(size, 64, device="cuda") for size in (6, 3, 6, 3, 3, 3, 3, 6, 6)]
    with torch.inference_mode():
        expected = [model(x) for x in batches]
        with sg.wrap_parts(model, batches[0]) as graphs:
            assert list(graphs.parts) == ["backbone", "heads.0", "heads.1"], graphs.report()
            for x, wanted in zip(batches, expected, strict=True):
                torch.testing.assert_close(model(x), wanted)
            assert all(part.graph_stats.replays >= 8 for part in graphs.parts.values()), graphs.report()
    assert type(model.backbone) is nn.Sequential
