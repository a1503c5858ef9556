"""A callback of Lightning: forward and backward of one module are replays while `fit` runs."""

from __future__ import annotations

from collections.abc import Callable

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import simplegraph as sg


# Recipe
class GraphCallback(lightning.Callback):
    """Gives the module in an attribute of the `LightningModule` graphs, for training and validation."""

    def __init__(self, attribute: str) -> None:
        self.attribute = attribute

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        self.plain = getattr(pl_module, self.attribute)  # on its device by now
        self.graphed = sg.wrap(self.plain, training=True)
        setattr(pl_module, self.attribute, self.graphed)

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        setattr(pl_module, self.attribute, self.plain)


# Comparison
class Classifier(lightning.LightningModule):
    """A model with random weights."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.1), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def fitted(*callbacks: lightning.Callback) -> Classifier:
    """Fit from the same seed."""
    torch.manual_seed(0)
    classifier, data = Classifier(), TensorDataset(torch.randn(168, 16), torch.randint(4, (168,)))
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(max_epochs=4, devices=1, gradient_clip_val=1.0, callbacks=list(callbacks), **quiet)
    trainer.fit(classifier, DataLoader(data, 32, shuffle=True), DataLoader(data, 32))
    return classifier


def main() -> dict[str, Callable[[], object]]:
    """Compare what was fitted, and return a forward and backward of each model, to be timed."""
    callback = GraphCallback("model")
    plain, graphed = fitted(), fitted(callback)
    torch.testing.assert_close(graphed.state_dict(), plain.state_dict())
    assert type(graphed.model) is nn.Sequential, "the callback leaves the model as it was"
    print(callback.graphed.graph_report())
    assert callback.graphed.graph_stats.replays > 50
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(32, 16, device=device)
    models = {"plain": plain.model.to(device), "graphs": sg.wrap(graphed.model.to(device), training=True)}
    return {kind: lambda model=model: model(x).sum().backward() for kind, model in models.items()}


if __name__ == "__main__":
    main()
