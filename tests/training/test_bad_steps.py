"""Steps that no graph can run: training goes on as eager's does, to the bit and to its end, and the reason is told."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training_cells import Cell, Training, unequal

import simplegraph as sg
from simplegraph.training.optimizers import unsuitable
from tests.training.models import square_step

CALLS = 10
LR = 0.0625  # the same number in every precision, on the host and on the device
Step = Callable[..., Tensor]


@dataclasses.dataclass
class Loop:
    """A model in training; `seen` is what its step notes."""

    model: nn.Sequential
    optimizer: torch.optim.Optimizer
    seen: list[float] = dataclasses.field(default_factory=list)

    def backward(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        return loss

    def plain(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.backward(x, y)
        self.optimizer.step()
        return loss.detach()


def _loop(device: torch.device) -> Loop:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
    return Loop(model, torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5, fused=True))


def _batch(device: torch.device, rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 6, device=device), torch.randn(rows, 2, device=device)


def _same_as_eager(
    device: torch.device,
    make: Callable[[Loop], Step],
    between: Callable[[Loop, int], None] = lambda loop, call: None,
    rows: Callable[[int], int] = lambda call: 4,
) -> Any:
    """Train eagerly and through `train_step`; return its step after both were found equal."""
    results, step = [], None
    for graphed in (False, True):
        loop = _loop(device)
        step = make(loop)
        if graphed:
            step = sg.train_step(step, optimizers=loop.optimizer, modules=[loop.model])
        losses = []
        for call in range(CALLS):
            torch.manual_seed(call)
            losses.append(step(*_batch(device, rows(call))).detach().clone())
            between(loop, call)
        results.append(([*losses, *(p.detach() for p in loop.model.parameters())], loop.seen))
    (expected, seen), (found, ours) = results
    assert [index for index, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)] == []
    assert ours == seen
    return step


def _reads_the_loss(loop: Loop) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loop.plain(x, y)
        loop.seen.append(loss.item())
        return loss

    return step


def _skips_large_gradients(loop: Loop) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = loop.backward(x, y)
        if nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0) < 2:
            loop.optimizer.step()
        return loss.detach()

    return step


def _has_a_hook_that_reads(loop: Loop) -> Step:
    loop.model[0].weight.register_hook(lambda gradient: loop.seen.append(float(gradient.norm())))
    return loop.plain


def _has_a_module_hook_that_reads(loop: Loop) -> Step:
    loop.model[0].register_full_backward_hook(lambda _, __, outputs: loop.seen.append(float(outputs[0].sum())))
    return loop.plain


@pytest.mark.parametrize(
    "make", [_reads_the_loss, _skips_large_gradients, _has_a_hook_that_reads, _has_a_module_hook_that_reads]
)
def test_a_step_that_reads_on_the_host_runs_eagerly(
    make: Callable[[Loop], Step], device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="simplegraph"):
        step = _same_as_eager(device, make)
    assert step.graph_stats.replays == 0
    assert "read back" in caplog.text
    assert sum(step.graph_stats.eager.values()) == CALLS
    assert step.graph_stats.eager["capture_failed"] > 0


def test_an_optimizer_that_calls_the_step_itself_runs_eagerly(device: torch.device) -> None:
    def make(loop: Loop) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            def closure() -> Tensor:
                return loop.backward(x, y)

            loss: Tensor = loop.optimizer.step(closure)
            return loss.detach()

        return step

    def with_lbfgs(loop: Loop) -> Step:
        loop.optimizer = torch.optim.LBFGS(loop.model.parameters(), lr=LR, max_iter=3)
        return make(loop)

    step = _same_as_eager(device, with_lbfgs)
    assert step.graph_stats.replays == 0
    assert "LBFGS" in str(step.graph_report())


def test_an_optimizer_that_reads_its_state_on_the_host_runs_eagerly_and_is_told_what_does(device: torch.device) -> None:
    def make(loop: Loop, **settings: Any) -> Step:
        loop.optimizer = torch.optim.Adagrad(loop.model.parameters(), lr=LR, **settings)
        return loop.plain

    step = _same_as_eager(device, make)
    assert step.graph_stats.replays == 0
    (told,) = [line for line in str(step.graph_report()).splitlines() if "Adagrad reads its step count" in line]
    if "pass fused=True" in told:
        assert _same_as_eager(device, functools.partial(make, fused=True)).graph_stats.replays > 0
    assert ("leaves the optimizer out of graphs" in told) is ("pass fused=True" not in told)


def test_adagrad_on_a_gpu_is_told_graphs_of_forward_and_backward() -> None:
    """Its fused form is refused there by some releases of torch."""
    optimizer = torch.optim.Adagrad([nn.Parameter(torch.ones(2, device="meta"))])
    assert unsuitable(optimizer).startswith("Adagrad reads its step count on the host; ")
    assert "simplegraph.wrap(model, training=True)" in unsuitable(optimizer)


def test_adagrad_trains_beside_graphs_of_forward_and_backward(device: torch.device) -> None:
    """What the message of a step says, where torch has no fused form."""
    found = []
    for graphs in ("", "pairs"):
        loop = _loop(device)
        step, called = square_step(loop.model, torch.optim.Adagrad(loop.model.parameters(), lr=LR), graphs)
        for call in range(CALLS):
            torch.manual_seed(call)
            step(_batch(device)[0])
        found.append([parameter.detach() for parameter in loop.model.parameters()])
    torch.testing.assert_close(found[1], found[0])
    assert called.graph_stats.replays > 0


def test_an_optimizer_without_its_fused_form_is_told_the_setting_that_would_do(device: torch.device) -> None:
    def make(loop: Loop) -> Step:
        loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=LR)
        return loop.plain

    step = _same_as_eager(device, make)
    if not step.graph_stats.replays:
        assert "fused=True" in str(step.graph_report())


def test_a_new_shape_at_every_step_is_bounded_and_told(device: torch.device) -> None:
    step = _same_as_eager(device, lambda loop: loop.plain, rows=lambda call: call + 1)
    assert step.graph_stats.replays == 0
    assert not step.graph_stats.graphs
    assert sum(step.graph_stats.eager.values()) == CALLS


def test_parameters_that_are_replaced_between_steps_are_trained(device: torch.device) -> None:
    def replace(loop: Loop, call: int) -> None:
        if call in (5, 7):
            head = nn.Linear(8, 2).to(device)
            loop.optimizer.param_groups[0]["params"] = [*loop.model[0].parameters(), *head.parameters()]
            loop.model[2] = head

    def make(loop: Loop) -> Step:
        loop.optimizer = torch.optim.AdamW(loop.model.parameters(), lr=LR, fused=True)
        return loop.plain

    step = _same_as_eager(device, make, replace)
    assert step.graph_stats.replays > 0


def test_data_that_is_replaced_between_steps_is_read(device: torch.device) -> None:
    def replace(loop: Loop, call: int) -> None:
        if call == 6:
            loop.model[0].weight.data = torch.full_like(loop.model[0].weight, 0.25)

    step = _same_as_eager(device, lambda loop: loop.plain, replace)
    assert step.graph_stats.replays > 0


def test_a_backward_outside_of_the_step_is_refused_before_anything_is_trained_wrong(device: torch.device) -> None:
    loop = _loop(device)
    step = sg.train_step(lambda x, y: F.mse_loss(loop.model(x), y), optimizers=loop.optimizer, modules=[loop.model])
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    with pytest.raises(sg.InputError, match=r"Call loss\.backward\(\) and optimizer\.step\(\) inside of the step"):
        step(*_batch(device)).backward()
    assert all(map(torch.equal, before, loop.model.parameters()))


def test_a_step_that_raises_once_trains_on(device: torch.device) -> None:
    def make(loop: Loop) -> Step:
        def step(x: Tensor, y: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise ValueError("a batch of three")
            return loop.plain(x, y)

        return step

    results = []
    for graphed in (False, True):
        loop = _loop(device)
        step: Any = make(loop)
        if graphed:
            step = sg.train_step(step, optimizers=loop.optimizer, modules=[loop.model])
        for call in range(CALLS):
            torch.manual_seed(call)
            if call in (2, 6):
                with pytest.raises(ValueError, match="a batch of three"):
                    step(*_batch(device, 3))
            else:
                step(*_batch(device))
        results.append([parameter.detach() for parameter in loop.model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
    assert step.graph_stats.replays > 0


def test_a_capture_that_fails_in_the_middle_of_training_loses_no_step(device: torch.device) -> None:
    """Weights, gradients, the optimizer's state, the scale and the next random numbers are eager's."""
    cell = Cell("mlp", "AdamW", "fp16", True, False, False, True, True)
    results = []
    for graphed in (False, True):
        training = Training(cell, device)
        for group in training.optimizer.param_groups:
            group["lr"] = LR
        seen: list[float] = []

        def reading(x: Tensor, y: Tensor, training: Training = training, seen: list[float] = seen) -> Tensor:
            loss = training.step(x, y)
            seen.append(float(loss))
            return loss

        step: Any = reading
        if graphed:
            parts = {"optimizers": training.optimizer, "scaler": training.scaler, "modules": [training.model]}
            step = sg.train_step(reading, **parts)
        losses = training.train(step, CALLS)
        draw = torch.rand(4, device=device)
        results.append((seen, training.state() | {"losses": torch.stack(losses), "next random numbers": draw}))
    (expected_seen, expected), (ours_seen, ours) = results
    assert unequal(ours, expected) == []
    assert ours_seen == expected_seen
    assert step.graph_stats.eager["capture_failed"] > 0


@pytest.mark.parametrize("named", ["none", "another"])
def test_an_optimizer_that_is_not_named_gets_its_learning_rate_at_every_step(device: torch.device, named: str) -> None:
    """Its rate would stay that of the capture."""
    results = []
    for kind in ("eager", "ours"):
        loop, other = _loop(device), _loop(device)
        step: Any = loop.plain
        if kind == "ours":
            step = sg.train_step(loop.plain, optimizers=[] if named == "none" else other.optimizer)
        torch.manual_seed(0)
        for rate in range(1, 9):
            loop.optimizer.param_groups[0]["lr"] = 0.01 * rate
            step(*_batch(device))
        results.append([parameter.detach().clone() for parameter in loop.model.parameters()])
    assert all(map(torch.equal, *results))
    assert step.graph_stats.replays == 0
    assert "which optimizers= does not name" in str(step.graph_report())


def test_mistakes_are_told_in_words_of_training(device: torch.device) -> None:
    """A newcomer's mistakes: a module in place of the step, settings that no step has, a list of losses."""
    loop = _loop(device)
    with pytest.raises(sg.ConfigError, match=r"train_step got a Sequential.*wrap\(module, training=True\)"):
        sg.train_step(loop.model, optimizers=loop.optimizer)
    with pytest.raises(sg.ConfigError, match="verify is 'yes'"):
        sg.train_step(loop.plain, optimizers=loop.optimizer, verify="yes")
    with pytest.raises(sg.ConfigError, match="scaler is True"):
        sg.train_step(loop.plain, optimizers=loop.optimizer, scaler=True)
    with pytest.raises(sg.ConfigError, match="optimizers has 'adamw'"):
        sg.train_step(loop.plain, optimizers="adamw")
    with pytest.raises(sg.ConfigError, match=r"wrap\(module, training=True\)"):
        sg.train_step(loop.plain, optimizers=loop.optimizer, training=True)
    with pytest.raises(sg.ConfigError, match="train_step"):
        sg.wrap(loop.plain, training=True)
    with pytest.raises(sg.ConfigError, match="nothing is padded"):
        sg.train_step(loop.plain, optimizers=loop.optimizer, length_dims={"x": 0}, lengths=[8])

    losses: list[Tensor] = []

    def keeps(x: Tensor, y: Tensor) -> Tensor:
        losses.append(loop.plain(x, y))
        return losses[-1]

    def reads(x: Tensor, y: Tensor) -> float:
        return loop.plain(x, y).item()

    x, y = _batch(device)
    steps = [sg.train_step(each, optimizers=loop.optimizer) for each in (keeps, reads, loop.plain)]
    for step, given in zip(steps, (x, x, x.clone().requires_grad_()), strict=True):
        for _ in range(4):
            step(given, y)
    kept, read, wanting = (str(step.graph_report()) for step in steps)
    assert "`losses` would keep a tensor" in kept
    assert "reached" not in kept
    assert "(x, which a training step is passed, or reads before it sets it: detach it)" in wanting
    assert "read back" in read
