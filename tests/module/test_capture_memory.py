"""Memory around captures: what was interrupted or repeated leaves nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import simplegraph as sg
from simplegraph.device.select import graph_device
from tests.support import reserved as support

ROWS, WIDTH = 4, 1 << 14

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


class Wide(nn.Module):
    """Makes a few tensors as large as its input, and calls `meanwhile` between them."""

    def __init__(self, meanwhile: Callable[[], object] = bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))
        self.meanwhile = meanwhile

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x * self.weight)
        self.meanwhile()
        return y * 2 + 1


def wide(device: torch.device, meanwhile: Callable[[], object] = bool, **settings: Any) -> Any:
    settings.setdefault("capture_sizes", [ROWS])
    return sg.wrap(Wide(meanwhile).to(device).eval(), progress=False, **settings)


def reserved(device: torch.device) -> int:
    gc.collect()
    graphs = graph_device(device)
    graphs.synchronize()
    graphs.release_cached_memory()
    return support.reserved(graphs)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
@pytest.mark.parametrize("upfront", [True, False])
def test_a_capture_that_is_broken_off_leaves_no_graph_memory(
    device: torch.device, error: type[BaseException], upfront: bool
) -> None:
    graphs, broken = graph_device(device), True

    def meanwhile() -> None:
        if broken and graphs.is_capturing():
            raise error

    wide(device).capture_graphs(torch.randn(ROWS, WIDTH, device=device))  # a process's first one allocates workspaces
    rows = 64 * ROWS  # 16 MiB, beside which what an allocator rounds is little
    model, x = wide(device, meanwhile, capture_sizes=[rows]), torch.randn(rows, WIDTH, device=device)
    expected = model.weight.mul(x).tanh() * 2 + 1
    model(x)
    before = reserved(device)
    for _ in range(2):
        try:
            if upfront:
                model.capture_graphs(x)
            else:
                model(x)
        except (KeyboardInterrupt, SystemExit):
            assert error is not RuntimeError
    assert reserved(device) <= before + x.nbytes + (8 << 20)  # static inputs stay, for the next try
    broken = False
    model.reset_graphs()
    for _ in range(4):
        torch.testing.assert_close(model(x), expected)
    assert model.graph_stats.replays >= 1


def test_a_hundred_captures_take_no_more_memory_than_one(device: torch.device) -> None:
    model, x = wide(device), torch.randn(ROWS, WIDTH, device=device)

    def once(lazy: bool) -> None:
        if not lazy:
            model.capture_graphs(x)
        for _ in range(3):
            model(x)
        model.reset_graphs()

    graphs, seen = graph_device(device), []
    for turn in range(100):
        once(lazy=bool(turn % 3))
        if turn % 10 == 9:
            gc.collect()
            seen.append(support.reserved(graphs))
    assert model.graph_stats.captures == 100
    assert max(seen) <= seen[0] + (64 << 20)  # pools that were dropped lately
    assert reserved(device) <= seen[0]


def test_objects_that_the_user_froze_stay_frozen(device: torch.device) -> None:
    frozen = vars(torch)  # as all libraries, by conftest.py; unfreezing them here would slow down all later tests
    assert gc.is_tracked(frozen)
    assert not any(each is frozen for each in gc.get_objects())
    model, x = wide(device), torch.randn(ROWS, WIDTH, device=device)
    for _ in range(3):
        model.capture_graphs(x)
        model(x)
        model.reset_graphs()
    assert not any(each is frozen for each in gc.get_objects())
