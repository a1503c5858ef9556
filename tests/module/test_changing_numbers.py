"""Python numbers that change at every call, as timesteps do: one graph where a tensor gives the same answer."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from run_log import run_log
from torch import Tensor, nn

import simplegraph as sg
from simplegraph import Reason
from simplegraph.module.changing import ChangingNumbers, with_tensors
from tests.module.answers import reasons

pytestmark = [pytest.mark.usefixtures("no_grad"), pytest.mark.proofs]
WIDTH = 8


class Denoiser(nn.Module):
    """Embeds its timestep as diffusers does, which takes numbers and tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.runs = run_log()

    def forward(self, sample: Tensor, timestep: Any) -> Tensor:
        self.runs()
        timesteps = timestep
        if not torch.is_tensor(timesteps):
            dtype = torch.int64 if isinstance(timestep, int) else torch.float64
            timesteps = torch.tensor([timesteps], dtype=dtype, device=sample.device)
        elif timesteps.dim() == 0:
            timesteps = timesteps[None].to(sample.device)
        timesteps = timesteps.expand(sample.shape[0])
        frequencies = torch.exp(-math.log(10000.0) * torch.arange(WIDTH // 2, device=sample.device) / WIDTH)
        angles = timesteps[:, None].float() * frequencies
        return self.layer(sample + torch.cat([angles.sin(), angles.cos()], -1))


def graphed(module: nn.Module, device: torch.device, **settings: Any) -> Any:
    return sg.wrap(module.to(device).eval(), **({"capture_sizes": [2, 4], "progress": False} | settings))


def assert_right(model: Any, *args: Any) -> None:
    """The answer is eager's to the bit, for the exact size."""
    found, expected = model(*args), sg.unwrap(model)(*args)
    torch.testing.assert_close(found, expected, rtol=0, atol=0) if args[0].shape[0] in (2, 4) else (
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    )


@pytest.mark.parametrize("kind", [int, float])
def test_a_schedule_of_numbers_replays_one_graph(kind: type, device: torch.device) -> None:
    model = graphed(Denoiser(), device)
    steps = [kind(step) for step in range(981, 1, -40)]
    for step in steps:
        assert_right(model, torch.randn(4, WIDTH, device=device), step)
    stats = model.graph_stats
    assert stats.captures == 1
    assert stats.replays == len(steps) - 5  # two of the key, one as a tensor, two proofs
    for step in steps:  # the next image: every step replays
        assert_right(model, torch.randn(4, WIDTH, device=device), step)
    assert stats.replays == 2 * len(steps) - 5
    assert "float64" in str(stats.graphs) or kind is int


def test_other_batch_sizes_and_ways_to_pass_it_are_served_too(device: torch.device) -> None:
    model = graphed(Denoiser(), device)
    for number in range(24):
        rows = (4, 2, 3)[number % 3]
        x = torch.randn(rows, WIDTH, device=device)
        if number % 2:
            assert torch.allclose(model(x, timestep=number), sg.unwrap(model)(x, timestep=number), atol=1e-5)
        else:
            assert_right(model, x, number)
    assert model.graph_stats.replays >= 6
    assert model.graph_stats.padded_tokens >= 1


class ByBranch(nn.Module):
    def forward(self, x: Tensor, step: int) -> Tensor:
        return x * 2 if step > 5 else x * step


class AsIndex(nn.Module):
    def forward(self, x: Tensor, step: int) -> Tensor:
        for _ in range(step):
            x = x * 1.5
        return x


class ByType(nn.Module):
    """Computes otherwise with a tensor, without an error: only a comparison shows it."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        return x * step if isinstance(step, int) else x * step * 3


class ByTypeLater(nn.Module):
    """The first value that is compared does not tell."""

    def forward(self, x: Tensor, step: int) -> Tensor:
        return x * step if isinstance(step, int) else x * torch.clamp(step, max=4)


@pytest.mark.parametrize("kind", [ByBranch, AsIndex, ByType, ByTypeLater])
def test_a_number_whose_value_the_forward_needs_is_part_of_the_key(
    kind: type, device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    model = graphed(kind(), device, max_signatures=8)
    with caplog.at_level(logging.WARNING, "simplegraph"):
        for step in (1, 2, 3, 4, 5, 6, 7, 8, 9):
            assert_right(model, torch.randn(4, WIDTH, device=device), step)
        for _ in range(3):
            assert_right(model, torch.randn(4, WIDTH, device=device), 7)
    assert not model.graph_stats.failures
    assert "does not equal" not in caplog.text
    assert model.graph_stats.replays >= 1  # of the graph for 7
    for step in range(10, 20):
        assert_right(model, torch.randn(4, WIDTH, device=device), step)
    assert reasons(model)["too_many_signatures"] >= 1
    assert "step changes, and as a tensor: " in str(model.graph_report())


def test_a_value_that_was_not_compared_is_compared_before_it_is_replayed(device: torch.device) -> None:
    """One value at every proof proves one value."""
    model = graphed(ByTypeLater(), device)
    for step in (1, 2, 3, 3, 3, 3, 3, 3, 9, 9, 9, 9):
        assert_right(model, torch.randn(4, WIDTH, device=device), step)
    assert model.graph_stats.replays >= 3


def test_a_switch_of_two_values_has_a_graph_for_each(device: torch.device) -> None:
    model = graphed(Denoiser(), device)
    for number in range(12):
        assert_right(model, torch.randn(4, WIDTH, device=device), number % 2)
    assert model.graph_stats.captures == 2
    assert "as int64" not in str(model.graph_report())


def test_without_proofs_each_value_has_a_graph_of_its_own(device: torch.device) -> None:
    model = graphed(Denoiser(), device, verify=0)
    for number in range(12):
        assert_right(model, torch.randn(4, WIDTH, device=device), number % 4)
    assert model.graph_stats.captures == 4


def test_a_number_that_no_tensor_holds_stays_a_number(device: torch.device) -> None:
    model = graphed(AsIndex(), device)
    for step in (0, 1, 2, 3, -(2**70), 1, 2):
        assert_right(model, torch.randn(4, WIDTH, device=device), step)


def test_a_failure_is_no_error_where_failures_are(device: torch.device) -> None:
    model = graphed(ByBranch(), device, on_capture_failure="raise")
    for step in (1, 2, 3, 4, 5, 6, 7, 7, 7):
        assert_right(model, torch.randn(4, WIDTH, device=device), step)
    assert reasons(model)[Reason.CHANGING_NUMBER] == 1


def test_a_number_in_a_small_cpu_tensor_beside_tensors_on_a_gpu_counts_as_one() -> None:
    """Schedulers that are told no device hold their timesteps there."""
    changing, device = ChangingNumbers(), torch.device("meta")
    x = torch.empty(2, 3, device="meta")
    for step in (1, 2, 3):
        found = changing.find([x, torch.tensor(step), torch.tensor([step]), step], ["x", "t", "row", "n"], device)
    assert found == {1: torch.int64, 3: int}
    made = with_tensors([x, torch.tensor(7), torch.tensor([7]), 7], [(1, torch.int64, device), (3, int, device)])
    assert made is not None
    assert [(made[at].device.type, made[at].dtype, made[at].shape) for at in (1, 3)] == [("meta", torch.int64, ())] * 2
    for other in (torch.tensor(7.0), 7, torch.empty((), dtype=torch.int64, device="meta")):
        assert with_tensors([x, other], [(1, torch.int64, device)]) is None
    here = ChangingNumbers()
    assert not any(here.find([torch.tensor(step)], ["t"], torch.device("cpu")) for step in range(5))
