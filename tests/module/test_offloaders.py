"""An offloader keeps a block's weights on the host, and moves them in before the block runs and out after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from tests.module.answers import close, reasons

WIDTH, CALLS = 8, 24


class Offloader:
    """Writes a block's weights into the device's memory that they have, and out of it."""

    def __init__(self, block: nn.Module) -> None:
        self.block = block
        self.host = {name: weight.detach().cpu().clone() for name, weight in block.named_parameters()}

    def fetch(self, *_: object) -> None:
        for name, weight in self.block.named_parameters():
            weight.data.copy_(self.host[name])

    def release(self, *_: object) -> None:
        for _, weight in self.block.named_parameters():
            weight.data.fill_(float("nan"))


class ByData(Offloader):
    """Gives the weights other memory at each call."""

    def fetch(self, *_: object) -> None:
        for name, weight in self.block.named_parameters():
            weight.data = self.host[name].to(weight.device, copy=True)

    def release(self, *_: object) -> None:
        for _, weight in self.block.named_parameters():
            weight.data = weight.data.new_empty(0)


class ByResizing(Offloader):
    """Frees the storages, as sharded training does."""

    def fetch(self, *_: object) -> None:
        for name, weight in self.block.named_parameters():
            weight.untyped_storage().resize_(self.host[name].nbytes)
            weight.data.copy_(self.host[name])

    def release(self, *_: object) -> None:
        for _, weight in self.block.named_parameters():
            weight.untyped_storage().resize_(0)


class ByReplacing(Offloader):
    """Puts other parameters in their place, on the meta device while they are out, as accelerate does."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__(block)
        self.device = next(block.parameters()).device

    def _put(self, make: Callable[[Tensor], Tensor]) -> None:
        for name, value in self.host.items():
            place, _, leaf = name.rpartition(".")
            self.block.get_submodule(place)._parameters[leaf] = nn.Parameter(make(value), requires_grad=False)

    def fetch(self, *_: object) -> None:
        self._put(lambda value: value.to(self.device, copy=True))

    def release(self, *_: object) -> None:
        self._put(lambda value: value.to("meta"))


KINDS = [Offloader, ByData, ByResizing, ByReplacing]


def model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), block, nn.Linear(WIDTH, WIDTH)).to(device).eval()


def trained(plain: nn.Sequential, offloader: Offloader, number: int) -> None:
    """Change the block's weights, here and on the host: every second time by other tensors."""
    with torch.no_grad():
        for name, weight in plain[2].named_parameters():
            weight.add_(0.1)
            if number % 2:
                offloader.host[name] = weight.detach().cpu().clone()
            else:
                offloader.host[name].copy_(weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_grad")
def test_weights_that_are_moved_around_each_call_are_those_of_that_call(device, kind):
    plain, module = model(device), model(device)
    offloader, wrapped = kind(module[2]), sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for number in range(CALLS):
        if number % 4 == 3:
            trained(plain, offloader, number)
        x = torch.randn(2 + number % 3, WIDTH, device=device)
        offloader.fetch()
        close(wrapped(x), plain(x))
        offloader.release()
    if kind is Offloader:
        assert wrapped.graph_stats.replays > CALLS / 2
    else:
        assert reasons(wrapped)["stale_too_often"] > CALLS / 2, "captures stop, since no graph would live"
        assert wrapped.graph_stats.captures <= 4


@pytest.mark.parametrize("on", ["the wrapper", "the block"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("no_grad")
def test_hooks_that_move_weights_in_and_out_are_never_left_out(device, kind, on):
    plain, module = model(device), model(device)
    offloader, wrapped = kind(module[2]), sg.wrap(module, capture_sizes=[2, 4], progress=False)
    owner = wrapped if on == "the wrapper" else module[2]
    owner.register_forward_pre_hook(offloader.fetch)
    owner.register_forward_hook(offloader.release)
    offloader.release()
    for number in range(CALLS):
        if number % 4 == 3:
            trained(plain, offloader, number)
        x = torch.randn(2 + number % 3, WIDTH, device=device)
        close(wrapped(x), plain(x))
    stats = wrapped.graph_stats
    assert stats.replays + sum(stats.eager.values()) == CALLS


@pytest.mark.parametrize("kind", [ByData, ByReplacing])
@pytest.mark.usefixtures("no_grad")
def test_a_call_whose_weights_are_out_raises_as_in_eager(device, kind):
    module = model(device)
    offloader, wrapped = kind(module[2]), sg.wrap(module, capture_sizes=[2], progress=False)
    x = torch.randn(2, WIDTH, device=device)
    for _ in range(4):
        wrapped(x)
    assert wrapped.graph_stats.replays > 0
    offloader.release()
    for _ in range(3):
        with pytest.raises((RuntimeError, NotImplementedError)):
            module(x)
        with pytest.raises((RuntimeError, NotImplementedError)):
            wrapped(x)
    offloader.fetch()
    close(wrapped(x), module(x))
    before = wrapped.graph_stats.replays
    for _ in range(4):
        close(wrapped(x), module(x))
    assert wrapped.graph_stats.replays > before, "what stays in its place is captured again"


@pytest.mark.usefixtures("no_grad")
def test_blocks_that_take_turns_in_one_memory(device):
    """A fetch overwrites what the block before read."""
    torch.manual_seed(0)
    plain, module = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device).eval() for _ in range(2))
    module.load_state_dict(plain.state_dict())
    offloaders = [Offloader(block) for block in module]
    for block, offloader in zip(module, offloaders, strict=True):
        block.weight.data, block.bias.data = module[0].weight.data, module[0].bias.data
        block.register_forward_pre_hook(offloader.fetch)
    wrapped = sg.wrap(module, capture_sizes=[2, 4], progress=False)
    for number in range(CALLS):
        x = torch.randn(2 + number % 3, WIDTH, device=device)
        close(wrapped(x), plain(x))
    if device.type == "cpu":  # CUDA refuses to capture copies of pageable memory
        assert wrapped.graph_stats.replays > CALLS / 2


@pytest.mark.usefixtures("no_grad")
def test_an_offloader_in_an_eager_break_fetches_at_every_replay(device):
    plain, module = model(device), model(device)
    offloader = Offloader(module[2])
    module[2].register_forward_pre_hook(sg.eager_break(offloader.fetch))
    wrapped = sg.wrap(module, mode="PIECEWISE", capture_sizes=[2, 4], progress=False)
    for number in range(CALLS):
        if number % 4 == 3:
            trained(plain, offloader, number)
        x = torch.randn(2 + number % 3, WIDTH, device=device)
        close(wrapped(x), plain(x))
        offloader.release()
    assert wrapped.graph_stats.replays > CALLS / 2


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_out_between_a_step_and_the_next_are_trained_as_in_eager(device, kind):
    plain, module = model(device).train(), model(device).train()
    wrapped = sg.wrap(module, training=True, progress=False)
    # The block is frozen: its weights are read by the backward, and are other memory at each step.
    for each in (plain, module):
        each[2].requires_grad_(False)
    offloader = kind(module[2])
    steps = [
        torch.optim.SGD([weight for weight in m.parameters() if weight.requires_grad], 0.1) for m in (plain, module)
    ]
    for _ in range(12):
        x = torch.randn(2, WIDTH, device=device)
        offloader.fetch()
        for called, step in zip((plain, wrapped), steps, strict=True):
            step.zero_grad()
            called(x).square().mean().backward()
            step.step()
        offloader.release()
    for one, other in zip(plain[0].parameters(), module[0].parameters(), strict=True):
        close(one, other)
