"""A pairwise cover of training: tiny models, optimizers, precisions, and what people do around a step.

Every two values of two factors are in some cell, except that `GradScaler` scales for fused optimizers only: the others
read on the host whether a step overflowed. Optimizers that are `capturable` share two places, in which they take turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg

CLASSES, WORDS, WIDTH, LENGTH, ROWS = 4, 24, 8, 6, 4
STEPS_OF_SCHEDULE = 60  # of the cosine, past whose end the learning rate rises again


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination."""

    model: str
    optimizer: str
    precision: str
    clip: bool
    accumulation: bool
    schedule: bool
    dropout: bool
    batch_norm: bool

    def __str__(self) -> str:
        flags = [name for name in FLAGS if getattr(self, name)]
        return "-".join([self.model, self.optimizer, self.precision, *flags])


# Models. All end in a classification or a regression; `norm` is batch norm or one that knows no batch.


class Norm(nn.Module):
    """Normalizes the second dimension, as batch norm or as layer norm."""

    def __init__(self, channels: int, batch: bool) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(channels) if batch else nn.GroupNorm(1, channels)

    def forward(self, x: Tensor) -> Tensor:
        flat: Tensor = self.inner(x.flatten(2) if x.dim() > 2 else x)
        return flat.view(x.shape)


class Sequence(nn.Module):
    """A recurrent layer over embedded words; its last output is classified, or regressed."""

    def __init__(self, kind: type[nn.RNNBase], outputs: int, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = kind(WIDTH, WIDTH, batch_first=True)
        self.norm = Norm(WIDTH, batch_norm)
        self.head = nn.Linear(WIDTH, outputs)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        last = self.layer(F.dropout(self.words(ids), self.dropout))[0][:, -1]
        out: Tensor = self.head(self.norm(last))
        return out


class Encoder(nn.Module):
    """An encoder layer of torch over embedded words."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout, batch_first=True)
        self.norm = Norm(WIDTH, batch_norm)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.layer(self.words(ids)).mean(1)))
        return out


class Bags(nn.Module):
    """Bags of words, classified among the words by the same weights."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="sum")
        self.norm = Norm(WIDTH, batch_norm)
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.dropout(self.norm(self.words(ids)), self.dropout)
        return F.linear(hidden, self.words.weight)


class GroupedVision(nn.Module):
    """Patches, a grouped convolution over them, attention between them."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.mix = nn.Conv2d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.norm = Norm(WIDTH, batch_norm)
        self.qkv, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, CLASSES)
        self.dropout = dropout

    def forward(self, images: Tensor) -> Tensor:
        grid = self.patches(images)
        tokens = self.norm(grid + self.mix(grid)).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).view(len(images), -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.head(F.dropout(tokens + mixed, self.dropout).mean(1))
        return out


class SmallGPT(nn.Module):
    """Two causal blocks; the head has the weights of the embedding."""

    def __init__(self, dropout: float, batch_norm: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.zeros(LENGTH, WIDTH))
        self.norms = nn.ModuleList(Norm(WIDTH, batch_norm) for _ in range(2))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
        self.dropout = dropout

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids) + self.places
        for norm, qkv, up, down in zip(self.norms, self.qkv, self.up, self.down, strict=True):
            normed = norm(hidden.transpose(1, 2)).transpose(1, 2)
            q, k, v = qkv(normed).view(len(ids), LENGTH, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
            hidden = hidden + mixed.transpose(1, 2).flatten(2)
            hidden = hidden + F.dropout(down(F.gelu(up(hidden))), self.dropout)
        return F.linear(hidden, self.words.weight)


def _mlp(dropout: float, batch_norm: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH),
        Norm(2 * WIDTH, batch_norm),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(2 * WIDTH, CLASSES),
    )


def _conv(dropout: float, batch_norm: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, stride=2, padding=1),
        Norm(WIDTH, batch_norm),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Conv2d(WIDTH, WIDTH, 3, stride=2, padding=1),
        nn.Flatten(),
        nn.Linear(WIDTH * 4, CLASSES),
    )


def _numbers() -> Tensor:
    return torch.randn(ROWS, WIDTH)


def _images() -> Tensor:
    return torch.randn(ROWS, 3, 8, 8)


def _ids() -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH))


def _labels() -> Tensor:
    return torch.randint(0, CLASSES, (ROWS,))


def _next_word(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


Loss = Callable[[Tensor, Tensor], Tensor]
# Name -> what makes it, called with the dropout and whether it has batch norm; an input; a target; the loss.
MODELS: dict[str, tuple[Callable[[float, bool], nn.Module], Callable[[], Tensor], Callable[[], Tensor], Loss]] = {
    "mlp": (_mlp, _numbers, _labels, F.cross_entropy),
    "conv": (_conv, _images, _labels, F.cross_entropy),
    "lstm": (functools.partial(Sequence, nn.LSTM, CLASSES), _ids, _labels, F.cross_entropy),
    "encoder": (Encoder, _ids, _labels, F.cross_entropy),
    "bags": (Bags, _ids, lambda: torch.randint(0, WORDS, (ROWS,)), F.cross_entropy),
    "gru": (functools.partial(Sequence, nn.GRU, 1), _ids, lambda: torch.randn(ROWS, 1), F.mse_loss),
    "grouped": (GroupedVision, _images, _labels, F.cross_entropy),
    "gpt": (SmallGPT, _ids, _ids, _next_word),
}

FUSED = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.05},
}
CAPTURABLE: dict[str, dict[str, Any]] = {
    "RMSprop": {"lr": 0.003, "momentum": 0.5, "centered": True},
    "NAdam": {"lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.01},
    "RAdam": {"lr": 0.01},
    "Adadelta": {"lr": 0.5, "weight_decay": 1e-3},
    "Adamax": {"lr": 0.01},
    "ASGD": {"lr": 0.05},
    "Rprop": {"lr": 0.01},
}
_PLACES = [*FUSED, ("RMSprop", "NAdam", "RAdam"), ("Adadelta", "Adamax", "ASGD", "Rprop")]
PRECISIONS = ("fp32", "bf16", "fp16")
FLAGS = ("clip", "accumulation", "schedule", "dropout", "batch_norm")


def combinations(chosen: tuple[Any, ...], size: int) -> set[tuple[Any, ...]]:
    """Return what is chosen together, for so many factors at a time: each factor's index and value."""
    return set(itertools.combinations(enumerate(chosen), size))


def cover() -> list[Cell]:
    """Choose the cells: every model with every place, each with what brings the most new pairs, then triples."""
    flags = list(itertools.product((False, True), repeat=len(FLAGS)))
    pairs: set[tuple[Any, ...]] = set()
    triples: set[tuple[Any, ...]] = set()

    def new(option: tuple[Any, ...]) -> tuple[int, int]:
        return len(combinations(option, 2) - pairs), len(combinations(option, 3) - triples)

    cells, turns = [], {place: itertools.cycle(place) for place in _PLACES if isinstance(place, tuple)}
    for (row, model), (column, place) in itertools.product(enumerate(MODELS), enumerate(_PLACES)):
        possible = PRECISIONS if place in FUSED else PRECISIONS[:2]
        precision = possible[(row + column) % len(possible)]
        best = max(((model, place, precision, *rest) for rest in flags), key=new)
        pairs |= combinations(best, 2)
        triples |= combinations(best, 3)
        cell = Cell(model, next(turns[place]) if place in turns else str(place), *best[2:])
        # It takes its learning rate as a number, so that every step of a schedule would need a graph of its own.
        cells.append(dataclasses.replace(cell, schedule=False) if cell.optimizer == "Rprop" else cell)
    return cells


CELLS = cover()


# Training.


class Training:
    """A cell's model, optimizer, scaler and schedule, from equal seeds."""

    def __init__(self, cell: Cell, device: torch.device, *, ordinary: bool = False) -> None:
        torch.manual_seed(0)
        build, _, _, self._loss = MODELS[cell.model]
        self.cell, self.device = cell, device
        self.model = build(0.2 if cell.dropout else 0.0, cell.batch_norm).to(device).train()
        settings = dict(FUSED.get(cell.optimizer) or CAPTURABLE[cell.optimizer])
        if not ordinary:
            if cell.optimizer in FUSED:
                settings["fused"] = True
            if cell.optimizer != "SGD" and (device.type == "cuda" or cell.optimizer in CAPTURABLE):
                settings["capturable"] = True
            if cell.optimizer in CAPTURABLE:  # one at a time they read their learning rate on the host
                settings["foreach"] = True
        self.optimizer: torch.optim.Optimizer = getattr(torch.optim, cell.optimizer)(
            self.model.parameters(), **settings
        )
        self.scaler = None
        if cell.precision == "fp16":
            # It grows so often that some later steps overflow and are skipped. Not the first one: fused SGD would
            # leave its momentum as it was allocated.
            self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=2)
        self.schedule = None
        if cell.schedule:
            self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS_OF_SCHEDULE)

    def step(self, x: Tensor, y: Tensor, first: bool = True, last: bool = True) -> Tensor:
        """Do a step, or a part of one whose gradients are accumulated."""
        if first:
            self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self._loss(self.model(x), y)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if last:
            if self.cell.clip:
                if self.scaler is not None:
                    self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), 0.3)
            if self.scaler is None:
                self.optimizer.step()
            else:
                self.scaler.step(self.optimizer)
                self.scaler.update()
        return loss.detach()

    def graphed(self) -> Any:
        """Return the step of `simplegraph.train_step`."""
        return sg.train_step(self.step, optimizers=self.optimizer, scaler=self.scaler, modules=[self.model])

    def _autocast(self) -> Any:
        if self.cell.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16 if self.cell.precision == "bf16" else torch.float16)

    def train(self, step: Callable[..., Tensor], calls: int) -> list[Tensor]:
        """Call the step with fresh batches; return the losses."""
        losses = []
        for call, (x, y) in enumerate(self._batches(calls)):
            accumulated = ()
            if self.cell.accumulation:
                accumulated = (call % 2 == 0, call % 2 == 1)
            losses.append(step(x, y, *accumulated).clone())
            if self.schedule is not None and (not accumulated or accumulated[1]):
                self.schedule.step()
        return losses

    def _batches(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        # Drawn before the training, so that dropout alone draws during it.
        _, draw_input, draw_target, _ = MODELS[self.cell.model]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            batches = [(draw_input().to(self.device), draw_target().to(self.device)) for _ in range(count)]
        torch.manual_seed(2)
        return iter(batches)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that training changes, gradients included, by name."""
        found = dict(self.model.state_dict())
        found |= {f"{name}.grad": p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        for index, values in self.optimizer.state_dict()["state"].items():
            found |= {f"state {index} {name}": v for name, v in values.items() if isinstance(v, Tensor)}
        if self.scaler is not None:
            found["scale"] = torch.tensor(self.scaler.get_scale())
        return {name: value.detach().clone() for name, value in found.items()}


def with_device_lr(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Let its steps take the learning rate from a tensor, as in a graph; between steps groups keep their numbers."""
    kept: list[Any] = []
    kind = torch.float64 if device.type == "cpu" else torch.float32  # kernels on a GPU read 32 bits

    def before(*_: Any) -> None:
        kept[:] = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=kind, device=device)

    def after(*_: Any) -> None:
        for group, value in zip(optimizer.param_groups, kept, strict=True):
            group["lr"] = value

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)


def same_bits(one: Tensor, other: Tensor) -> bool:
    """True if two tensors are equal, where both have no number, too: the gradients of a step that overflowed."""
    return (
        one.dtype == other.dtype
        and torch.equal(one.isnan(), other.isnan())
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def unequal(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """List the names whose tensors are not equal to the bit, or that only one has."""
    return [
        name
        for name in {**one, **other}
        if name not in one or name not in other or not same_bits(one[name], other[name])
    ]


def assert_equal_to_eager(cell: Cell, device: torch.device, calls: int) -> None:
    """Train a cell eagerly, as the library's graphs do, and through its graphs: every loss and tensor is equal."""
    with deterministic():
        eager = Training(cell, device)
        with_device_lr(eager.optimizer, device)
        expected = eager.train(eager.step, calls)
        ours = Training(cell, device)
        step = ours.graphed()
        losses = ours.train(step, calls)
        assert [index for index, pair in enumerate(zip(losses, expected, strict=True)) if not same_bits(*pair)] == []
        assert unequal(ours.state(), eager.state()) == []
        # Two shapes of steps where gradients are accumulated, each with a few eager steps first.
        assert step.graph_stats.replays >= calls - 16, step.graph_report()


def assert_pairs_equal_to_eager(cell: Cell, device: torch.device, calls: int) -> None:
    """Do the same where forward and backward alone are graphs, and all else is as it was."""
    with deterministic():
        eager = Training(cell, device)
        expected = eager.train(eager.step, calls)
        ours = Training(cell, device)
        wrapped = ours.model = sg.wrap(ours.model, training=True, progress=False)
        losses = ours.train(ours.step, calls)
        assert [index for index, pair in enumerate(zip(losses, expected, strict=True)) if not same_bits(*pair)] == []
        assert unequal(ours.state(), eager.state()) == []
        assert wrapped.graph_stats.replays >= calls - 8, wrapped.graph_report()


def distance_to_ordinary(cell: Cell, device: torch.device, calls: int) -> float:
    """Return how far weights are from those of the optimizer as users make it, relative to how far they came."""
    with deterministic():
        ordinary = Training(cell, device, ordinary=True)
        start = [weight.detach().clone() for weight in ordinary.model.parameters()]
        ordinary.train(ordinary.step, calls)
        ours = Training(cell, device)
        ours.train(ours.graphed(), calls)
    weights = list(zip(ordinary.model.parameters(), ours.model.parameters(), start, strict=True))
    apart = sum(float((theirs - mine).detach().double().square().sum()) for theirs, mine, _ in weights)
    moved = sum(float((theirs - begin).detach().double().square().sum()) for theirs, _, begin in weights)
    return (apart / moved) ** 0.5


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Let torch use deterministic algorithms alone."""
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


@contextlib.contextmanager
def capturable_on_cpu() -> Iterator[None]:
    """Let optimizers be `capturable` on a CPU, where torch refuses it: their steps are the same operators there."""
    names = ("adadelta", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop")
    with contextlib.ExitStack() as stack:
        for module in (importlib.import_module(f"torch.optim.{name}") for name in names):
            patch = mock.patch.object(module, "_get_capturable_supported_devices", return_value=["cpu", "cuda"])
            stack.enter_context(patch)
        yield
