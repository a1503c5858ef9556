"""A training loop whose steps (forward, backward, clipping, optimizer) are one graph each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 4)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
teacher = nn.Linear(16, 4).to(device)


@sg.train_step(optimizers=optimizer)
def step(x: Tensor, y: Tensor) -> Tensor:
    """Train on one batch, and return its loss."""
    optimizer.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss


def main() -> None:
    """Train on batches of one shape; the last, smaller one of an epoch gets a graph of its own."""
    losses = []
    for _ in range(4):
        for rows in (32, 32, 32, 32, 20):
            x = torch.randn(rows, 16, device=device)
            losses.append(step(x, teacher(x).argmax(1)))  # stays on the GPU: nothing waits for it
    first, last = torch.stack(losses[:5]).mean(), torch.stack(losses[-5:]).mean()
    print(f"loss {first:.3f} -> {last:.3f}", step.graph_report(), sep="\n")
    assert last < first
    assert step.graph_stats.replays >= 10


if __name__ == "__main__":
    main()
