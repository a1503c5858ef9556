"""Inputs as people have them, on a GPU: timesteps, mappings, torch's own modules with the sequence first."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import Reason

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
WIDTH = 64


class Denoiser(nn.Module):
    """Copies a timestep that is a number to the device at every call, as diffusers does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, sample: Tensor, timestep: Any) -> Tensor:
        steps = timestep
        if not torch.is_tensor(steps):
            steps = torch.tensor([steps], dtype=torch.int64, device=sample.device)
        elif steps.dim() == 0:
            steps = steps[None].to(sample.device)
        angles = steps.expand(sample.shape[0])[:, None].float() / torch.arange(1, WIDTH + 1, device=sample.device)
        return self.layer(sample + angles.sin())


def test_a_timestep_that_is_a_number_is_part_of_the_key(device: torch.device) -> None:
    """Each value has a graph of its own, which freezes its copy to the device, until there are `max_signatures`."""
    model: Any = sg.wrap(Denoiser().to(device).eval(), capture_sizes=[4], max_signatures=2, progress=False)
    for step in [981, 941, 901] * 4:
        x = torch.randn(4, WIDTH, device=device)
        assert torch.equal(model(x, step), sg.unwrap(model)(x, step))
    assert model.graph_stats.captures == 2
    assert model.graph_stats.eager[Reason.TOO_MANY_SIGNATURES] == 4


def test_one_graph_serves_all_timesteps_on_the_cpu_that_the_forward_moves(device: torch.device) -> None:
    model: Any = sg.wrap(Denoiser().to(device).eval(), capture_sizes=[4], max_signatures=2, progress=False)
    for step in [981, 941, 901] * 4:
        x, passed = torch.randn(4, WIDTH, device=device), torch.tensor(step)
        assert torch.equal(model(x, passed), sg.unwrap(model)(x, passed))
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays >= 8


def test_a_schedule_on_the_device_replays_one_graph(device: torch.device) -> None:
    model: Any = sg.wrap(Denoiser().to(device).eval(), capture_sizes=[4], progress=False)
    for step in torch.arange(981, 1, -40, device=device):
        x = torch.randn(4, WIDTH, device=device)
        assert torch.equal(model(x, step), sg.unwrap(model)(x, step))
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays == 23


class Sum(nn.Module):
    def forward(self, batch: Any) -> Any:
        return collections.UserDict({"total": batch["a"] * 2 + batch["b"].sum(-1, keepdim=True)})


def test_a_mapping_is_served_padded(device: torch.device) -> None:
    model: Any = sg.wrap(Sum().to(device).eval(), capture_sizes=[2, 4], progress=False)
    for rows in (2, 4, 3, 2, 4, 3, 3):
        items = {"a": torch.randn(rows, WIDTH, device=device), "b": torch.randn(rows, 3, device=device)}
        answer = model(collections.UserDict(items))
        assert torch.equal(answer["total"], items["a"] * 2 + items["b"].sum(-1, keepdim=True))
    assert model.graph_stats.replays >= 2


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_with_the_sequence_first_is_padded(kind: Any, device: torch.device) -> None:
    model: Any = sg.wrap(kind(WIDTH, WIDTH, 2).to(device).eval(), capture_sizes=[2, 4], progress=False)
    for rows in (4, 2, 3, 4, 2, 3, 3):
        x = torch.randn(4, rows, WIDTH, device=device)  # as long as a batch is wide
        torch.testing.assert_close(model(x)[0], sg.unwrap(model)(x)[0], rtol=1e-2, atol=1e-3)
    assert model.graph_stats.replays >= 2
    assert set(model.graph_stats.batch_sizes) == {2, 3, 4}


def test_self_attention_by_one_tensor_takes_eagers_kernels(device: torch.device) -> None:
    model: Any = sg.wrap(nn.MultiheadAttention(WIDTH, 2).to(device).eval(), capture_sizes=[4], progress=False)
    for _ in range(4):
        x = torch.randn(7, 4, WIDTH, device=device)
        assert torch.equal(model(x, x, x)[0], sg.unwrap(model)(x, x, x)[0])
    assert model.graph_stats.replays >= 2


class Frames(nn.Module):
    """Strided windows over samples, as audio models begin."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 8, 10, 5)

    def forward(self, samples: Tensor) -> Tensor:
        return self.first(samples[:, None]).relu().transpose(1, 2)


def test_calls_of_any_length_are_served_by_graphs_of_a_few(device: torch.device) -> None:
    model: Any = sg.wrap(
        Frames().to(device).eval(),
        capture_sizes=[2, 4],
        length_dims={"samples": 1},
        lengths=[64, 128],
        batch_dims={"samples": 0},
        progress=False,
    )
    for number, length in enumerate([*range(41, 128, 3)] * 3):
        x = torch.randn((2, 4, 3)[number % 3], length, device=device)
        torch.testing.assert_close(model(x), sg.unwrap(model)(x), rtol=1e-2, atol=1e-3)
    assert model.graph_stats.captures == 4
    assert model.graph_stats.replays >= 30
