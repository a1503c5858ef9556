"""`capture_graphs` makes every size ready before the first call."""

from __future__ import annotations

import pytest
import torch
from run_log import run_log
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import WIDTH, rows, wrapped_mlp

pytestmark = pytest.mark.usefixtures("no_grad")


def test_capture_graphs_makes_every_size_ready_for_the_first_call(device):
    model = wrapped_mlp(device)
    example = rows(3, device)
    summary = model.capture_graphs(example)
    assert summary.captured == 3
    assert summary.failed == {}
    assert summary.seconds > 0
    for size in range(1, 8):
        x = rows(size, device)
        close(model(x), sg.unwrap(model)(x))
    assert reasons(model) == {}
    assert model.graph_stats.replays == 7


def test_capture_graphs_again_captures_nothing_more(device):
    model = wrapped_mlp(device)
    model.capture_graphs(rows(3, device))
    assert model.capture_graphs(rows(2, device)).captured == 0
    x = rows(5, device)
    close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.captures == 3


def test_capture_graphs_does_not_touch_the_example(device):
    model = wrapped_mlp(device)
    example = rows(3, device)
    before = example.clone()
    model.capture_graphs(example)
    assert torch.equal(example, before)


def test_state_after_capture_graphs_is_that_of_one_run_on_the_examples_in_their_order(device):
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("slots", torch.zeros(8, WIDTH))

        def forward(self, x):
            self.slots[: len(x)] = x
            return x * 2

    model = sg.wrap(Keeps().to(device).eval(), capture_sizes=[2, 8], progress=False)
    example = rows(8, device)
    model.capture_graphs(example)
    assert torch.equal(model.slots, example)


def test_memory_that_the_module_does_not_hold_sees_one_run_too(device):
    calls = torch.zeros(1, device=device)

    class Counts(nn.Module):
        def forward(self, x):
            calls.add_(1)
            return x * 2

    model = sg.wrap(Counts().eval(), capture_sizes=[2, 8], progress=False)
    assert model.capture_graphs(rows(8, device)).captured == 2
    assert calls.item() == 1
    model(rows(8, device))
    assert calls.item() == 2


@pytest.mark.parametrize("settings", [{}, {"mode": "PIECEWISE"}, {"on_capture_failure": "raise"}])
def test_inputs_that_the_module_cannot_take_raise_its_own_error_and_leave_no_trace(device, caplog, settings):
    model = wrapped_mlp(device, **settings)
    with pytest.raises(RuntimeError, match="expected input with shape") as caught:
        model.capture_graphs(torch.randn(3, WIDTH + 1, device=device))
    assert not isinstance(caught.value, sg.SimpleGraphError)
    assert "failed" not in caplog.text
    assert model.graph_stats.failures == {}
    assert model.capture_graphs(rows(3, device)).captured == 3
    x = rows(5, device)
    close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 1


def test_one_size_that_the_module_cannot_run_fails_alone(device):
    class AtMostFour(nn.Module):
        def forward(self, x):
            if x.shape[0] > 4:
                raise ValueError("at most four rows")
            return x * 2

    summary = sg.wrap(AtMostFour().eval(), capture_sizes=[2, 4, 8], progress=False).capture_graphs(rows(2, device))
    assert summary.captured == 2
    assert "ValueError: at most four rows" in str(summary.failed["batch size 8"])


@pytest.mark.parametrize("size", [4, 8])
def test_a_single_size_serves_smaller_batches_after_capture_graphs(device, size):
    model = wrapped_mlp(device, capture_sizes=[size])
    model.capture_graphs(rows(size, device))
    for batch in (size, 1, 3):
        x = rows(batch, device)
        close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 3


def test_a_forward_that_takes_only_multiples_is_captured_up_front(device):
    class Groups(nn.Module):
        def forward(self, x):
            return x.view(-1, 4, WIDTH).cumsum(1).view(-1, WIDTH)

    model = sg.wrap(Groups().eval(), capture_sizes=[4], progress=False)
    x = rows(4, device)
    assert model.capture_graphs(x).captured == 1
    close(model(x), sg.unwrap(model)(x))
    assert model.graph_stats.replays == 1


def test_capture_graphs_in_training_mode_says_to_call_eval(device):
    model = wrapped_mlp(device).train()
    with pytest.raises(sg.InputError, match="eval"):
        model.capture_graphs(rows(4, device))


def test_capture_graphs_without_tensors_says_why(device):
    model = wrapped_mlp(device)
    with pytest.raises(sg.InputError, match="tensor"):
        model.capture_graphs(3)
    with pytest.raises(sg.InputError, match=r"nothing was passed: pass an example call, capture_graphs\(x\);"):
        model.capture_graphs()


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar_shows_only_where_it_is_wanted(device, capsys, progress):
    model = wrapped_mlp(device, progress=progress)
    model.capture_graphs(rows(4, device))
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("3/3" in shown.err) is progress


class IgnoresOne(nn.Module):
    """Takes an input that it does not read, and logs its runs."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.log = run_log()

    def forward(self, x, unread):
        self.log(x.shape[0])
        return self.linear(x)


def test_an_input_that_is_not_read_has_no_size_captured_twice(device):
    module = IgnoresOne().to(device).eval()
    model = sg.wrap(module, capture_sizes=[1, 2, 4, 8, 16], batch_dims={"x": 0, "unread": 0}, progress=False)
    model.capture_graphs(rows(16, device), rows(16, device))
    assert [size for (size,) in module.log()] == [16, 16, 8, 4, 2, 1]  # a warmup, and a capture of each
