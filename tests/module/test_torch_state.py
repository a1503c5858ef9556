"""Torch's settings around a call change its result: a replay never serves a call under other settings."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils.flop_counter import FlopCounterMode

import simplegraph as sg
from tests.module.answers import close, reasons
from tests.module.stateful import WIDTH, new, rows

pytestmark = pytest.mark.usefixtures("no_grad")


@contextlib.contextmanager
def switched(setter, value, before):
    setter(value)
    try:
        yield
    finally:
        setter(before)


def set_cudnn(value):
    torch.backends.cudnn.benchmark = value


def set_tf32(value):
    torch.backends.cuda.matmul.allow_tf32 = value


def default_device_is_set():
    return any(isinstance(mode, DeviceContext) for mode in torch.overrides._get_current_function_mode_stack())


# By what a forward can see of it: the context that changes it, and a function that tells.
SETTINGS = {
    "default dtype": (
        lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
        lambda: torch.zeros(()).element_size(),
    ),
    "TF32": (lambda: switched(set_tf32, True, False), lambda: torch.backends.cuda.matmul.allow_tf32),
    "matmul precision": (
        lambda: switched(torch.set_float32_matmul_precision, "high", "highest"),
        lambda: torch.get_float32_matmul_precision() == "high",
    ),
    "matmul precision, medium": (
        lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
        lambda: torch.get_float32_matmul_precision() == "medium",
    ),
    "deterministic": (
        lambda: switched(torch.use_deterministic_algorithms, True, False),
        torch.are_deterministic_algorithms_enabled,
    ),
    "cudnn flags": (lambda: torch.backends.cudnn.flags(enabled=False), lambda: torch.backends.cudnn.enabled),
    "cudnn attribute": (lambda: switched(set_cudnn, True, False), lambda: torch.backends.cudnn.benchmark),
    "attention kernel": (lambda: sdpa_kernel(SDPBackend.MATH), torch.backends.cuda.flash_sdp_enabled),
    "default device": (lambda: torch.device("cpu"), default_device_is_set),
}


class Told(nn.Module):
    def __init__(self, tell):
        super().__init__()
        self.tell = lambda: tell()  # no function that counts as code of the module

    def forward(self, x):
        return x * (float(self.tell()) + 2)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_replay_never_stands_for_a_call_under_other_settings(device, setting):
    change, tell = SETTINGS[setting]
    module = Told(tell).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    x = rows(4, device)
    for turn in range(12):
        with change() if turn // 3 % 2 else contextlib.nullcontext():
            close(model(x), module(x))
    assert model.graph_stats.captures == 2
    assert model.graph_stats.replays >= 8
    assert model.graph_stats.recaptures == 0


def test_settings_that_a_forward_changes_itself_cost_no_graph(device):
    class Attends(nn.Module):
        def forward(self, x):
            with sdpa_kernel(SDPBackend.MATH):
                return nn.functional.scaled_dot_product_attention(x, x, x)

    module = Attends().eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    x = torch.randn(4, 3, WIDTH, device=device)
    for _ in range(6):
        close(model(x), module(x))
    assert model.graph_stats.captures == 1
    assert model.graph_stats.replays >= 4


def linear(device):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    x = rows(4, device)
    for _ in range(3):
        model(x)
    return model, module, x


def test_a_mode_that_counts_operators_sees_them(device):
    model, _, x = linear(device)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() == 2 * 4 * WIDTH * WIDTH
    assert reasons(model)["transformed"] == 1
    model(x)
    assert model.graph_stats.replays == 3


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is nn.functional.linear else result


@pytest.mark.parametrize("captured", [True, False])
def test_a_mode_that_changes_functions_changes_the_answer(device, captured):
    model, module, x = linear(device)
    if not captured:
        model.reset_graphs()
    with Doubling():
        for _ in range(4):
            close(model(x), module(x))
    assert reasons(model)["transformed"] == 4
    for _ in range(3):
        close(model(x), module(x))


def test_a_hook_on_all_modules_is_called(device):
    model, module, x = linear(device)
    calls = []
    for register in (module_hooks.register_module_forward_hook, module_hooks.register_module_forward_pre_hook):
        handle = register(lambda *call: calls.append(call[0]))
        for _ in range(2):
            model(x)
        assert calls == [module] * 2 or [type(call) for call in calls] == [type(model)] * 2
        calls.clear()
        handle.remove()
        before = model.graph_stats.replays
        model(x)
        assert not calls
        assert model.graph_stats.replays == before + 1
    assert reasons(model)["hooks"] == 4


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def test_the_cache_of_a_parametrization_is_not_read_after_it_is_gone(device):
    module = nn.Linear(WIDTH, WIDTH).to(device).eval()
    parametrize.register_parametrization(module, "weight", Doubled())
    original = module.parametrizations.weight.original
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    x = rows(4, device)
    for _ in range(2):
        with parametrize.cached():
            for _ in range(4):
                close(model(x), module(x))
            original.mul_(2)  # eager goes on reading the cache
            close(model(x), module(x))
        for _ in range(4):
            close(model(x), module(x))
    assert reasons(model)["transformed"] == 10
    assert model.graph_stats.replays >= 4


class Wanting(nn.Module):
    """Multiplies by a tensor that requires grad and is no parameter."""

    def __init__(self, where, device):
        super().__init__()
        scale = new(torch.empty(WIDTH, device=device)).requires_grad_()
        self.scale = scale if where == "attribute" else None
        self.scales = [scale] if where == "list" else []
        self.hidden = [nn.Linear(WIDTH, 1, device=device)] if where == "hidden module" else []
        self.register_buffer("buffer", scale if where == "buffer" else None)
        self.get = (lambda: scale) if where == "closure" else (lambda: None)
        self.leaf = self.hidden[0].bias if self.hidden else scale

    def forward(self, x):
        for tensor in (self.scale, self.buffer, self.get(), *self.scales, *(layer.bias for layer in self.hidden)):
            if tensor is not None:
                x = x * tensor
        return x


@pytest.mark.parametrize("graded", ["first", "after replays"])
@pytest.mark.parametrize("where", ["attribute", "list", "hidden module", "buffer", "closure"])
def test_gradients_reach_whatever_requires_them(device, where, graded):
    module = Wanting(where, device).eval()
    model = sg.wrap(module, capture_sizes=[4], progress=False)
    x = rows(4, device)
    if graded == "after replays":
        for _ in range(3):
            close(model(x), module(x))
        assert model.graph_stats.replays
    for count in range(1, 5):
        with torch.enable_grad():
            model(x).sum().backward()
        close(module.leaf.grad.sum(), count * x.sum())
    with torch.no_grad():
        close(model(x), module(x))
