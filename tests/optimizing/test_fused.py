"""An optimized module runs recognized layers on fused operators, for inference, until that is undone."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402

import simplegraph as sg  # noqa: E402
from simplegraph.fused.torch_operators import Operators  # noqa: E402
from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from tests.fused.test_layers import MODELS, call  # noqa: E402

CPU = torch.device("cpu")
FUSED = {
    "llama": {"rms_norm": 5, "residual": 2, "gated": 2, "rotary": 2},
    "gemma3": {"rms_norm": 13, "residual": 2, "gated": 2, "rotary": 2},
    "gpt2": {"residual": 6, "activation": 2},
    "bert": {"residual": 8, "projections": 2},
    "vit": {"residual": 6},
}


class Small(nn.Module):
    """A layer of Llama's with what it needs beside hidden states."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**tiny.LLAMA)
        config._attn_implementation = "sdpa"
        layers = (transformers.models.llama.modeling_llama.LlamaDecoderLayer(config, index) for index in range(2))
        self.layers = nn.ModuleList(layers)
        self.norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trig = torch.linspace(-1, 1, 3 * 16, device=x.device, dtype=x.dtype).view(1, 3, 16)
        for layer in self.layers:
            x = layer(x, position_embeddings=(trig.cos(), trig.sin()))
        found: torch.Tensor = self.norm(x)
        return found


def small(seed: int = 0) -> Any:
    return tiny.build(Small, CPU, seed)


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", FUSED)
def test_known_layers_are_fused_named_and_given_back(name: str) -> None:
    model = tiny.build(MODELS[name], CPU)
    expected, state = call(model, name, CPU), model.state_dict()
    before = [(type(module), dict(vars(module))) for module in model.modules()]
    handle = sg.optimize(model)
    found = {kind: len(names) for kind, names in handle.changed.items() if names}
    assert found == FUSED[name]
    assert "fused operators by torch" in str(handle)
    torch.testing.assert_close(call(model, name, CPU), expected, rtol=1e-3, atol=1e-4)
    assert model.state_dict().keys() == state.keys()
    handle.remove()
    assert [(type(module), dict(vars(module))) for module in model.modules()] == before
    assert torch.equal(call(model, name, CPU), expected)


def test_the_example_inputs_judge_fused_layers_too() -> None:
    model = small()
    handle = sg.optimize(model, torch.randn(2, 3, 64))
    assert handle.errors is not None
    was, now = handle.errors
    assert 0 < now <= max(1.5 * was, 2 * torch.finfo(torch.float32).eps)


def test_graphs_of_fused_layers_replay_and_read_new_weights(device: torch.device) -> None:
    model, other = small().to(device), small(seed=1).to(device)
    sg.optimize(model)
    graphed = sg.wrap(model, capture_sizes=[4], progress=False)
    x = torch.randn(4, 3, 64, device=device)
    for weights in (None, other.state_dict()):
        if weights is not None:
            graphed.load_state_dict(weights)
        expected = copy.deepcopy(model)(x)  # copies are of the module as it was
        for _ in range(4):
            torch.testing.assert_close(graphed(x), expected, rtol=1e-3, atol=1e-4)
    assert graphed.graph_stats.captures == 1
    assert graphed.graph_stats.replays >= 5
    assert "optimized: residual x 2: layers.0, layers.1" in str(graphed.graph_report())


@pytest.mark.parametrize("case", ["training", "gradients of weights", "gradients of inputs", "vmap", "copy", "pickle"])
def test_what_is_no_inference_runs_as_written(case: str) -> None:
    model, x = small(), torch.randn(2, 3, 64)
    plain = copy.deepcopy(model)
    sg.optimize(model)
    used = {"copy": copy.deepcopy, "pickle": lambda module: pickle.loads(pickle.dumps(module))}
    model = used.get(case, lambda module: module)(model)
    answers = []
    for module in (model, plain):
        module.train(case == "training")
        module.requires_grad_(case != "gradients of inputs")
        given = x.clone().requires_grad_(case == "gradients of inputs")
        with torch.set_grad_enabled(case.startswith("gradients")):
            answers.append((torch.vmap(module)(given.unsqueeze(1)) if case == "vmap" else module(given)).detach())
    assert torch.equal(*answers)


def test_kinds_can_be_left_out_by_name() -> None:
    handle = sg.optimize(small(), skip=["residual", "rotary"])
    assert [kind for kind, names in handle.changed.items() if names] == ["rms_norm", "gated"]
    with pytest.raises(sg.ConfigError, match=r"rotery.*rotary"):
        sg.optimize(small(), skip=["rotery"])


def test_a_part_of_a_module_that_was_fused_as_a_whole_is_refused() -> None:
    model = small()
    handle = sg.optimize(model)
    with pytest.raises(sg.ConfigError, match="part of an optimized module"):
        sg.optimize(model.layers[0].mlp)
    assert sg.optimize(model).changed == handle.changed  # anew


def test_a_generation_on_a_module_that_was_fused_reports_it_and_generates_the_same() -> None:
    model, batch = tiny.build(MODELS["llama"], CPU), tiny.prompts([7, 4], CPU)
    settings: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    expected = model.generate(**batch, **settings)
    with sg.optimize(model), graph_generation(model, max_batch_size=2, max_length=32) as graphs:
        assert torch.equal(model.generate(**batch, **settings), expected)
        assert graphs.stats.replays > 0
        assert "optimized: residual x 2: model.layers.0, model.layers.1" in str(graphs.report())
    assert torch.equal(model.generate(**batch, **settings), expected)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(x)
        return found


def test_group_norms_take_images_in_channels_last_where_the_kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Kernels(Operators):
        triton = True

        def group_norm(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
            seen.append(x.is_contiguous(memory_format=torch.channels_last))
            return super().group_norm(x, *rest)

    model, x = Images().eval(), torch.randn(2, 3, 9, 9)
    expected = model(x)
    assert "group_norm" not in sg.optimize(model, x).changed  # torch's own would run
    monkeypatch.setattr("simplegraph.fused.optimizing.optimize.operators_of", lambda *args: Kernels())
    handle = sg.optimize(model, x)
    assert handle.changed["group_norm"] == ["layers.1"]
    seen.clear()
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert seen == [True]
    for skipped in ("channels_last", "group_norm"):
        assert "group_norm" not in sg.optimize(model, x, skip=[skipped]).changed
    handle = sg.optimize(model)  # no class of it is known to take any format
    assert "group_norm" not in handle.changed


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "rotate_half", "eager_attention_forward"])
def test_functions_that_are_replaced_in_a_library_s_module_afterwards_are_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    model, x = small(), torch.randn(2, 3, 64)
    for layer in model.layers:
        layer.self_attn.config._attn_implementation = "eager"
    sg.optimize(model)
    original, answer = getattr(modeling_llama, name), model(x)

    def doubled(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

    monkeypatch.setattr(modeling_llama, name, doubled)
    expected = copy.deepcopy(model)(x)
    assert not torch.allclose(expected, answer, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_replicas_of_a_layer_have_weights_of_their_own() -> None:
    model = small()
    sg.optimize(model)
    norm = model.norm
    replica = norm._replicate_for_data_parallel()
    replica.weight = 5 * norm.weight.detach()
    x = torch.randn(1, 3, len(norm.weight))
    torch.testing.assert_close(replica(x), 5 * norm(x), rtol=1e-4, atol=1e-5)
