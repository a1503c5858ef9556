"""An optimized module on a GPU: its answers, its graphs, and weights that are loaded into them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.autograd import DeviceType

import simplegraph as sg
from tests.module.answers import reasons
from tests.optimizing.models import Net, settle

DTYPES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def _exact_products(monkeypatch):
    """TF32 rounds a folded weight and the original differently."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def error(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.proofs
@pytest.mark.parametrize("dtype", DTYPES)
def test_graphs_of_an_optimized_module_answer_as_the_module_does(dtype, device):
    torch.manual_seed(0)
    with torch.no_grad():
        module = settle(Net()).to(device, dtype)
        wide = copy.deepcopy(module).double()
        x = torch.randn(4, 3, 16, 16, device=device, dtype=dtype)
        handle = sg.optimize(module, x)
        assert len(handle.changed["batch_norm"]) == 5
        model = sg.wrap(module, capture_sizes=[2, 4])
        for _ in range(2):
            for rows in (4, 4, 4, 3, 3, 3, 2, 2, 2):
                assert error(model(x[:rows]), wide(x[:rows].double())) < DTYPES[dtype]
            captures = model.graph_stats.captures
            model.load_state_dict(settle(Net()).state_dict())
            wide.load_state_dict(model.state_dict())
        assert model.graph_stats.captures == captures
        assert model.graph_stats.replays > 6
        assert not {"capture_failed", "proof_failed"} & reasons(model).keys(), model.graph_report()
        handle.remove()
        for _ in range(4):
            assert torch.equal(model(x), module(x))


def test_the_graph_of_an_optimized_module_has_fewer_kernels_and_no_transposed_images(device):
    with torch.no_grad():
        module = settle(Net()).to(device, torch.float16)
        x = torch.randn(4, 3, 32, 32, device=device, dtype=torch.float16)
        nodes = {}
        for optimized in (False, True):
            if optimized:
                sg.optimize(module, x)
            model = sg.wrap(module, capture_sizes=[4])
            for _ in range(4):
                model(x)
            (graph,) = model.graph_stats.graphs.values()
            nodes[optimized] = graph.nodes
            convolved = module.blocks[0](torch.randn(4, 8, 8, 8, device=device, dtype=torch.float16))
        assert convolved.is_contiguous(memory_format=torch.channels_last)
        assert nodes[True] < nodes[False], nodes


@pytest.mark.parametrize("name", ["bert", "vit", "llama", "gemma3"])
def test_fused_layers_take_fewer_kernels_and_are_as_exact(name, device):
    pytest.importorskip("transformers", minversion="5.0")
    pytest.importorskip("triton")
    from tests.fused.test_layers import MODELS, call, tiny

    with torch.no_grad():
        module = tiny.build(MODELS[name], device)
        wide, module = copy.deepcopy(module).double(), module.to(torch.bfloat16)
        exact = call(wide, name, device, torch.float64)
        kernels, errors = {}, {}
        for optimized in (False, True):
            if optimized:
                handle = sg.optimize(module)
                assert "fused operators by Triton" in str(handle)
            errors[optimized] = error(call(module, name, device, torch.bfloat16), exact)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                call(module, name, device, torch.bfloat16)
                torch.cuda.synchronize()
            ran = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
            kernels[optimized] = len([event for event in ran if not event.name.startswith("Mem")])
        assert errors[True] <= 1.5 * errors[False] + 0.01, errors
        assert kernels[True] < kernels[False], kernels


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "efficientnet", "convnext", "vit", "bert", "unet", "dit"])
def test_known_models_take_fewer_kernels_and_are_as_exact(name, device):
    """At the tiny shapes of the benchmark, in bfloat16, without example inputs.

    But for EfficientNet's images: with 32 pixels a side `channels_last` takes 2,641 kernels where 368 were.
    """
    from bench.optimized.shapes import MODELS

    tiny_images = name != "efficientnet"

    pytest.importorskip("triton")
    pytest.importorskip(MODELS[name].package)
    with torch.no_grad():
        torch.manual_seed(0)
        module = MODELS[name].build(True).to(device, torch.bfloat16).eval()
        given = [each.to(device) for each in MODELS[name].inputs(tiny_images, 2)]
        wide = copy.deepcopy(module).double()
        given = [each.to(torch.bfloat16) if each.is_floating_point() else each for each in given]
        exact = wide(*(each.double() if each.is_floating_point() else each for each in given))
        errors, nodes = {}, {}
        for optimized in (False, True):
            if optimized:
                handle = sg.optimize(MODELS[name].optimized(module))
                assert "Triton" in str(handle), handle
                assert not handle.left_out, handle
            model = sg.wrap(copy.deepcopy(module) if not optimized else module, capture_sizes=[2])
            for _ in range(4):
                found = model(*given)
            assert model.graph_stats.replays >= 2, model.graph_report()
            (graph,) = model.graph_stats.graphs.values()
            errors[optimized], nodes[optimized] = error(found, exact), graph.nodes
        # Two steps of the dtype: a few outputs differ by chance.
        assert errors[True] <= max(1.5 * errors[False], 2 * torch.finfo(torch.bfloat16).eps), errors
        assert nodes[True] < nodes[False], nodes


@pytest.mark.parametrize("seed", range(3))
def test_bottleneck_blocks_are_as_exact_as_they_were(seed, device):
    """Of their convolutions of 1x1 pixels some have a folded weight, which is rounded once more."""
    pytest.importorskip("triton")
    resnet = pytest.importorskip("torchvision.models.resnet")
    torch.manual_seed(seed)
    with torch.no_grad():
        module = settle(resnet.ResNet(resnet.Bottleneck, [2, 2, 2, 2])).to(device, torch.bfloat16)
        x = torch.randn(4, 3, 96, 96, device=device, dtype=torch.bfloat16)
        exact = copy.deepcopy(module).double()(x.double())
        was = error(module(x), exact)
        handle = sg.optimize(module)
        assert "Triton" in str(handle), handle
        assert error(module(x), exact) <= 1.3 * was


def test_a_graph_of_joined_projections_follows_weights_that_are_loaded(device):
    transformers = pytest.importorskip("transformers", minversion="5.0")
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = transformers.BertConfig(**shape, vocab_size=99)
        models.append(transformers.BertModel(config, add_pooling_layer=False).to(device, torch.float16).eval())
    ids = torch.arange(32, device=device).view(2, 16)
    with torch.no_grad():
        expected = models[1](input_ids=ids).last_hidden_state
        sg.optimize(models[0])
        model = sg.wrap(models[0], capture_sizes=[2])
        for _ in range(4):
            model(input_ids=ids)
        captures = model.graph_stats.captures
        model.load_state_dict(models[1].state_dict())
        assert error(model(input_ids=ids).last_hidden_state, expected.double()) < 4e-3
        assert model.graph_stats.captures == captures
