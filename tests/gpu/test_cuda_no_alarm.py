"""Models that touch only what is theirs: all of them is read, nothing is said of it, and every size is captured."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import simplegraph as sg
from simplegraph.device.kernel_names import launched_by_torch
from simplegraph.manager.stats import GraphCounters
from tests.gpu.attention_backends import ATTENTION

pytestmark = pytest.mark.usefixtures("device_works")

FAMILIES = ("llama", "mistral", "gemma3", "gpt2", "mixtral", "t5", "Mamba", "Lfm2", "Zamba2")
VISION = {
    "torchvision": (
        *("alexnet", "vgg11", "resnet18", "wide_resnet50_2", "resnext50_32x4d", "squeezenet1_1", "densenet121"),
        *("mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5", "efficientnet_b0", "regnet_y_400mf", "vit_b_16"),
        *("convnext_tiny", "swin_t"),
    ),
    "timm": ("mixer_s32_224", "deit_tiny_patch16_224", "mobilevit_xxs", "edgenext_xx_small", "poolformer_s12"),
}


def check(graphs: Iterable[GraphCounters], stats: Any) -> None:
    """The largest and the smallest graph were read whole, and what torch does not launch touches known memory."""
    assert stats.failures == {}
    read = [graph.inventory for graph in graphs if graph.inventory is not None]
    assert read
    for found in read:
        assert found.nodes
        assert [note for note in found.notes if note.startswith(("parameters", "kernel", "the driver"))] == []
        kinds = {(touch.node, touch.place.name) for touch in found.touches if touch.certain}
        assert {each for each in kinds if not launched_by_torch(each[0]) and each[1] == "FREED"} == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_generate(name: str) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    import tiny_models as tiny
    import tiny_states

    from simplegraph.integrations.transformers import graph_generation

    models = tiny.DECODERS | tiny.MIXTURES | tiny.ENCODER_DECODERS | tiny_states.MODELS
    device = torch.device("cuda")
    model = tiny.build(models[name], device)
    with graph_generation(model, max_batch_size=4, max_length=64) as graphs:
        for lengths in ([7, 4, 6], [5]):
            model.generate(**tiny.prompts(lengths, device, 0), max_new_tokens=6, min_new_tokens=6, do_sample=False)
        assert graphs.stats.replays
        check(graphs.stats.graphs.values(), graphs.stats)


@pytest.mark.parametrize(("library", "name"), [(library, name) for library in VISION for name in VISION[library]])
def test_models_of_images(library: str, name: str) -> None:
    models = pytest.importorskip("torchvision.models" if library == "torchvision" else library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = models.get_model(name, weights=None) if library == "torchvision" else models.create_model(name)
    model: Any = sg.wrap(made.cuda().eval(), capture_sizes=[1, 4], progress=False, verify=0)
    model.capture_graphs(torch.randn(2, 3, 224, 224, device="cuda"))
    assert len(model.graph_stats.graphs) == 2
    check(model.graph_stats.graphs.values(), model.graph_stats)


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("attention", ["sdpa", *ATTENTION])
def test_the_engine_with_each_attention(attention: str, mode: str) -> None:
    pytest.importorskip("transformers")
    from bench.engine import Engine, EngineConfig, SamplingParams

    limits: dict[str, Any] = {"max_num_seqs": 16, "max_num_tokens": 64, "max_model_len": 200, "num_pages": 300}
    engine = Engine(llama(), EngineConfig(**limits, mode=mode, attention=attention, capture_sizes=(1, 8, 16, 64)))
    try:
        assert engine.capture().failed == {}
        assert engine.generate([[1, 2, 3], [4] * 20], SamplingParams(max_tokens=4))
        manager = engine.runner.manager
        check(manager.stats.graphs.values(), manager.stats)
    finally:
        engine.runner.manager.reset()


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    from bench.models.llama import CacheShape, build_llama

    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
    config = transformers.LlamaConfig(
        vocab_size=997,
        hidden_size=1024,
        intermediate_size=512,
        num_hidden_layers=2,
        max_position_embeddings=512,
        **heads,
    )
    return build_llama(config, CacheShape(1, 16), 512, device="cuda", dtype=torch.bfloat16, seed=3)
