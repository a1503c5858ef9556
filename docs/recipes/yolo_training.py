"""A training step of YOLO (ultralytics): the network's forward and backward are replays, its losses stay eager."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from ultralytics.cfg import get_cfg
from ultralytics.nn.tasks import DetectionModel

import simplegraph as sg


# Recipe
class GraphDetector:
    """Answers what a `DetectionModel` answers to a batch in training: loss and its items."""

    def __init__(self, model: DetectionModel) -> None:
        self.model, self.graphed = model, sg.wrap(model, training=True)

    def __call__(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.model.loss(batch, self.graphed(batch["img"]))


# Comparison
def batch_of(seed: int, device: str) -> dict[str, Tensor]:
    """Make a batch of four images and ten boxes; ultralytics sorts boxes by their image."""
    generator = torch.Generator().manual_seed(seed)
    boxes = {"batch_idx": torch.arange(10) * 4 // 10, "cls": torch.randint(4, (10, 1), generator=generator)}
    boxes["bboxes"] = 0.25 + torch.rand(10, 4, generator=generator) / 2
    images = torch.rand(4, 3, 64, 64, generator=generator)
    return {"img": images.to(device), **{name: value.float().to(device) for name, value in boxes.items()}}


def train(model: DetectionModel, call: Callable[[dict[str, Tensor]], tuple[Tensor, Tensor]], device: str) -> None:
    """Train for a few steps, as ultralytics' trainer does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    for seed in range(6):
        loss, _ = call(batch_of(seed, device))
        loss.sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> dict[str, Callable[[], object]]:
    """Compare what was trained, and return a forward and backward of each model, to be timed."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = DetectionModel("yolo11n.yaml", nc=4, verbose=False).to(device).train()
    plain.args = get_cfg()
    model = copy.deepcopy(plain)
    graphed = GraphDetector(model)
    train(plain, plain, device)
    train(model, graphed, device)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-2, atol=1e-3)
    print(graphed.graphed.graph_report())
    assert graphed.graphed.graph_stats.replays >= 6
    batch = batch_of(0, device)
    return {
        kind: lambda call=call: call(batch)[0].sum().backward()
        for kind, call in (("plain", plain), ("graphs", graphed))
    }


if __name__ == "__main__":
    main()
