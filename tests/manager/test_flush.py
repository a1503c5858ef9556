"""`on_too_many_signatures="flush"`: graphs of traffic that moved on make room for those of traffic that came."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph import Reason


class Pyramid(nn.Module):
    """A UNet in small: down, up, and a connection across, at any even resolution."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.middle = nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)

    def forward(self, sample: torch.Tensor, timestep: torch.Tensor | float) -> torch.Tensor:
        hidden = self.middle(self.down(sample)) * timestep
        return sample + self.up(hidden)


def graphed(device: torch.device, **settings) -> Pyramid:
    settings = {"max_signatures": 3, "on_too_many_signatures": "flush"} | settings
    return sg.wrap(Pyramid().to(device).eval(), capture_sizes=[2], progress=False, **settings)


def assert_serves(model: Pyramid, resolution: int, device: torch.device, calls: int = 3) -> None:
    """Right at every call, the last one a replay."""
    replays = model.graph_stats.replays
    for step in range(calls):
        sample = torch.randn(2, 3, resolution, resolution, device=device)
        expected = sg.unwrap(model)(sample, step_tensor := torch.tensor([step + 1.0], device=device))
        torch.testing.assert_close(model(sample, step_tensor), expected, rtol=1e-3, atol=1e-4)
    assert model.graph_stats.replays > replays


@torch.inference_mode()
def test_beyond_the_bound_new_resolutions_are_captured_and_old_ones_come_back(device):
    model = graphed(device)
    for resolution in (8, 12, 16, 20, 24, 8, 12):
        assert_serves(model, resolution, device)
    assert model.graph_stats.flushes == 2
    assert model.graph_stats.captures == 7
    assert Reason.TOO_MANY_SIGNATURES not in model.graph_stats.eager
    assert "flushed 2 x" in str(model.graph_report())
    assert model.graph_report().to_dict()["flushes"] == 2


@torch.inference_mode()
def test_never_more_graphs_than_the_bound(device):
    model = graphed(device)
    for resolution in (8, 12, 16, 20, 24, 28, 32):
        assert_serves(model, resolution, device)
        assert model.graph_manager is not None
        assert len(model.graph_manager.programs) <= 3


@torch.inference_mode()
def test_a_flush_gives_back_graphs_and_their_inputs(device):
    model = graphed(device, outputs="static")
    for resolution in (8, 12, 16):
        assert_serves(model, resolution, device)
    manager = model.graph_manager
    assert manager is not None
    old = [weakref.ref(program) for program in manager.programs.values()]
    inputs = [weakref.ref(static) for static in model.static_inputs().values()]
    assert_serves(model, 20, device)
    gc.collect()
    assert [program() for program in old] == [None] * 3
    assert [static() for static in inputs] == [None] * len(inputs)
    assert len(manager.programs) == 1


@torch.inference_mode()
def test_outputs_given_before_a_flush_are_still_the_callers(device):
    model = graphed(device)
    sample, step = torch.randn(2, 3, 8, 8, device=device), torch.ones(1, device=device)
    kept = [model(sample, step) for _ in range(4)]
    expected = sg.unwrap(model)(sample, step)
    for resolution in (12, 16, 20, 24):
        assert_serves(model, resolution, device)
    assert model.graph_stats.flushes == 1
    for output in kept:
        torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


@torch.inference_mode()
def test_traffic_over_more_resolutions_than_the_bound_is_right_and_captures_nothing_in_vain(device):
    model = graphed(device)
    step = torch.ones(1, device=device)
    for resolution in (8, 12, 16, 20) * 6:
        sample = torch.randn(2, 3, resolution, resolution, device=device)
        torch.testing.assert_close(model(sample, step), sg.unwrap(model)(sample, step), rtol=1e-3, atol=1e-4)
    assert model.graph_stats.captures == 0
    assert model.graph_stats.flushes == 7


@torch.inference_mode()
def test_by_default_further_signatures_run_eagerly(device):
    model = graphed(device, on_too_many_signatures="eager")
    for resolution in (8, 12, 16):
        assert_serves(model, resolution, device)
    sample, step = torch.randn(2, 3, 20, 20, device=device), torch.ones(1, device=device)
    torch.testing.assert_close(model(sample, step), sg.unwrap(model)(sample, step))
    assert model.graph_stats.eager[Reason.TOO_MANY_SIGNATURES] == 1
    assert model.graph_stats.flushes == 0


@torch.inference_mode()
def test_numbers_that_change_at_every_step_are_better_passed_as_tensors(device):
    """A Python number is part of the key: every timestep would have a graph, and a flush keeps the bound."""
    model = graphed(device)
    sample = torch.randn(2, 3, 8, 8, device=device)
    for step in range(1, 9):
        torch.testing.assert_close(model(sample, float(step)), sg.unwrap(model)(sample, float(step)))
    assert model.graph_stats.replays == 0
    assert_serves(model, 8, device)
    assert model.graph_stats.captures == 1


@torch.inference_mode()
def test_a_number_has_a_graph_for_each_value_until_there_are_too_many(device):
    model = graphed(device, on_too_many_signatures="eager")
    sample = torch.randn(2, 3, 8, 8, device=device)
    for step in [1, 2, 3, 4] * 4:  # None of them a float, which the tensor that the forward multiplies by would be.
        torch.testing.assert_close(model(sample, step), sg.unwrap(model)(sample, step))
    assert model.graph_stats.captures == 3
    assert model.graph_stats.replays == 9
    assert model.graph_stats.eager[Reason.TOO_MANY_SIGNATURES] == 4
    assert "pass changing values as tensors" in Reason.TOO_MANY_SIGNATURES.text


def test_another_rule_is_refused():
    with pytest.raises(sg.ConfigError, match="on_too_many_signatures is 'lru'; expected 'eager' or 'flush'"):
        sg.CudaGraphConfig(on_too_many_signatures="lru")


@torch.inference_mode()
@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_classifier_free_guidance_in_two_calls(device, outputs):
    """Cloned outputs are two tensors; static ones are the same memory, which is what the setting says."""
    model = graphed(device, outputs=outputs)
    step = torch.ones(1, device=device)
    samples = [torch.randn(2, 3, 8, 8, device=device) for _ in range(2)]
    for _ in range(3):
        model(samples[0], step)
    conditional, unconditional = (model(sample, step) for sample in samples)
    expected = [sg.unwrap(model)(sample, step) for sample in samples]
    torch.testing.assert_close(unconditional, expected[1], rtol=1e-3, atol=1e-4)
    if outputs == "clone":
        torch.testing.assert_close(conditional, expected[0], rtol=1e-3, atol=1e-4)
    else:
        assert conditional.data_ptr() == unconditional.data_ptr()
    assert model.graph_stats.replays >= 3
