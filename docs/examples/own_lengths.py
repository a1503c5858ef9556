"""A module of your own at any batch size and length: padded to what is captured, and cut back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import simplegraph as sg

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


class Frames(nn.Module):
    """Scores each frame of a recording: samples (rows, 1, samples) to scores (rows, frames, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.frames, self.scores = nn.Conv1d(1, 16, kernel_size=10, stride=5), nn.Linear(16, 4)

    def forward(self, samples: Tensor) -> Tensor:
        """Look at ten samples for each frame, and move on by five."""
        return self.scores(self.frames(samples).relu().transpose(1, 2))


def main() -> None:
    """Serve recordings of many lengths by graphs of three, and compare with the module."""
    module = Frames().to(device).eval()
    # By the argument's name in `forward`, the dimension that is a length; and the lengths to capture.
    model = sg.wrap(module, capture_sizes=[1, 2, 4], length_dims={"samples": 2}, lengths=[400, 800, 1600])
    with torch.inference_mode():
        print(model.capture_graphs(torch.randn(2, 1, 500, device=device)))
        for _ in range(5):
            for rows, length in ((1, 250), (2, 390), (3, 777), (4, 800), (1, 1203)):
                samples = torch.randn(rows, 1, length, device=device)
                torch.testing.assert_close(model(samples), module(samples), rtol=1e-2, atol=1e-3)
    print(model.graph_report())
    assert model.graph_stats.captures == 9
    assert model.graph_stats.replays > 10


if __name__ == "__main__":
    main()
