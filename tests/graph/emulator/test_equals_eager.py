"""Replay equals eager, bit for bit."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce

from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import GRAD_MODES, assert_same, capture, device


class Stateful(nn.Module):
    """Writes to its own memory in every way a decoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(8, 6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        slots = (x[:, 0].argsort() + self.count) % 8
        self.cache.index_copy_(0, slots, x)
        self.cache[slots] = self.cache[slots] * 2
        self.cache.scatter_add_(0, slots[:, None].expand(-1, 6), x)
        self.cache[0] = self.count
        self.count += 1
        torch._foreach_add_([self.cache[1], self.cache[2]], 1.0)
        torch._foreach_copy_([self.cache[3]], [x[0]])
        return self.cache.clone(), x + self.count


class Function(nn.Module):
    def __init__(self, function: Callable[..., Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(*self.parts, x)


def _sequence(x: Tensor) -> Tensor:
    return x.view(2, 2, 6)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.3), nn.LayerNorm(6)),
    "batch_norm": lambda: nn.BatchNorm1d(6),
    "state": Stateful,
    "lstm": lambda: Function(lambda m, x: m(_sequence(x)), nn.LSTM(6, 5, 2, dropout=0.2)),
    "gru": lambda: Function(lambda m, x: m(_sequence(x)), nn.GRU(6, 5)),
    "attention": lambda: Function(
        lambda m, x: m(_sequence(x), _sequence(x), _sequence(x)), nn.MultiheadAttention(6, 2)
    ),
    "encoder": lambda: Function(lambda m, x: m(_sequence(x)), nn.TransformerEncoderLayer(6, 2, 8)),
    "sdpa": lambda: Function(lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True)),
    "conv": lambda: Function(
        lambda m, x: m(x.view(1, 1, 4, 6)),
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Upsample(scale_factor=2)),
    ),
    "embedding": lambda: Function(lambda m, x: m(x.abs().long()), nn.Embedding(9, 4, padding_idx=0)),
    "several_outputs": lambda: Function(lambda x: [x.topk(2), x.sort(-1), x.max(0), x.unbind(1), x.split(4, 1), None]),
    "overlapping": lambda: Function(lambda x: [x[:1].expand(4, 6), x.as_strided((3, 3), (1, 1)), x.t() @ x]),
    "random": lambda: Function(lambda x: [torch.rand_like(x), torch.randperm(5), x.softmax(1).multinomial(2)]),
    "complex": lambda: Function(lambda x: [torch.fft.rfft(x).conj() * 2, torch.fft.rfft(x).conj().imag]),
    "out": lambda: Function(lambda x: [torch.add(x, x, out=torch.empty(0)), torch.mul(x, 2, out=torch.empty_like(x))]),
    "autocast": lambda: Function(lambda m, x: torch.autocast("cpu", torch.bfloat16)(m)(x), nn.Linear(6, 6)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "vmap": lambda: Function(lambda x: torch.vmap(lambda row: row.cumsum(0) * 2)(x)),
}


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("name", MODELS)
def test_replay_equals_eager(pool: GraphPool, name: str, grad_mode: Any) -> None:
    model = MODELS[name]()
    eager, x = copy.deepcopy(model), torch.randn(4, 6)
    with grad_mode(), device.on_capture_stream():
        device.begin(pool)
        output = model(x)
        segment = device.end()
        for seed in range(3):
            x.copy_(torch.randn(4, 6))
            torch.manual_seed(seed)
            segment.replay()
            torch.manual_seed(seed)
            assert_same(output, eager(x))
    if eager.state_dict():
        assert_same(model.state_dict(), eager.state_dict())


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_collectives_are_recorded_like_other_operators(pool: GraphPool) -> None:
    x, gathered = torch.ones(3), [torch.zeros(3)]

    def forward() -> Tensor:
        dist.all_gather(gathered, x * 2)
        return all_reduce(gathered[0], "sum", dist.group.WORLD) + 1

    segment, output = capture(pool, forward)
    assert gathered[0].tolist() == [0, 0, 0]
    x.fill_(4)
    segment.replay()
    assert gathered[0].tolist() == [8, 8, 8]
    assert output.tolist() == [9, 9, 9]


Step = Callable[[list[Tensor]], None]


def _random_step(choose: random.Random) -> Step:
    """One operator on a list of (4, 4) tensors, the first four of which come from outside."""
    a, b = choose.randrange(100), choose.randrange(100)
    row = choose.randrange(3)

    def pick(values: list[Tensor], place: int) -> Tensor:
        return values[place % len(values)]

    def out_of_place(values: list[Tensor]) -> None:
        values.append(torch.tanh(pick(values, a) @ pick(values, b)) + 0.5)

    def view(values: list[Tensor]) -> None:
        values.append(pick(values, a).t() if a % 2 else pick(values, a).unfold(0, 4, 1)[0])

    def in_place(values: list[Tensor]) -> None:
        pick(values, a).mul_(0.5).add_(pick(values, b).clone())

    def write_rows(values: list[Tensor]) -> None:
        pick(values, a)[row : row + 2] = pick(values, b)[row : row + 2].clone() * 0.3

    def scatter(values: list[Tensor]) -> None:
        pick(values, a).scatter_(1, pick(values, b).argsort(1), pick(values, b).clone())

    def random_numbers(values: list[Tensor]) -> None:
        values.append(F.dropout(pick(values, a), 0.4) + torch.rand_like(pick(values, b)))

    def several(values: list[Tensor]) -> None:
        values.extend(pick(values, a).sort(1)[:1])
        values.extend(torch._foreach_add([pick(values, a), pick(values, b)], 1.5))

    def overwrite(values: list[Tensor]) -> None:
        torch.add(pick(values, a).clone(), torch.tensor(0.25), out=pick(values, b))

    kinds: list[Step] = [out_of_place, view, in_place, write_rows, scatter, random_numbers, several, overwrite]
    return choose.choice(kinds)


@pytest.mark.parametrize("grad_mode", GRAD_MODES)
@pytest.mark.parametrize("seed", range(40))
def test_a_random_program_replays_as_it_runs_eagerly(pool: GraphPool, seed: int, grad_mode: Any) -> None:
    choose = random.Random(seed)
    steps = [_random_step(choose) for _ in range(choose.randrange(1, 25))]
    outside = [torch.randn(4, 4) for _ in range(4)]
    twins = [tensor.clone() for tensor in outside]

    def run(values: list[Tensor]) -> list[Tensor]:
        for step in steps:
            step(values)
        return values

    with grad_mode():
        segment, outputs = capture(pool, lambda: run(list(outside)))
        assert_same(outside, twins)
        for replay in range(3):
            fresh = torch.randn(4, 4)
            outside[0].copy_(fresh)
            twins[0].copy_(fresh)
            torch.manual_seed(replay)
            segment.replay()
            torch.manual_seed(replay)
            assert_same(outputs, run(list(twins)))
            assert_same(outside, twins)


def test_a_backward_finds_what_its_forward_kept_for_it(pool: GraphPool) -> None:
    """OneDNN's LSTM keeps a workspace only where gradients are wanted."""
    layer, x = nn.LSTM(6, 5), torch.randn(2, 2, 6)

    def step() -> list[Tensor]:
        with torch.enable_grad():
            return list(torch.autograd.grad(layer(x)[0].square().sum(), list(layer.parameters())))

    segment, gradients = capture(pool, step)
    x.copy_(torch.randn(2, 2, 6))
    segment.replay()
    assert_same(gradients, step())
