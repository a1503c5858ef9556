"""Models of torchvision and diffusers: their known layers run on fused operators, and answer as they are written."""

from __future__ import annotations

import collections
import copy
import functools
import importlib
from unittest import mock

import pytest
import torch

import simplegraph as sg
from bench.optimized.shapes import MODELS
from simplegraph.fused.optimizing.pairs import REWRITES
from simplegraph.fused.torch_operators import Operators

COUNTED = ("group_norm", "adapt", "linear_gelu", "pointwise", "depthwise", "finish", "excite", "gated")


class Counted(Operators):
    """Torch's operators in the place of Triton's kernels; counts them."""

    name, triton = "kernels", True

    def __init__(self):
        self.calls = collections.Counter()

    def __getattribute__(self, name):
        if name in COUNTED:
            self.calls[name] += 1
        return super().__getattribute__(name)


@pytest.fixture
def kernels(monkeypatch):
    found = Counted()
    monkeypatch.setattr("simplegraph.fused.optimizing.optimize.operators_of", lambda *args: found)
    with torch.no_grad():
        yield found


# Of the tiny shapes in `bench.optimized`: the fused operators of a call, and the layers by rewrite.
EXPECTED = {
    "unet": (
        {"group_norm": 16 + 4 + 1, "adapt": 8, "finish": 8 + 5, "pointwise": 5, "gated": 4},
        {
            **{"image_block": 8 + 4, "residual": 4, "gated": 4, "attention": 8, "projections": 8},
            **{"group_norm": 21, "timesteps": 1},
        },
    ),
    "dit": (
        {"adapt": 4, "linear_gelu": 2, "finish": 2},
        {"adaptive_norm": 2, "activation": 2, "attention": 2, "timesteps": 3, "projections": 2},
    ),
    "convnext": ({"adapt": 2}, {"image_block": 2}),
    "efficientnet": (
        {"excite": 16, "finish": 49, "pointwise": 7, "depthwise": 16},
        {"image_block": 16, "batch_norm": 49, "epilogue": 49 + 16},
    ),
}


def served(name):
    pytest.importorskip(MODELS[name].package)
    torch.manual_seed(0)
    module = MODELS[name].build(True).eval()
    return module, MODELS[name].optimized(module), MODELS[name].inputs(True, 2)


def close(found, expected):
    scale = float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=2e-5 * scale)


@pytest.mark.parametrize("name", EXPECTED)
def test_known_layers_run_on_fused_operators(name, kernels):
    module, inner, inputs = served(name)
    expected = module(*inputs)
    handle = sg.optimize(inner)
    kernels.calls.clear()
    close(module(*inputs), expected)
    calls, changed = EXPECTED[name]
    assert kernels.calls == calls
    found = {kind: len(names) for kind, names in handle.changed.items() if names}
    assert {kind: found.get(kind) for kind in changed} == changed
    assert found["channels_last"] > 0
    assert not handle.left_out
    handle.remove()
    assert torch.equal(module(*inputs), expected)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_rewrite_can_be_left_out(name, kernels):
    module, inner, inputs = served(name)
    expected = module(*inputs)
    for kind in EXPECTED[name][1]:
        handle = sg.optimize(inner, skip=[kind])
        assert not handle.changed.get(kind)
        close(module(*inputs), expected)
    handle = sg.optimize(inner, skip=REWRITES)
    assert not any(handle.changed.values())
    assert torch.equal(module(*inputs), expected)


@pytest.mark.parametrize("name", EXPECTED)
def test_the_answer_is_as_exact_as_the_module_s_own(name, kernels):
    module, _, inputs = served(name)
    handle = sg.optimize(module, inputs)
    before, after = handle.errors
    assert after <= 1.5 * before + 2 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("name", EXPECTED)
def test_graphs_replay_it(name, kernels):
    module, inner, inputs = served(name)
    expected = module(*inputs)
    sg.optimize(inner)
    model = sg.wrap(module, capture_sizes=[2], progress=False)
    for _ in range(4):
        found = model(*inputs)
    assert model.graph_stats.replays >= 2
    close(found, expected)


@pytest.mark.parametrize("name", EXPECTED)
def test_hooks_on_parts_of_a_known_layer_are_run(name, kernels):
    module, inner, inputs = served(name)
    expected, ran = module(*inputs), []
    sg.optimize(inner)
    parts = [each for each in module.modules() if not list(each.children())]
    for part in parts:
        part.register_forward_hook(lambda part, args, output: ran.append(part))
    close(module(*inputs), expected)
    plain = copy.deepcopy(module)
    wanted, ran[:] = len(ran), []
    close(plain(*inputs), expected)
    assert len(ran) == wanted


def test_layers_of_a_denoiser_share_their_timesteps(kernels):
    module, inner, inputs = served("dit")
    sg.optimize(inner)
    from diffusers.models import embeddings

    with mock.patch.object(embeddings, "get_timestep_embedding", wraps=embeddings.get_timestep_embedding) as computed:
        module(*inputs)
        assert computed.call_count == 1
        other = [inputs[0], inputs[1] * 0 + 7, inputs[2]]
        found = module(*other)
        assert computed.call_count == 2
    close(found, copy.deepcopy(module)(*other))


def test_blocks_of_a_denoiser_share_the_embedding_and_keep_the_format(kernels):
    module, inner, inputs = served("unet")
    sg.optimize(inner)
    formats = []
    for each in module.modules():
        if type(each).__name__ in ("ResnetBlock2D", "Transformer2DModel"):
            each.register_forward_pre_hook(lambda each, args: formats.append(args[0]))
    with mock.patch.object(torch.nn.functional, "silu", wraps=torch.nn.functional.silu) as silu:
        module(*inputs)
    assert silu.call_count == 3  # the timestep's embedding, what blocks share of it, and the last convolution's input
    assert len(formats) == 12
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in formats)


def test_an_unconditional_block_and_one_without_a_timestep_run(kernels):
    pytest.importorskip("diffusers")
    from diffusers.models.resnet import ResnetBlock2D

    torch.manual_seed(0)
    unknown = {"time_embedding_norm", "down", "non_linearity"}
    for made in (
        {"temb_channels": None},
        {"temb_channels": 12, "out_channels": 16},
        {"temb_channels": 12, "skip_time_act": True, "output_scale_factor": 2.0},
        {"temb_channels": 12, "time_embedding_norm": "scale_shift"},
        {"temb_channels": 12, "down": True},
        {"temb_channels": 12, "non_linearity": "gelu"},
    ):
        block = ResnetBlock2D(in_channels=8, groups=4, **made).eval()
        x = torch.randn(2, 8, 6, 6)
        embedding = None if made["temb_channels"] is None else torch.randn(2, 12)
        expected = block(x, embedding)
        with sg.optimize(block, (x, embedding)) as handle:
            assert ("image_block" in handle.changed) == unknown.isdisjoint(made)
            close(block(x, embedding), expected)
            close(block(x, temb=embedding), expected)


def test_gradients_of_an_input_go_through_known_layers(kernels):
    for name in ("convnext", "efficientnet"):
        module, inner, inputs = served(name)
        module.requires_grad_(False)
        sg.optimize(inner)
        plain, found = copy.deepcopy(module), []
        for each in (module, plain):
            x = inputs[0].clone().requires_grad_()
            with torch.enable_grad():
                each(x).sum().backward()
            found.append(x.grad)
        close(*found)


class Adapter(torch.nn.Module):
    """Adds to what a layer computes, as adapters do; looks like that layer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        return super().__getattr__(name) if name == "inner" else getattr(self.inner, name)

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs) + 1


@pytest.mark.parametrize("name", EXPECTED)
def test_parts_that_are_replaced_afterwards_are_called(name, kernels):
    module, inner, inputs = served(name)
    plain = copy.deepcopy(module)
    sg.optimize(inner)
    kinds = (torch.nn.Linear, torch.nn.Conv2d, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.SiLU)
    for name_of_part, part in list(plain.named_modules()):
        owner, _, last = name_of_part.rpartition(".")
        if isinstance(part, kinds):
            for root in (module, plain):
                parent = root.get_submodule(owner)
                setattr(parent, last, Adapter(getattr(parent, last)))
    close(module(*inputs), plain(*inputs))


# Models, the class that somebody patches, as libraries of speedups and of tiled images do, and the method.
PATCHED = [
    *(("unet", "diffusers.models.attention.BasicTransformerBlock", "forward"),),
    *(("unet", "diffusers.models.attention_processor.Attention", "forward"),),
    *(("unet", "diffusers.models.attention_processor.AttnProcessor2_0", "__call__"),),
    *(("unet", "diffusers.models.resnet.ResnetBlock2D", "forward"),),
    *(("unet", "diffusers.models.transformers.transformer_2d.Transformer2DModel", "forward"),),
    *(("unet", "diffusers.models.activations.GEGLU", "gelu"), ("unet", "torch.nn.GroupNorm", "forward")),
    *(("unet", "torch.nn.Linear", "forward"), ("unet", "torch.nn.Conv2d", "_conv_forward")),
    *(("dit", "diffusers.models.activations.GELU", "gelu"), ("dit", "torch.nn.LayerNorm", "forward")),
    *(("dit", "diffusers.models.embeddings.CombinedTimestepLabelEmbeddings", "forward"),),
    *(("convnext", "torchvision.models.convnext.CNBlock", "forward"), ("convnext", "torch.nn.LayerNorm", "forward")),
    *(("efficientnet", "torchvision.ops.misc.SqueezeExcitation", "_scale"),),
    *(("efficientnet", "torchvision.models.efficientnet.MBConv", "forward"),),
    *(("efficientnet", "torch.nn.Sigmoid", "forward"), ("efficientnet", "torch.nn.SiLU", "forward")),
]


def bent(x):
    return torch.where(x > 0, 0.7 * x, 1.3 * x)


@pytest.mark.parametrize(("name", "kind", "method"), PATCHED)
def test_methods_that_are_patched_in_known_classes_are_run(name, kind, method, kernels, monkeypatch):
    module, inner, inputs = served(name)
    for each in module.modules():
        if hasattr(each, "layer_scale"):
            each.layer_scale.fill_(1.0)
    file, _, last = kind.rpartition(".")
    known = getattr(importlib.import_module(file), last)
    original = getattr(known, method)

    @functools.wraps(original)
    def patched(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        return tuple(map(bent, result)) if isinstance(result, tuple) else bent(result)

    sg.optimize(inner)
    answer = module(*inputs)
    monkeypatch.setattr(known, method, patched)
    expected = copy.deepcopy(module)(*inputs)
    assert not torch.allclose(expected, answer, rtol=1e-2, atol=1e-3)
    close(module(*inputs), expected)
    sg.optimize(inner)
    close(module(*inputs), expected)


def test_a_block_with_another_part_than_its_class_makes_is_run_as_it_is(kernels):
    module, inner, inputs = served("convnext")
    for each in module.modules():
        if hasattr(each, "layer_scale"):
            each.layer_scale.fill_(1.0)
            each.stochastic_depth = torch.nn.Tanh().eval()
    expected = module(*inputs)
    sg.optimize(inner)
    close(module(*inputs), expected)


@pytest.mark.parametrize("afterwards", [False, True])
def test_a_resnet_s_forward_of_somebody_s_own_is_run(afterwards, kernels):
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    module, x = torchvision.models.resnet18().eval(), torch.randn(2, 3, 32, 32)

    def features(x):
        return module.layer1(module.maxpool(module.relu(module.bn1(module.conv1(x))))).mean((2, 3))

    if afterwards:
        sg.optimize(module)
    module._forward_impl = features
    if not afterwards:
        sg.optimize(module)
    assert module(x).shape == (2, 64)


def test_settings_of_an_attention_that_change_afterwards_count(kernels):
    changes = (
        {"bias_k": torch.nn.Parameter(torch.ones(1, 1, 16)), "bias_v": torch.nn.Parameter(torch.ones(1, 1, 16))},
        *({"batch_first": False}, {"add_zero_attn": True}, {"num_heads": 4, "head_dim": 4}),
    )
    x = torch.randn(3, 5, 16)
    for change in changes:
        module = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
        sg.optimize(module)
        for name, value in change.items():
            setattr(module, name, value)
        close(module(x, x, x, need_weights=False)[0], copy.deepcopy(module)(x, x, x, need_weights=False)[0])


def stronger(block, args):
    args[1].mul_(1.5)


@pytest.mark.parametrize("inference", [False, True])
def test_an_embedding_that_a_hook_writes_to_is_computed_again(inference, kernels):
    module, inner, inputs = served("unet")
    plain = copy.deepcopy(module)
    sg.optimize(inner)
    for each in (module, plain):
        blocks = [block for block in each.modules() if type(block).__name__ == "ResnetBlock2D"]
        blocks[2].register_forward_pre_hook(stronger)
    with torch.inference_mode(inference):
        close(module(*inputs), plain(*inputs))
