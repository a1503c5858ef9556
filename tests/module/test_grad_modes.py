"""Training, gradients, autocast and inference mode give what eager gives."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import WIDTH, rows, wrapped_mlp

pytestmark = pytest.mark.usefixtures("no_grad")


def test_training_runs_eagerly_and_dropout_is_active(device):
    module = nn.Sequential(nn.Dropout(0.5)).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = torch.ones(4, 256, device=device)
    for _ in range(3):
        assert torch.equal(model(x), x)
    model.train()
    assert (model(x) == 0).any()
    model.eval()
    assert torch.equal(model(x), x)
    assert reasons(model) == {"first_call": 1, "training": 1}
    assert model.graph_stats.replays == 3


def test_gradients_flow_when_parameters_want_them(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    with torch.enable_grad():
        model(x).sum().backward()
    assert model.up.weight.grad is not None
    assert reasons(model) == {"first_call": 1, "grad": 1}
    close(model(x), sg.unwrap(model)(x))


def test_gradients_flow_to_an_input_of_a_frozen_module(device):
    model = wrapped_mlp(device).requires_grad_(False)
    x = rows(4, device)
    with torch.enable_grad():
        for _ in range(3):
            model(x)
        assert model.graph_stats.replays == 2
        leaf = x.clone().requires_grad_()
        model(leaf).sum().backward()
    assert leaf.grad.abs().sum() > 0
    assert reasons(model) == {"first_call": 1, "grad": 1}


def test_parameters_that_start_to_want_gradients_are_noticed(device):
    model = wrapped_mlp(device).requires_grad_(False)
    x = rows(4, device)
    with torch.enable_grad():
        for _ in range(3):
            model(x)
        model.up.weight.requires_grad_()
        assert model(x).requires_grad


def test_a_parameter_that_is_none_any_more_is_no_error_with_grad_mode_on(device):
    module = nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False).eval()
    model = sg.wrap(module, capture_sizes=[4])
    x = rows(4, device)
    for _ in range(3):
        model(x)
    module.bias = None
    for _ in range(4):
        with torch.enable_grad():
            close(model(x), x @ module.weight.t())
    assert model.graph_stats.replays >= 2


def test_autocast_on_and_off_give_what_eager_gives(device):
    model = wrapped_mlp(device)
    plain = sg.unwrap(model)
    x = rows(4, device)
    for turn in range(8):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=turn % 2 == 0):
            actual, expected = model(x), plain(x)
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    assert model.graph_stats.captures == 2
    with torch.autocast(device.type, dtype=torch.bfloat16):
        model.up.weight.zero_()
        torch.testing.assert_close(model(x), plain(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("outputs", ["clone", "static"])
def test_graphs_captured_in_inference_mode_serve_calls_outside_it_and_back(device, outputs):
    model = wrapped_mlp(device, outputs=outputs)
    plain = sg.unwrap(model)
    x = rows(4, device)
    with torch.inference_mode():
        for _ in range(3):
            close(model(x), plain(x))
    close(model(x), plain(x))
    with torch.inference_mode():
        y = rows(3, device)
        close(model(y), plain(y))
        close(model(y), plain(y))
    y = rows(3, device)
    close(model(y), plain(y))
    assert model.graph_stats.replays >= 4


def test_an_output_replayed_outside_inference_mode_can_be_trained_on(device):
    model = wrapped_mlp(device)
    x = rows(4, device)
    with torch.inference_mode():
        for _ in range(3):
            model(x)
    hidden = model(x)
    with torch.enable_grad():
        head = nn.Linear(WIDTH, 1).to(device)
        head(hidden).sum().backward()
    close(head.weight.grad[0], hidden.sum(0))


def test_an_output_in_inference_mode_is_an_inference_tensor_as_in_eager(device):
    model = wrapped_mlp(device)
    with torch.inference_mode():
        x = rows(4, device)
        for _ in range(4):
            assert model(x).is_inference()
        assert model.graph_stats.replays == 3


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("training", [False, True])
def test_a_forward_that_is_decorated_is_served_under_grad_mode(mode, training, device):
    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        @mode()
        def forward(self, x):
            return self.layer(x)

    model = sg.wrap(Decorated().to(device).eval(), training=training)
    with torch.enable_grad():
        for _ in range(6):
            x = rows(4, device)
            answer, expected = model(x), sg.unwrap(model)(x)
            close(answer, expected)
            assert (answer.requires_grad, answer.is_inference()) == (False, expected.is_inference())
    assert model.graph_stats.replays >= 4
