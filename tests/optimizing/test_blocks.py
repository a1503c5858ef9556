"""Blocks of convolutions run bias, sum and activation as one, and answer as they are written."""

from __future__ import annotations

import collections
import copy
import threading
import time
from unittest import mock

import pytest
import torch
from torch import nn

import simplegraph as sg
from simplegraph.fused.optimizing.folded import Fold
from simplegraph.fused.torch_operators import Operators
from tests.optimizing.models import settle

SHAPE = (2, 3, 16, 16)


class Kernels(Operators):
    """Torch's operators in the place of Triton's kernels; counts what follows convolutions."""

    name, triton = "kernels", True

    def __init__(self):
        self.calls = collections.Counter()

    def finish(self, x, bias, residual, kind, factor=None):
        assert x.is_contiguous(memory_format=torch.channels_last)
        self.calls[kind, residual is not None] += 1
        return super().finish(x, bias, residual, kind, factor)


@pytest.fixture
def kernels(monkeypatch):
    found = Kernels()
    monkeypatch.setattr("simplegraph.fused.optimizing.optimize.operators_of", lambda *args: found)
    with torch.no_grad():
        yield found


def stack():
    return settle(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
            *(nn.Conv2d(8, 8, 3, padding_mode="circular"), nn.BatchNorm2d(8), nn.Tanh()),
            nn.Conv2d(8, 4, 3),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU()),
        )
    )


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_sequence_runs_what_follows_each_convolution_as_one(kernels):
    module, x = stack(), torch.randn(SHAPE)
    expected = module(x)
    handle = sg.optimize(module)
    assert handle.changed["epilogue"] == ["Sequential"]
    close(module(x), expected)
    assert kernels.calls == {("relu", False): 1, ("silu", False): 1, ("", False): 1}
    handle.remove()
    assert torch.equal(module(x), expected)
    handle = sg.optimize(module, skip=["epilogue"])
    kernels.calls.clear()
    close(module(x), expected)
    assert not kernels.calls
    assert "epilogue" not in handle.changed


def test_the_norms_factors_are_rounded_into_no_weight(kernels):
    layers = [part for _ in range(6) for part in (nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())]
    module, x = settle(nn.Sequential(*layers)).bfloat16(), torch.randn(4, 8, 16, 16).bfloat16()
    exact = copy.deepcopy(module).double()(x.double())

    def error():
        return float((module(x).double() - exact).norm() / exact.norm())

    was = error()
    sg.optimize(module)
    assert error() <= 1.1 * was
    assert kernels.calls == {("relu", False): 6}


def test_a_module_in_float64_keeps_its_precision(kernels):
    module, x = stack(), torch.randn(SHAPE, dtype=torch.float64)
    expected = copy.deepcopy(module).double()(x)
    sg.optimize(module)
    torch.testing.assert_close(module.double()(x), expected, rtol=1e-12, atol=1e-12)
    assert sum(kernels.calls.values()) == 3


def test_hooks_run_where_the_module_has_them(kernels):
    module, x = stack(), torch.randn(SHAPE)
    expected, seen = module(x), []
    sg.optimize(module)
    module[2].register_forward_hook(lambda module, args, output: seen.append(output.min()))
    module[4].register_forward_hook(lambda module, args, output: seen.append(output.min()))
    close(module(x), expected)
    assert seen[0] == 0  # the ReLU ran by itself
    assert len(seen) == 2
    assert kernels.calls == {("", False): 2}


def test_weights_that_are_loaded_and_inputs_with_gradients_are_served(kernels):
    module, x = stack(), torch.randn(SHAPE)
    sg.optimize(module)
    other = stack()
    module.load_state_dict(other.state_dict())
    close(module(x), other(x))
    module.requires_grad_(False)
    with torch.enable_grad():
        x.requires_grad_()
        module(x).sum().backward()
        found, x.grad = x.grad, None
        other(x).sum().backward()
    close(found, x.grad)


def test_graphs_of_blocks_are_replayed_and_follow_the_weights(kernels):
    module, x = stack(), torch.randn(SHAPE)
    sg.optimize(module)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        found = model(x)
    assert model.graph_stats.replays >= 2
    module[0].weight.mul_(2)
    again = model(x)
    plain = copy.deepcopy(module)
    close(again, plain(x))
    assert not torch.allclose(found, again)


def test_no_weight_is_kept_twice_where_a_block_runs_the_layer_s_own(kernels):
    """What such a block refuses runs layer and norm as they are written; others keep folded weights."""
    layers = (nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64)), (nn.Conv2d(64, 8, 1), nn.BatchNorm2d(8))
    apart = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Identity(), nn.BatchNorm2d(8))  # no block runs these as one
    module, x = settle(nn.Sequential(*layers[0], *layers[1], apart)), torch.randn(2, 64, 9, 9)
    expected = module(x)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = module(x)
    handle = sg.optimize(module, x)
    assert len(handle.changed["batch_norm"]) == 3
    folded = module[2].weight.nbytes + apart[0].weight.nbytes
    vectors = 2 * 64 * 4 + 2 * 3 * 8 * 4
    assert folded < handle.extra_bytes <= folded + vectors + 10 * 256
    close(module(x), expected)
    kernels.calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(module(x), rounded, rtol=0.05, atol=0.05)
    assert not kernels.calls
    module[0].weight.mul_(2)
    close(module(x), copy.deepcopy(module)(x))
    assert sum(kernels.calls.values()) == 2


def tile(channels=3, window=3, stride=1, **settings):
    convolution = nn.Conv2d(channels, 8, window, stride, **settings)
    return settle(nn.Sequential(convolution, nn.BatchNorm2d(8), nn.ReLU()))


# Of these the weight itself tells torch no format.
OTHER_FORMATS = {
    "one channel": (lambda: tile(1), True),
    "one pixel": (lambda: tile(3, 1, 2), True),
    "each channel by itself": (lambda: tile(8, padding="same", groups=8), True),
    "shared with processes": (lambda: tile().share_memory(), False),
}


@pytest.mark.parametrize("name", OTHER_FORMATS)
def test_what_follows_is_one_kernel_in_whatever_format_a_weight_lies(name, kernels):
    make, stored = OTHER_FORMATS[name]
    module = make()
    x = torch.randn(2, module[0].in_channels, 9, 9)
    expected = module(x)
    handle = sg.optimize(module)
    close(module(x), expected)  # `Kernels` refuses images in another format
    assert handle.changed["channels_last"] == ["0"] * stored
    module.load_state_dict(make().state_dict(), assign=True)
    close(module(x), copy.deepcopy(module)(x))
    assert kernels.calls == {("relu", False): 2}


def test_graphs_follow_statistics_of_a_training_step_between_two_replays(kernels):
    module, x = stack(), torch.randn(SHAPE)
    sg.optimize(module)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        model(x)
    replays = model.graph_stats.replays
    module.train()(torch.randn(4, 3, 16, 16) + 1)
    module.eval()
    close(model(x), copy.deepcopy(module)(x))
    assert model.graph_stats.replays == replays + 1


def test_threads_never_get_what_another_is_still_folding(kernels, monkeypatch):
    module, x = stack(), torch.randn(SHAPE)
    sg.optimize(module)
    module[0].weight.mul_(2)
    module[1].weight.mul_(2)
    expected, folding = copy.deepcopy(module)(x), threading.Event()
    compute = Fold.compute

    def slow_compute(fold):
        folding.set()
        time.sleep(0.05)  # the other thread runs beside this
        return compute(fold)

    monkeypatch.setattr(Fold, "compute", slow_compute)
    other = threading.Thread(target=torch.no_grad()(module), args=(x,))
    other.start()
    assert folding.wait(20)
    found = module(x)
    other.join()
    close(found, expected)


def test_folding_that_failed_is_tried_again(kernels, monkeypatch):
    module, x = stack(), torch.randn(SHAPE)
    sg.optimize(module)
    module.load_state_dict(stack().state_dict())
    with monkeypatch.context() as patch:
        patch.setattr(Fold, "compute", mock.Mock(side_effect=torch.OutOfMemoryError("for a moment")))
        with pytest.raises(torch.OutOfMemoryError):
            module(x)
    close(module(x), copy.deepcopy(module)(x))


def vision(name):
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    return settle(getattr(models, name)(weights=None))


# What follows a convolution, with a sum or not, and how often.
FINISHED = {
    "resnet18": {("relu", False): 9, ("relu", True): 8, ("", False): 3},
    "resnet50": {("relu", False): 33, ("relu", True): 16, ("", False): 4},
    "efficientnet_b0": {("silu", False): 33, ("", True): 9, ("", False): 7},
}


@pytest.mark.parametrize("name", FINISHED)
def test_blocks_of_torchvision_are_known(name, kernels):
    module, x = vision(name), torch.randn(1, 3, 64, 64)
    before = [type(each) for each in module.modules()]
    handle = sg.optimize(module, x)
    kernels.calls.clear()
    module(x)
    assert kernels.calls == FINISHED[name]
    handle.remove()
    assert [type(each) for each in module.modules()] == before


@pytest.mark.parametrize("by_window", [True, False])
def test_depthwise_weights_lie_as_the_kernel_that_runs_reads_them(by_window, kernels, monkeypatch):
    strides = []

    def depthwise(x, weight, *rest):
        strides.append(weight.permute(2, 3, 1, 0).is_contiguous())
        return Operators.depthwise(kernels, x, weight, *rest)

    monkeypatch.setattr("simplegraph.fused.optimizing.folded.triton_runs", lambda device: by_window)
    monkeypatch.setattr(kernels, "depthwise", depthwise, raising=False)
    module, x = stack(), torch.randn(SHAPE)
    expected = module(x)
    handle = sg.optimize(module)
    close(module(x), expected)
    module[3].weight.mul_(-0.5)  # folded again, into the same memory
    found = module(x)
    assert strides == [by_window] * 2
    handle.remove()
    close(found, module(x))
    assert not torch.allclose(found, expected)


def test_only_kernels_that_will_run_are_tried(monkeypatch):
    tried = []
    monkeypatch.setattr(
        "simplegraph.fused.optimizing.optimize.operators_of", lambda *args: tried.append(args[3:]) or Kernels()
    )
    sg.optimize(stack())
    trials = tried.pop()
    finished = [trial.sizes for trial in trials if trial.operator == "finish"]
    assert finished == [("", 0, 1), ("relu", 0, 1), ("silu", 0, 1)]
    assert [trial.sizes for trial in trials if trial.operator == "depthwise"] == [(3,)]
    sg.optimize(vision("resnet18"))
    finished = [trial.sizes for trial in tried.pop() if trial.operator == "finish"]
    assert finished == [("", 0, 1), ("relu", 0, 1), ("relu", 1, 1)]


def test_a_block_whose_parts_are_not_its_class_s_runs_as_it_is_written(kernels, monkeypatch):
    module, x = vision("resnet18"), torch.randn(1, 3, 64, 64)
    module.layer1[0].relu = nn.Tanh()
    module.layer2[0].bn2 = nn.Identity()
    module.eval()
    expected = module(x)
    sg.optimize(module)
    norms = mock.Mock(wraps=nn.functional.batch_norm)
    monkeypatch.setattr(nn.functional, "batch_norm", norms)
    close(module(x), expected)
    assert sum(kernels.calls.values()) == 20 - 4
    assert not norms.called  # all are folded
