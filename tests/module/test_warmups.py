"""Eager calls before a graph: how many `num_warmups` asks for, which calls count, and what the report says is left."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import simplegraph as sg
from tests.module.answers import close, reasons

WIDTH = 6
BAD = [-1, True, 1.5, "3"]
# Batches whose sizes vary, and what became of each call.
BATCHES = (3, 3, 3, 5, 5, 8, 2)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each run of a layer, captures included: a module that notes its own runs would have no graph."""
    found: list[int] = []

    def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        found.append(x.shape[0])
        return torch.addmm(bias, x, weight.t())

    monkeypatch.setattr(nn.functional, "linear", linear)
    return found


def layer(device: torch.device) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, device=device).eval()


def wrapped(device: torch.device, **settings: Any) -> Any:
    return sg.wrap(layer(device), **{"capture_sizes": [4, 8], "progress": False} | settings)


def call(model: Any, rows: int, device: torch.device) -> str:
    """Call with so many rows; say how it was served."""
    before = reasons(model)
    x = torch.randn(rows, WIDTH, device=device)
    close(model(x), torch.addmm(model.bias, x, model.weight.t()))
    after = reasons(model)
    return next((reason for reason, count in after.items() if count > before.get(reason, 0)), "replay")


class TestSetting:
    @pytest.mark.parametrize("value", BAD)
    def test_a_bad_value_is_refused_and_named(self, value, device):
        for refuse in (
            lambda: sg.CudaGraphConfig(num_warmups=value),
            lambda: sg.wrap(layer(device), num_warmups=value),
            lambda: sg.CudaGraphManager(device=device, num_warmups=value),
        ):
            with pytest.raises(
                sg.ConfigError, match=f"num_warmups is {value!r}; expected a whole number of at least 0"
            ):
                refuse()

    @pytest.mark.parametrize("text", ["-1", "1.5", "three"])
    def test_a_bad_value_in_the_environment_is_refused(self, text, monkeypatch, device):
        monkeypatch.setenv("SIMPLEGRAPH_NUM_WARMUPS", text)
        with pytest.raises(sg.ConfigError, match="NUM_WARMUPS"):
            wrapped(device)

    def test_a_wrapper_needs_one_since_it_learns_from_it(self, device, monkeypatch):
        said = "num_warmups is 0, and a wrapper learns .* expected at least 1. 0 is for a CudaGraphManager"
        with pytest.raises(sg.ConfigError, match=said):
            wrapped(device, num_warmups=0)
        model = wrapped(device, num_warmups=2)
        with pytest.raises(sg.ConfigError, match=said):
            model.configure_graphs(num_warmups=0)
        assert model._graph_runner.config.num_warmups == 2
        monkeypatch.setenv("SIMPLEGRAPH_NUM_WARMUPS", "0")  # as an engine in the same process may want it
        model = wrapped(device)
        with torch.inference_mode():
            assert [call(model, 4, device) for _ in range(3)] == ["first_call", "replay", "replay"]
        assert sg.CudaGraphManager(device=device).config.num_warmups == 0


@pytest.mark.usefixtures("no_grad")
class TestLazy:
    @pytest.mark.parametrize("warmups", [1, 2, 3])
    def test_calls_of_a_size_run_eagerly_so_often_before_its_capture(self, warmups, ran, device):
        model = wrapped(device, num_warmups=warmups)
        served = [call(model, 4, device) for _ in range(warmups + 2)]
        assert served == ["first_call", *["warmup"] * (warmups - 1), "replay", "replay"]
        assert ran == [4] * (warmups + 1)  # and the capture
        served = [call(model, 8, device) for _ in range(warmups + 1)]
        assert served == [*["warmup"] * warmups, "replay"]

    def test_the_environment_wins(self, monkeypatch, device):
        monkeypatch.setenv("SIMPLEGRAPH_NUM_WARMUPS", "3")
        model = wrapped(device)
        assert [call(model, 4, device) for _ in range(4)] == ["first_call", "warmup", "warmup", "replay"]

    def test_a_function_is_warmed_up_so_often(self, device):
        double = sg.wrap(lambda x: x * 2, exact_shapes=True, num_warmups=3)
        x = torch.randn(4, WIDTH, device=device)
        for _ in range(4):
            close(double(x), x * 2)
        assert reasons(double) == {"first_call": 1, "warmup": 2}

    def test_a_capture_after_padded_warmups_alone_gets_one_of_its_own_where_it_fails(self, device, monkeypatch):
        """A library that sets itself up at each new shape: three rows do not set it up for four."""
        set_up: set[int] = set()

        def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            if x.shape[0] not in set_up:
                float(x.sum())  # reads back, as an autotuner does
                set_up.add(x.shape[0])
            return torch.addmm(bias, x, weight.t())

        monkeypatch.setattr(nn.functional, "linear", linear)
        model = wrapped(device, capture_sizes=[4], batch_dims={"input": 0})
        assert [call(model, rows, device) for rows in (3, 4, 4)] == ["first_call", "replay", "replay"]
        assert model.graph_stats.failures == {}


@pytest.mark.usefixtures("no_grad")
class TestUpfront:
    @pytest.mark.parametrize(("warmups", "eager"), [(1, [8, 4]), (2, [8, 4, 8, 4, 4]), (3, [8, 4, 8, 8, 4, 4, 4])])
    def test_one_is_of_the_largest_for_all_and_more_are_of_each(self, warmups, eager, ran, device):
        model = wrapped(device, num_warmups=warmups)
        model.capture_graphs(torch.randn(8, WIDTH, device=device))
        # Half of the rows are run once, so that no batch dimension is a guess; at the end come the captures.
        assert ran == [*eager, 8, 4]
        assert call(model, 8, device) == "replay"

    def test_all_but_one_leave_nothing(self, device):
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros((), device=device))

            def forward(self, x: Tensor) -> Tensor:
                self.calls += 1
                return x * 2

        model = sg.wrap(Counting().eval(), capture_sizes=[4, 8], num_warmups=4, progress=False)
        state = torch.get_rng_state()
        model.capture_graphs(torch.randn(8, WIDTH, device=device))
        assert model.calls.item() == 1
        assert torch.equal(state, torch.get_rng_state()) or device.type == "cpu"
        model(torch.randn(4, WIDTH, device=device))
        assert model.calls.item() == 2

    def test_captures_one_by_one_warm_up_each_size(self, ran, device):
        model, x = wrapped(device, num_warmups=2), torch.randn(8, WIDTH, device=device)
        model.capture_next(x)
        assert [rows for rows in ran if rows == 8] == [8] * 3
        del ran[:]
        model.capture_next(x)
        assert [rows for rows in ran if rows == 4][-3:] == [4] * 3

    def test_pieces_are_warmed_up_with_their_breaks(self, device):
        met: list[int] = []

        @sg.eager_break
        def between(x: Tensor) -> Tensor:
            met.append(x.shape[0])
            return x + 1

        class Broken(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return between(x * 2) * 2

        model = sg.wrap(Broken().eval(), mode="PIECEWISE", capture_sizes=[4, 8], num_warmups=3, progress=False)
        assert model.capture_graphs(torch.randn(8, WIDTH, device=device)).captured == 2
        assert (met.count(8), met.count(4)) == (3, 4)  # half of the rows once more; breaks do not run in captures
        x = torch.randn(3, WIDTH, device=device)
        close(model(x), (x * 2 + 1) * 2)
        assert model.graph_stats.replays == 1

    @pytest.mark.parametrize("warmups", [0, 1, 3])
    def test_a_manager_runs_what_its_owner_asks_for(self, warmups, ran, device):
        manager = sg.CudaGraphManager(device=device, capture_sizes=[4, 8], num_warmups=warmups, progress=False)
        module, x = layer(device), torch.randn(8, WIDTH, device=device)
        manager.capture(lambda mode, descriptor: module(x[: descriptor.num_tokens]))
        eager = {0: [], 1: [8], 3: [8, 8, 8, 4, 4, 4]}[warmups]
        assert ran == [*eager, 8, 4]
        batch = manager.dispatch(4)
        close(manager.run(batch, lambda mode, descriptor: None), torch.addmm(module.bias, x[:4], module.weight.t()))
        assert manager.memory_estimate(lambda mode, descriptor: module(x[: descriptor.num_tokens])).graphs == 2


class TestTraining:
    @pytest.mark.parametrize("warmups", [1, 3])
    def test_a_step_runs_eagerly_so_often_and_trains_once_a_call(self, warmups, device):
        models = [layer(device), layer(device)]
        models[1].load_state_dict(models[0].state_dict())
        optimizers = [optim.SGD(model.parameters(), lr=0.1) for model in models]

        def step_of(model: nn.Module, optimizer: optim.Optimizer) -> Any:
            def step(x: Tensor) -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss.detach()

            return step

        graphed = sg.train_step(step_of(models[0], optimizers[0]), optimizers=optimizers[0], num_warmups=warmups)
        eager = step_of(models[1], optimizers[1])
        for _ in range(warmups + 3):
            x = torch.randn(4, WIDTH, device=device)
            close(graphed(x), eager(x))
        # The first one makes the gradients: the next ones are of another signature.
        assert reasons(graphed) == {"first_call": 2} | ({"warmup": warmups - 1} if warmups > 1 else {})
        assert graphed.graph_stats.replays == 2

    @pytest.mark.parametrize("warmups", [1, 3])
    def test_so_does_a_module_that_is_trained_by_its_own_calls(self, warmups, device):
        model = sg.wrap(layer(device).train(), training=True, num_warmups=warmups)
        for _ in range(warmups + 2):
            model(torch.randn(4, WIDTH, device=device)).square().mean().backward()
        assert reasons(model) == {"first_call": 1} | ({"warmup": warmups - 1} if warmups > 1 else {})


@pytest.mark.usefixtures("no_grad")
@pytest.mark.proofs
class TestCallsUntilReplays:
    @pytest.mark.parametrize(
        ("settings", "served"),
        [
            # Without a replay while a first call of three rows was no warmup: the second call was one, too.
            ({}, ["first_call", "proof", "replay", "warmup", "proof", "proof", "warmup"]),
            ({"batch_dims": {"input": 0}}, ["first_call", "proof", "replay", "warmup", "proof", "proof", "proof"]),
        ],
        ids=["guessed", "declared"],
    )
    def test_of_batches_whose_sizes_vary(self, settings, served, device):
        model = wrapped(device, **settings)
        assert [call(model, rows, device) for rows in BATCHES] == served
        ahead = {2: ["proof"]} if served[-1] == "warmup" else {}
        assert model.graph_report().ahead == ahead
        assert [call(model, rows, device) for rows in (2, 2, 3, 5, 8)][-4:] == ["replay"] * 4

    @pytest.mark.parametrize("settings", [{}, {"batch_dims": {"input": 0}}], ids=["guessed", "declared"])
    def test_one_batch_size_alone_replays_from_its_third_call_on(self, settings, device):
        model = wrapped(device, **settings)
        assert model.graph_report().ahead == {}
        assert call(model, 3, device) == "first_call"
        assert model.graph_report().ahead == {3: ["proof"]}
        assert [call(model, 3, device) for _ in range(2)] == ["proof", "replay"]
        assert model.graph_report().ahead == {}

    def test_without_proofs_the_call_that_captures_replays(self, device):
        model = wrapped(device, verify=0, num_warmups=2)
        call(model, 4, device)
        assert model.graph_report().ahead == {4: ["warmup"]}
        assert [call(model, 4, device) for _ in range(2)] == ["warmup", "replay"]

    def test_the_report_says_how_many_more_and_it_is_so(self, device):
        model = wrapped(device, batch_dims={"input": 0}, num_warmups=2)
        for rows in (3, 8, 8, 5):
            call(model, rows, device)
        report = model.graph_report()
        said = "still to run eagerly before replays: 2 calls of 3 rows (warmup, proof); 1 call of 8 rows (proof)"
        assert said in str(report)
        assert report.to_dict()["ahead"] == [[3, ["warmup", "proof"]], [8, ["proof"]]]
        for rows, calls in report.ahead.items():
            assert [call(model, rows, device) for _ in range(len(calls) + 1)] == [*calls, "replay"]
        assert "still to run" not in str(model.graph_report())

    def test_python_state_that_a_branch_on_the_rows_changes_is_still_seen(self, device):
        """Of the calls left out none was the one that shows it."""

        class Branching(nn.Module):
            large = 0

            def forward(self, x: Tensor) -> Tensor:
                if x.shape[0] > 4:
                    self.large += 1
                return x * 2

        model = sg.wrap(Branching().eval(), capture_sizes=[4, 8], batch_dims={"x": 0}, progress=False)
        for rows in (3, 3, 3, 5, 5, 8, 6):
            model(torch.randn(rows, WIDTH, device=device))
        assert model.large == 4

    def test_nothing_is_ahead_where_no_graph_is_to_come(self, device):
        class Reading(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x if x.sum().item() > 1e9 else x * 2

        model = sg.wrap(Reading().eval(), capture_sizes=[4], progress=False)
        for _ in range(3):
            model(torch.randn(4, WIDTH, device=device))
        assert model.graph_report().ahead == {}
        upfront = wrapped(device, capture="upfront")
        upfront(torch.randn(4, WIDTH, device=device))
        assert upfront.graph_report().ahead == {}
