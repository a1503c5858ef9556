"""Stale graphs where only a GPU shows them: other kernels by TF32, and memory that is freed and used again."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import simplegraph as sg

pytestmark = pytest.mark.usefixtures("no_grad")
WIDTH = 1024


@pytest.fixture(autouse=True)
def _tf32_put_back():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def replayed(module, x):
    model = sg.wrap(module.eval(), capture_sizes=[len(x)], progress=False)
    for _ in range(3):
        model(x)
    assert model.graph_stats.replays
    return model


@pytest.mark.parametrize("switch", ["precision", "allow_tf32"])
def test_tf32_switched_after_a_capture_is_obeyed(device, switch):
    def set_tf32(on):
        if switch == "precision":
            torch.set_float32_matmul_precision("high" if on else "highest")
        else:
            torch.backends.cuda.matmul.allow_tf32 = on

    set_tf32(False)
    module = nn.Linear(WIDTH, WIDTH, device=device)
    x = torch.randn(64, WIDTH, device=device)
    model = replayed(module, x)
    exact = module(x)
    for on in (True, False, True):
        set_tf32(on)
        for _ in range(4):
            torch.testing.assert_close(model(x), module(x), rtol=0, atol=3e-5)  # TF32 is ten times as far off
        assert bool((module(x) - exact).abs().max() > 1e-4) is on
    assert model.graph_stats.captures == 2


def test_tf32_of_convolutions_is_obeyed(device):
    torch.backends.cudnn.allow_tf32 = False
    module = nn.Conv2d(64, 64, 3, device=device)
    x = torch.randn(8, 64, 32, 32, device=device)
    model = replayed(module, x)
    for on in (True, False):
        torch.backends.cudnn.allow_tf32 = on
        for _ in range(4):
            torch.testing.assert_close(model(x), module(x), rtol=0, atol=1e-6)
    assert model.graph_stats.captures == 2


def test_the_attention_kernel_that_is_asked_for_runs(device):
    class Attend(nn.Module):
        def forward(self, q):
            return nn.functional.scaled_dot_product_attention(q, q, q)

    x = torch.randn(4, 8, 128, 64, device=device, dtype=torch.float16)
    module = Attend()
    model = replayed(module, x)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            for _ in range(4):
                torch.testing.assert_close(model(x), module(x), rtol=1e-3, atol=1e-3)
    assert model.graph_stats.captures == 3


class Around:
    def __init__(self, value):
        self.value = value


class Buried(nn.Module):
    """Reads a tensor more objects deep than calls look."""

    def __init__(self, device):
        super().__init__()
        self.deep = Around(torch.randn(WIDTH, WIDTH, device=device))
        for _ in range(4):
            self.deep = Around(self.deep)

    def forward(self, x):
        return x @ self.deep.value.value.value.value.value


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_tensor_deeper_than_calls_look_is_read_while_it_lives_and_its_end_is_noticed(device, is_kept):
    module = Buried(device)
    x = torch.randn(8, WIDTH, device=device)
    model = replayed(module, x)
    innermost = module.deep.value.value.value.value
    kept, before = innermost.value if is_kept else None, model(x)
    innermost.value = torch.randn(WIDTH, WIDTH, device=device)
    gc.collect()
    junk = [torch.full((WIDTH, WIDTH), float("nan"), device=device) for _ in range(64)]
    torch.testing.assert_close(model(x), module(x) if kept is None else before)
    del junk


@pytest.mark.parametrize("how", ["assigned", "loaded", "converted"])
def test_replaced_weights_are_free_before_the_next_call(device, how):
    module = nn.Linear(8 * WIDTH, 4 * WIDTH, device=device).requires_grad_(False)
    x = torch.randn(8, 8 * WIDTH, device=device)
    model = replayed(module, x)
    size = module.weight.nbytes
    state = {name: torch.randn_like(value) for name, value in module.state_dict().items()}
    gc.collect()
    held = torch.cuda.memory_allocated(device)
    if how == "assigned":
        module.weight = nn.Parameter(state.pop("weight"), requires_grad=False)
    elif how == "loaded":
        module.load_state_dict(state, assign=True)
        state.clear()
    else:
        state.clear()
        module.half()
        x = x.half()
    gc.collect()
    assert torch.cuda.memory_allocated(device) <= held - size / 2
    for _ in range(4):
        torch.testing.assert_close(model(x), module(x), rtol=1e-2, atol=1e-2)


def test_memory_that_a_new_weight_takes_over_is_read_as_the_new_weight(device):
    """The allocator gives a new weight the old one's address: the graph reads it there, or is captured again."""
    module = nn.Linear(WIDTH, WIDTH, device=device).requires_grad_(False)
    x = torch.randn(8, WIDTH, device=device)
    model = replayed(module, x)
    for _ in range(3):
        module.weight = None
        module.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device=device), requires_grad=False)
        for _ in range(3):
            torch.testing.assert_close(model(x), module(x))
