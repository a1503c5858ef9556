"""`capture_graphs` makes every size ready before the first call."""

from __future__ import annotations

import sys

import pytest
import torch
from run_log import run_log
from torch import nn

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.models import WIDTH, rows, wrapped_mlp
from tests.support.where import without_gpu

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


class Counts(nn.Module):
    """Counts its calls in memory that it does not hold.

    Args:
        count: does that.
        fails: a batch size that cannot be captured, and runs eagerly.
    """

    def __init__(self, count, fails=None):
        super().__init__()
        self.count, self.fails = count, fails

    def forward(self, x):
        self.count(x)
        if len(x) == self.fails:
            x.sum().item()
        return x * 2


@sg.eager_break
def count_in_a_break(known):
    known["calls"].add_(1)


def counted(device, how):
    """Return what counts a call, and what tells how many there were."""
    known = {"calls": torch.zeros(1, device=device)}
    if how == "made by the first call":
        known.clear()

    def count(x):
        if how == "in a break":
            count_in_a_break(known)
        else:
            known.setdefault("calls", torch.zeros(1, device=x.device)).add_(1)

    return count, lambda: known["calls"].item()


@pytest.mark.parametrize("fails", [None, 2, 8])
@pytest.mark.parametrize("how", ["by a global", "made by the first call", "in a break"])
def test_memory_that_the_module_does_not_hold_sees_one_run_too(device, how, fails):
    count, calls = counted(device, how)
    mode = "PIECEWISE" if how == "in a break" else "FULL"
    model = sg.wrap(Counts(count, fails).eval(), capture_sizes=[2, 8], progress=False, mode=mode)
    model.capture_graphs(rows(8, device))
    assert calls() == 1
    model(rows(8, device))
    assert calls() == 2


@pytest.mark.parametrize("how", ["by a global", "in a break"])
def test_captures_in_gaps_run_once_in_memory_that_the_module_does_not_hold(device, how):
    count, calls = counted(device, how)
    mode = "PIECEWISE" if how == "in a break" else "FULL"
    model = sg.wrap(Counts(count, fails=4).eval(), capture_sizes=[2, 4, 8], progress=False, mode=mode)
    for _ in range(4):
        model.capture_next(rows(8, device))
    assert model.graph_stats.captures == 2
    assert calls() == 1


@pytest.mark.parametrize("verify", [0, 1])
@pytest.mark.parametrize("fails", [None, 2])
@pytest.mark.parametrize("notes", [set, list])
def test_a_cache_outside_of_the_module_that_only_a_rehearsal_fills_stays_filled(device, notes, fails, verify):
    tables, filled = {size: torch.zeros(1, device=device) for size in (1, 2, 4, 8)}, notes()
    note = filled.add if notes is set else filled.append  # a list that grew is not put back

    class Looks(nn.Module):
        def forward(self, x):
            size = len(x)
            if size not in filled:
                if size == fails:
                    x.sum().item()
                tables[size].fill_(5)
                note(size)
            return x + tables[size]

    sizes = [2, 8] if fails else [4, 8]
    model = sg.wrap(Looks().eval(), capture_sizes=sizes, padding=False, progress=False, verify=verify)
    model.capture_graphs(rows(8, device))
    for size in (8, sizes[0], 8, sizes[0]):
        x = rows(size, device)
        close(model(x), x + 5)


def test_memory_that_is_too_much_to_copy_keeps_nothing_else_from_being_put_back(device, monkeypatch):
    monkeypatch.setattr("simplegraph.device.saved_state._LIMIT_BYTES", 1 << 10)
    pages, calls = torch.zeros(1 << 10, device=device), torch.zeros(1, device=device)

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("position", torch.zeros(1))

        def forward(self, x):
            pages[: x.shape[1]] = x[0]
            calls.add_(1)
            self.position.add_(1)
            return x * self.position

    eager, model = Decoder().to(device), sg.wrap(Decoder().to(device).eval(), capture_sizes=[2, 8], progress=False)
    x = rows(8, device)
    eager(x)
    calls.zero_()
    model.capture_graphs(x)
    assert calls.item() == 1
    for size in (8, 2, 8):
        close(model(x[:size]), eager(x[:size]))


def test_memory_that_cannot_be_viewed_otherwise_is_no_obstacle(device):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], device=device)
    model = sg.wrap(Counts(lambda x: nested.mul_(2)).eval(), capture_sizes=[2, 8], progress=False)
    model.capture_graphs(rows(8, device))
    assert nested.unbind()[0].tolist() == [2, 2]


@without_gpu
def test_memory_that_a_rehearsal_gives_back_is_there_again(device):
    class Resizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("work", torch.zeros(8 << 12, device=device))

        def forward(self, x):
            storage, elements = self.work.untyped_storage(), len(x) << 12
            storage.resize_(4 * elements)
            self.work.set_(storage, 0, (elements,))
            return x + self.work.fill_(1)[0]

    model = sg.wrap(Resizes().eval(), capture_sizes=[8], progress=False)
    model.capture_graphs(rows(8, device))
    assert model.work.untyped_storage().nbytes() >= 4 * model.work.numel()
    assert model.work.eq(1).all()


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
    for arguments in ((), ("text",)):
        with pytest.raises(sg.InputError, match="cannot use this call: no tensor was passed, so there is no batch dim"):
            model.capture_graphs(*arguments)


@pytest.mark.parametrize("progress", [True, False])
def test_the_progress_bar_shows_only_where_it_is_wanted(device, capsys, progress, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
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
