"""An engine that owns its buffers and its loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from simplegraph import BatchDescriptor, CudaGraphManager, CudaGraphMode

SIZES = [1, 2, 4, 8]
WIDTH = 6


class Engine:
    """Buffers of the largest size, a model that reads their first rows, and a note of every eager run."""

    def __init__(self, device: torch.device, **settings: Any) -> None:
        settings.setdefault("capture_sizes", SIZES)
        self.device = device
        self.manager = CudaGraphManager(device=device, progress=False, **settings)
        self.model = nn.Linear(WIDTH, WIDTH).to(device).eval()
        self.x = torch.zeros(64, WIDTH, device=device)
        self.runs: list[tuple[CudaGraphMode, BatchDescriptor, bool]] = []

    def forward(self, mode: CudaGraphMode, descriptor: BatchDescriptor) -> Tensor:
        self.runs.append((mode, descriptor, self.manager.device.is_capturing()))
        return self.model(self.x[: descriptor.num_tokens]) * 2

    def step(self, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """One step, checked: the answer is right and padding rows of the last step do not matter."""
        batch = self.manager.dispatch(num_tokens, *args, **kwargs)
        rows = torch.randn(num_tokens, WIDTH, device=self.device)
        self.x.fill_(float("nan"))
        self.x[:num_tokens] = rows
        output = self.manager.run(batch, self.forward)
        assert output.shape[0] == batch.descriptor.num_tokens
        torch.testing.assert_close(output[:num_tokens], self.model(rows) * 2)
        return batch

    @property
    def eager_runs(self) -> int:
        return sum(not capturing for _, _, capturing in self.runs)
