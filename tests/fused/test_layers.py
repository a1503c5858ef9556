"""Layers are proven by examples, and run on fused operators: the same answers by fewer operators."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from changed_texts import changed  # noqa: E402
from transformers.models.bert.modeling_bert import BertSelfOutput  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP  # noqa: E402

from simplegraph.base.errors import ConfigError  # noqa: E402
from simplegraph.fused.layers.kinds import KINDS, find_layers, fused_forwards, names_by_kind  # noqa: E402
from simplegraph.fused.torch_operators import Operators  # noqa: E402
from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from simplegraph.integrations.transformers.overrides import override_forwards  # noqa: E402

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
IMAGES = SMALL | {"image_size": 16, "patch_size": 8}
MODELS: dict[str, Callable[[], Any]] = {
    **tiny.DECODERS,
    **tiny.MIXTURES,
    **tiny.ENCODER_DECODERS,
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**tiny.BERT)),
    "vit": lambda: transformers.ViTModel(transformers.ViTConfig(**IMAGES)),
    "clip": lambda: transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGES)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**tiny.LLAMA)),
}
# Sums that are computed with the norm behind them, and gated products, of two layers.
EXPECTED = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3"), (4, 2)),
    "phi3": (0, 2),
    **dict.fromkeys(("mixtral", "qwen3_moe"), (4, 0)),
    "gpt2": (4, 0),
    "t5": (10, 0),  # two sums of an encoder layer and three of a decoder layer
    "whisper": (6, 0),  # those of the decoder
    "bert": (4, 0),
    "vit": (4, 0),
    "clip": (4, 0),
}


OF_DENOISERS = ("adaptive_norm", "attention", "timesteps")  # test_denoisers leaves them out


class Recorded(Operators):
    """Operators that count their calls."""

    def __init__(self) -> None:
        self.calls: collections.Counter[str] = collections.Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in ("rms_norm", "add_rms_norm", "add_layer_norm", "gated", "rotate"):
            self.calls[name] += 1
        return super().__getattribute__(name)

    @property
    def sums(self) -> int:
        return self.calls["add_rms_norm"] + self.calls["add_layer_norm"]


def call(model: Any, name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """The last hidden states, or logits."""
    if name in ("vit", "clip"):
        given: dict[str, Any] = {"pixel_values": torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))}
    elif name == "whisper":
        given = tiny.features(2, device) | {"decoder_input_ids": torch.tensor([[1, 5], [1, 7]])}
    else:
        given = dict(tiny.prompts([5, 3], device))
        given |= {"decoder_input_ids": given["input_ids"]} if name == "t5" else {}
    given = {key: value.to(device, dtype if value.is_floating_point() else None) for key, value in given.items()}
    found: Tensor = model(**given)[0]
    return found


def fused(model: nn.Module, operators: Operators, skip: Any = ()) -> Any:
    return override_forwards(fused_forwards(find_layers(model, skip), operators))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_every_sum_goes_into_its_norm_and_the_answers_stay(name: str, mode: Any, device: torch.device) -> None:
    model, operators = tiny.build(MODELS[name], device), Recorded()
    before = [dict(vars(module)) for module in model.modules()]
    with mode():
        expected = call(model, name, device)
        with fused(model, operators):
            found = call(model, name, device)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    sums, gates = EXPECTED[name]
    assert operators.sums == sums
    assert operators.calls["gated"] == gates
    assert [dict(vars(module)) for module in model.modules()] == before


@pytest.mark.parametrize(("library", "name"), [("timm", "vit_tiny_patch16_224"), ("torchvision", "vit_b_16")])
def test_image_transformers_of_other_libraries_are_known(library: str, name: str, device: torch.device) -> None:
    models = pytest.importorskip(library).models
    if library == "timm":
        small: Any = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_classes": 10}
        model = pytest.importorskip("timm").create_model(name, **small)
    else:
        model = models.VisionTransformer(32, 16, 2, 4, 48, 96, num_classes=10)
    model, operators = model.to(device).eval(), Recorded()
    nn.init.normal_(model.head.weight if library == "timm" else model.heads.head.weight)
    x = torch.randn(2, 3, 32, 32, device=device)
    with torch.no_grad():
        expected = model(x)
        with fused(model, operators):
            found = model(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert operators.sums == 4


@pytest.mark.parametrize("name", ["llama", "gemma3", "t5", "bert"])
def test_no_norm_runs_twice(name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm that a sum computed is handed to the module that would compute it, whose hooks fire as before."""
    model, operators, fired = tiny.build(MODELS[name], device), Recorded(), collections.Counter()
    norms = {module for module in model.modules() if type(module).__name__.endswith("Norm")}
    for norm in norms:
        norm.register_forward_hook(lambda module, args, output: fired.update([module]))
    with torch.no_grad():
        call(model, name, device)
        expected = fired.copy()
        fired.clear()
        find_layers(model)  # proven here, by examples that are not counted
        monkeypatch.setattr(nn.functional, "layer_norm", counted(fired, nn.functional.layer_norm))
        monkeypatch.setattr(nn.functional, "rms_norm", counted(fired, nn.functional.rms_norm))
        with fused(model, operators):
            call(model, name, device)
    ran = fired.pop("norm")
    assert fired == expected
    assert ran == sum(expected.values())


def counted(fired: Any, function: Any) -> Any:
    def count(*args: Any, **kwargs: Any) -> Any:
        fired.update(["norm"])
        return function(*args, **kwargs)

    return count


@pytest.mark.parametrize("case", ["written", "replaced", "own forward", "inference"])
def test_a_sum_that_somebody_changes_before_its_norm_is_normed_as_it_is_then(case: str, device: torch.device) -> None:
    model = tiny.build(MODELS["llama"], device)
    norm = model.model.layers[1].input_layernorm
    if case == "own forward":
        norm.forward = lambda hidden: 2 * type(norm).forward(norm, hidden)
    elif case == "replaced":
        norm.register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,))
    else:
        norm.register_forward_pre_hook(lambda module, args: (args[0].mul_(2).add_(1),)[1:] or None)
    with torch.inference_mode(case == "inference"), torch.no_grad():
        expected = call(model, "llama", device)
        with fused(model, Operators()):
            found = call(model, "llama", device)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_model(device: torch.device) -> None:
    model, operators = tiny.build(MODELS["llama"], device), Recorded()
    call(model, "llama", device).square().sum().backward()
    expected = {name: weight.grad.clone() for name, weight in model.named_parameters()}
    model.zero_grad()
    with fused(model, operators):
        call(model, "llama", device).square().sum().backward()
    assert operators.sums == 0
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("case", ["another result", "another name", "hooked activation", "another activation"])
def test_perceptrons_that_compute_something_else_are_left_alone(case: str, device: torch.device) -> None:
    class Doubled(LlamaMLP):  # type: ignore[misc,valid-type]
        forward = changed(LlamaMLP.forward, "return down_proj", "return 2 * down_proj")

    class Renamed(LlamaMLP):  # type: ignore[misc,valid-type]
        pass

    config = transformers.LlamaConfig(**tiny.LLAMA, hidden_act="relu" if case == "another activation" else "silu")
    module = (Doubled if case == "another result" else Renamed)(config).to(device)
    if case == "hooked activation":
        module.act_fn.register_forward_hook(lambda module, args, output: output + 1)
    operators, x = Recorded(), torch.randn(3, 64, device=device)
    with torch.no_grad():
        expected = module(x)
        with fused(module, operators):
            found = module(x)
    assert torch.equal(found, expected)
    assert operators.calls["gated"] == (case == "another name")


def test_activations_of_eight_operators_are_one(device: torch.device) -> None:
    model = tiny.build(MODELS["gpt2"], device)
    assert names_by_kind(model, find_layers(model))["activation"] == [f"transformer.h.{i}.mlp.act" for i in range(2)]
    activation, x = model.transformer.h[0].mlp.act, torch.randn(5, 7, device=device)
    expected = activation(x)
    with fused(model, Operators()):
        torch.testing.assert_close(activation(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OF_DENOISERS])
def test_each_kind_can_be_left_out(kind: str, device: torch.device) -> None:
    model = tiny.build(MODELS["llama" if kind != "activation" else "gpt2"], device)
    everything = names_by_kind(model, find_layers(model))
    rest = names_by_kind(model, find_layers(model, skip=[kind]))
    assert kind in everything
    assert kind not in rest
    assert find_layers(model, skip=KINDS) == {}
    with torch.no_grad():
        expected = call(model, "llama", device)
        with fused(model, Operators(), [kind]):
            torch.testing.assert_close(call(model, "llama", device), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@pytest.mark.parametrize("part", ["", "self_attn"])
def test_a_cache_that_is_passed_by_its_old_name_is_filled(part: str, device: torch.device) -> None:
    """transformers 5.24 calls it `cache`, and a wrapper of each forward renames what callers still pass."""
    model = tiny.build(MODELS["llama"], device)
    module = model.model.layers[0].get_submodule(part)
    hidden, (cos, sin) = torch.randn(2, 1, 64, device=device), torch.randn(2, 2, 1, 16, device=device)
    given = {"position_embeddings": (cos, sin), "attention_mask": None}

    def filled() -> Tensor:
        cache = transformers.DynamicCache()
        with torch.no_grad():
            module(hidden, **given, past_key_values=cache)
        return cache.layers[0].keys

    expected = filled()
    with override_forwards(fused_forwards(find_layers(model), Operators())):
        torch.testing.assert_close(filled(), expected)


def test_a_layer_called_by_itself_and_copied_meanwhile_answers_as_before(device: torch.device) -> None:
    config = transformers.LlamaConfig(**tiny.LLAMA)
    config._attn_implementation = "eager"
    layer = LlamaDecoderLayer(config, 0).to(device).eval()
    output = BertSelfOutput(transformers.BertConfig(**tiny.BERT)).to(device).eval()
    x, trig = torch.randn(2, 3, 64, device=device), tuple(torch.randn(2, 2, 3, 16, device=device))
    with torch.no_grad():
        expected = layer(x, position_embeddings=trig), output(x, input_tensor=2 * x)
        with fused(layer, Operators()), fused(output, Operators()):
            alone = copy.deepcopy(layer)
            found = layer(hidden_states=x, position_embeddings=trig), output(x, 2 * x)
        copied = alone(x, position_embeddings=trig)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert torch.equal(copied, expected[0])


def test_a_generation_s_report_names_what_is_fused_and_takes_names_to_fuse(device: torch.device) -> None:
    model = tiny.build(MODELS["llama"], device)
    with graph_generation(model, max_batch_size=2, max_length=32) as graphs:
        assert "  optimized: residual x 2: model.layers.0, model.layers.1\n" in f"{graphs.report()}\n"
        assert "fused operators" not in str(graphs.report())  # nothing was chosen yet
        model.generate(**tiny.prompts([3], device), max_new_tokens=4, do_sample=False)
        assert graphs.report().optimizations[-1].startswith("fused operators by ")
    with graph_generation(model, max_batch_size=2, max_length=32, fused_kernels=["rotary", "gated"]) as graphs:
        assert [line.partition(" ")[0] for line in graphs.report().optimizations] == ["gated", "rotary"]
    with graph_generation(model, max_batch_size=2, max_length=32, fused_kernels=False) as graphs:
        assert graphs.report().optimizations == ()
    for wrong in (["rotery"], "rotary"):
        with pytest.raises(ConfigError, match=r"fused_kernels has rot[ae]ry.*expected True, False"):
            graph_generation(model, fused_kernels=wrong)


def test_multi_head_attention_of_one_input_is_a_product_and_fused_attention(device: torch.device) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(24, 3, batch_first=True).to(device).eval()
    nn.init.normal_(module.in_proj_bias)
    x, other = torch.randn(2, 2, 5, 24, device=device)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2], device=device)
    calls: list[Any] = [
        ((x, x, x), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "attn_mask": None, "is_causal": False}),
        ((x, x, x), {}),
        ((x, x, other), {"need_weights": False}),
        ((x, x, x), {"need_weights": False, "key_padding_mask": mask}),
        ((x, x, x, mask, False), {}),
        ((x[0], x[0], x[0]), {"need_weights": False}),
    ]
    layers = find_layers(module)
    assert names_by_kind(module, layers) == {"attention": ["MultiheadAttention"]}
    with torch.no_grad():
        for at, (args, kwargs) in enumerate(calls):
            expected = module(*args, **kwargs)
            with (
                mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as one,
                override_forwards(fused_forwards(layers, Operators())),
            ):
                found = module(*args, **kwargs)
            torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
            assert (found[1] is None) == (expected[1] is None)
            assert one.called or at >= 2


@pytest.mark.parametrize("given", [{"kdim": 8, "vdim": 8}, {"add_bias_kv": True}, {"add_zero_attn": True}, {}])
def test_other_multi_head_attentions_are_left_alone(given: dict[str, Any]) -> None:
    assert find_layers(nn.MultiheadAttention(24, 3, batch_first=bool(given), **given)) == {}
