"""Small models of many kinds, and training loops that run them with and without graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import simplegraph as sg

ROWS, WIDTH = 4, 8


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 3))


class Images(nn.Module):
    """Convolutions and BatchNorm, whose statistics are state of the module."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2)]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.view(-1, 1, 4, 2).repeat(1, 1, 1, 2)).flatten(1))


class Recurrent(nn.Module):
    """An LSTM, which holds its weights in a list beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(2, 6, num_layers=2, dropout=0.1, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.view(-1, 4, 2))[0][:, -1])


class Attention(nn.Module):
    """One layer of a transformer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.view(-1, 2, 4)).mean(1))


class Words(nn.Module):
    """An embedding whose weight is the last layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, WIDTH)
        self.out = nn.Linear(WIDTH, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embedding((x.abs() * 3).long() % 11).mean(1))[:, :3].clone()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "images": Images,
    "recurrent": Recurrent,
    "attention": Attention,
    "words": Words,
}


def batches(count: int, device: torch.device, rows: int = ROWS) -> list[tuple[Tensor, Tensor]]:
    """Make batches of inputs and classes, the same each time."""
    generator = torch.Generator().manual_seed(count)
    pairs = [(torch.randn(rows, WIDTH, generator=generator), torch.randint(3, (rows,), generator=generator))]
    for _ in range(count - 1):
        pairs.append((torch.randn(rows, WIDTH, generator=generator), torch.randint(3, (rows,), generator=generator)))
    return [(x.to(device), y.to(device)) for x, y in pairs]


def made(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Make a model with the same weights each time, and let what it draws be the same, too."""
    torch.manual_seed(3)
    model = make().to(device)
    torch.manual_seed(5)
    return model


def twins(make: Callable[[], nn.Module], device: torch.device, **settings: Any) -> tuple[nn.Module, Any]:
    """Make a plain model, and a wrapped one of equal weights."""
    return made(make, device), sg.wrap(made(make, device), training=True, **settings)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Train on each batch once; return the losses."""
    torch.manual_seed(7)
    losses = []
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def state(model: nn.Module) -> dict[str, Tensor]:
    """Copy a model's weights and buffers."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(actual: Tensor, expected: Tensor) -> bool:
    """True if all bits are equal; on a GPU, whose kernels for another layout round otherwise, nearly."""
    rounding = {"rtol": 1e-5, "atol": 1e-5} if actual.is_cuda else {"rtol": 0.0, "atol": 0.0}
    return torch.allclose(actual, expected, **rounding, equal_nan=True)


def assert_same(actual: nn.Module, expected: nn.Module) -> None:
    """Compare weights, buffers and gradients to the bit, on a GPU nearly."""
    ours, theirs = state(actual), state(expected)
    different = [name for name in theirs if not same(ours[name], theirs[name])]
    assert different == []
    pairs = zip(actual.named_parameters(), expected.parameters(), strict=True)
    for (name, parameter), other in pairs:
        assert (parameter.grad is None) == (other.grad is None), name
        assert parameter.grad is None or same(parameter.grad, other.grad), name


def square_step(model: nn.Module, optimizer: Any, graphs: str = "") -> tuple[Any, Any]:
    """Return a step on the mean square of outputs, and what counts its replays.

    Args:
        model: is trained.
        optimizer: of it.
        graphs: "steps" for whole steps, "pairs" for forward and backward graphs, "" for none.
    """
    called: Any = sg.wrap(model, training=True, exact_shapes=True, progress=False) if graphs == "pairs" else model

    def step_fn(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = called(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step: Any = sg.train_step(step_fn, optimizers=optimizer, modules=[model]) if graphs == "steps" else step_fn
    return step, called if graphs == "pairs" else step
