"""Train one model in eager and one in graphs, side by side, and compare everything to the bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import simplegraph as sg


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


class Training:
    """A model, its optimizer, and a step; `graphed` puts the step into graphs.

    Args:
        make: makes (step function, model, optimizers, scaler or None) after a fixed seed.
        graphed: whether the step goes through graphs.
        **settings: of `train_step`.
    """

    def __init__(self, make: Callable[[], Any], *, graphed: bool, **settings: Any) -> None:
        torch.manual_seed(0)
        self.function, self.model, self.optimizers, *more = make()
        self.scaler = more[0] if more else None
        self.random = _random_states()
        self.step: Any = self.function
        if graphed:
            self.step = sg.train_step(self.function, optimizers=self.optimizers, scaler=self.scaler, **settings)

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        """Run one step with this training's own random numbers; return everything that it did."""
        self.own_random()
        loss = self.step(*args, **kwargs)
        self.keep_random()
        return [_copy(loss), *self.everything(), *self.random]

    def own_random(self) -> None:
        """Let the random numbers that are drawn next be this training's."""
        torch.set_rng_state(self.random[0])
        for state in self.random[1:]:
            torch.cuda.set_rng_state(state)

    def keep_random(self) -> None:
        """Go on from these random numbers the next time."""
        self.random = _random_states()

    def everything(self) -> list[Any]:
        """Copy all parameters, buffers, gradients and optimizer states."""
        found: list[Any] = [_copy(tensor) for tensor in self.model.state_dict().values()]
        found += [_copy(parameter.grad) for parameter in self.model.parameters()]
        optimizers = self.optimizers if isinstance(self.optimizers, list) else [self.optimizers]
        for optimizer in optimizers:
            for state in optimizer.state.values():
                found += [_copy(value) for value in state.values()]
            found += [float(group["lr"]) for group in optimizer.param_groups]
        if self.scaler is not None:
            found += [_copy(self.scaler._scale), _copy(self.scaler._growth_tracker)]
        return found


def _random_states() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else [])]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


class Twins:
    """Two trainings that start alike, one of them in graphs."""

    def __init__(self, make: Callable[[], Any], **settings: Any) -> None:
        self.eager = Training(make, graphed=False)
        self.graphs = Training(make, graphed=True, **settings)

    @property
    def step(self) -> Any:
        return self.graphs.step

    @property
    def stats(self) -> Any:
        return self.step.graph_stats

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step of both, and compare all that they did; return the loss."""
        expected = self.eager.run(*args, **kwargs)
        actual = self.graphs.run(*args, **kwargs)
        assert_same(actual, expected)
        return actual[0]

    def both(self, change: Callable[[Training], Any]) -> None:
        """Do the same to both."""
        for each in (self.eager, self.graphs):
            change(each)


def assert_same(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if isinstance(other, Tensor):
            assert isinstance(one, Tensor), (index, one)
            assert one.dtype == other.dtype
            assert torch.equal(one.nan_to_num(7.5), other.nan_to_num(7.5)), (index, one, other)
        else:
            assert one == other, index


def small_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 3))


def batch(number: int, rows: int = 8, device: Any = "cpu") -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 6, generator=generator)
    return x.to(device), torch.randint(0, 3, (rows,), generator=generator).to(device)


def classifying(
    optimizer: Any,
    model: Any = small_model,
    device: str = "cpu",
    *,
    to_none: bool = True,
    clip: bool = True,
    cast: Any = None,
) -> Callable[[], Any]:
    """Make training steps of a model, whose optimizer `optimizer` makes of parameters; autocast to `cast`, if given."""

    def make() -> Any:
        trained = model().to(device)
        chosen = optimizer(trained.parameters())

        def step_fn(x: Tensor, y: Tensor) -> Tensor:
            chosen.zero_grad(set_to_none=to_none)
            with torch.autocast(device, cast) if cast else contextlib.nullcontext():
                loss = F.cross_entropy(trained(x), y)
            loss.backward()
            if clip:
                torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            chosen.step()
            return loss

        return step_fn, trained, chosen

    return make


def accumulating(optimizer: Any, device: str = "cpu") -> Callable[[], Any]:
    """Make training steps that add gradients up, until a call is the `last` of a batch."""

    def make() -> Any:
        trained = small_model().to(device)
        chosen = optimizer(trained.parameters())

        def step_fn(x: Tensor, y: Tensor, last: bool) -> Tensor:
            loss = F.cross_entropy(trained(x), y) / 2
            loss.backward()
            if last:
                chosen.step()
                chosen.zero_grad()
            return loss

        return step_fn, trained, chosen

    return make


def _update(scaler: Any, loss: Tensor) -> None:
    scaler.update()


def scaling(
    optimizer: Any,
    device: str = "cpu",
    cast: Any = torch.bfloat16,
    *,
    unscale: bool = True,
    growth: int = 3,
    end: Any = _update,
) -> Callable[[], Any]:
    """Make training steps with a gradient scaler; `end(scaler, loss)` ends each."""

    def make() -> Any:
        trained = small_model().to(device)
        chosen = optimizer(trained.parameters())
        scaler = torch.amp.GradScaler(device, init_scale=2.0**8, growth_interval=growth)

        def step_fn(x: Tensor, y: Tensor) -> Tensor:
            chosen.zero_grad()
            with torch.autocast(device, cast):
                loss = F.cross_entropy(trained(x), y)
            scaler.scale(loss).backward()
            if unscale:
                scaler.unscale_(chosen)
                torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            scaler.step(chosen)
            end(scaler, loss)
            return loss

        return step_fn, trained, chosen, scaler

    return make
