"""What looks like a known layer and computes something else is never fused: it is proven by examples, or left alone."""

from __future__ import annotations

import functools
import gc
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import alpha_dropout

transformers = pytest.importorskip("transformers", minversion="5.0")

from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, apply_rotary_pos_emb  # noqa: E402

from simplegraph.fused.layers import provable, recognition  # noqa: E402
from simplegraph.fused.layers.kinds import find_layers, fused_forwards  # noqa: E402
from simplegraph.fused.layers.linears import activation_layers, gate_layers  # noqa: E402
from simplegraph.fused.layers.norms import gated_norms, residual_layers, rms_norms, sum_norms  # noqa: E402
from simplegraph.fused.layers.provable import provable_code, with_names  # noqa: E402
from simplegraph.fused.layers.rotary import rotary_layers  # noqa: E402
from simplegraph.fused.torch_operators import Operators  # noqa: E402
from simplegraph.integrations.transformers.overrides import override_forwards  # noqa: E402

FLAG, EPS, ONES = True, 1e-6, torch.ones(16)


class Norm(nn.Module):
    """The user's own norm, as a model that is not in transformers has it."""

    def __init__(self, columns: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class WithMethod(Norm):
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


# Norms that look alike.


class EpsOutside(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() / (x.float().pow(2).mean(-1, keepdim=True).sqrt() + self.eps)).type_as(x)


class NoEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True))).type_as(x)


class PlusTwo(Norm):
    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (2.0 + self.weight.float())).type_as(x)


class Biased(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class BiasedPlainly(Norm):
    """With a bias that is no parameter, and nothing yet."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.zeros(16)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
        return self.weight * normed + self.bias


class Centered(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() - x.float().mean(-1, keepdim=True)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class OverRows(Norm):
    """Over the dimension that is the last one of a matrix only."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + self.eps)).type_as(x)


class InTraining(Norm):
    def forward(self, x: Tensor) -> Tensor:
        normed = Norm.forward(self, x)
        return normed + 0.1 if self.training else normed


class InTrainingWithoutBranch(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
        return normed * (1 + self.training)


class ByRows(Norm):
    def forward(self, x: Tensor) -> Tensor:
        normed = Norm.forward(self, x)
        return normed * 2 if x.shape[0] > 64 else normed


class ByRowsWithoutBranch(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)
        return normed * (1 + x.shape[0] // 65)


class Cut(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x[:64].float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class ByShape(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.dim() == 5 else Norm.forward(self, x)


class ByDtype(Norm):
    def forward(self, x: Tensor) -> Tensor:
        normed = Norm.forward(self, x)
        return normed.clamp(max=60000) if x.dtype is torch.float16 else normed


class Clamped(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float().clamp(-1e4, 1e4)
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class ByValue(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.abs().max() > 1e6 else Norm.forward(self, x)


class ByGlobal(Norm):
    def forward(self, x: Tensor) -> Tensor:
        return Norm.forward(self, x) * (1.0 * FLAG)


class GlobalEps(Norm):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).type_as(x)


class Scaled(Norm):
    """By a number that the user may set later."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.scale * self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class ScaledByClass(Norm):
    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.scale * self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class ByProperty(Norm):
    @property
    def eps(self) -> float:
        return 1e-6

    @eps.setter
    def eps(self, value: float) -> None:
        pass


class Counting(Norm):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Norm.forward(self, x)


class InPlace(Norm):
    def forward(self, x: Tensor) -> Tensor:
        x *= 1
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x)


class Watched(Norm):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name)


class Unsteady(Norm):
    """Without the steps to float32, so that large numbers of half precision overflow."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Remembering(Norm):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return Norm.forward(self, x)


class Overridden(LlamaRMSNorm):  # type: ignore[misc,valid-type]
    def forward(self, hidden_states: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states)


class PartOverridden(GemmaRMSNorm):  # type: ignore[misc,valid-type]
    def _norm(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).clamp(max=1e4) + self.eps)


class Registering(Norm):
    def forward(self, x: Tensor) -> Tensor:
        self.register_buffer("seen", x)
        return Norm.forward(self, x)


class WithTensor(Norm):
    """By a tensor among the names of its file."""

    def forward(self, x: Tensor) -> Tensor:
        return Norm.forward(self, x) * ONES


class Printing(Norm):
    def forward(self, x: Tensor) -> Tensor:
        print(x)
        return Norm.forward(self, x)


class CallingTorch(Norm):
    """By a function of torch that goes by its arguments, and has a name of its own here."""

    def forward(self, x: Tensor) -> Tensor:
        return alpha_dropout(Norm.forward(self, x), 0.0)


class Tupled(Norm):
    def forward(self, x: Tensor) -> Any:
        return (Norm.forward(self, x),)


ALIKE = [EpsOutside, NoEps, PlusTwo, Biased, BiasedPlainly, Centered, OverRows, InTraining, InTrainingWithoutBranch]
ALIKE += [ByRows, ByRowsWithoutBranch, Cut, ByShape, ByDtype, Clamped, ByValue, ByGlobal, GlobalEps, Scaled]
ALIKE += [Registering, WithTensor, Printing, CallingTorch, Tupled]
ALIKE += [ScaledByClass, ByProperty, Counting, InPlace, Watched, Unsteady, Remembering]
ALIKE += [functools.partial(Overridden, 16), functools.partial(PartOverridden, 16)]


def name_of(kind: Any) -> str:
    return str(getattr(kind, "func", kind).__name__)


@pytest.mark.parametrize("kind", ALIKE, ids=name_of)
def test_a_norm_that_computes_something_else_is_never_fused(kind: Any) -> None:
    assert find_layers(kind()) == {}


NUMBERS = [EpsOutside, NoEps, PlusTwo, BiasedPlainly, Centered, OverRows, ByDtype, Clamped, InPlace, Unsteady, Tupled]


@pytest.mark.parametrize("kind", NUMBERS, ids=name_of)
def test_numbers_tell_a_norm_of_a_library_that_computes_something_else(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recognition, "_ANSWERS", {})
    monkeypatch.setattr(provable, "is_of_library", lambda function: True)
    norms = [kind(), WithMethod()]
    assert list(rms_norms(nn.ModuleList(norms))) == norms[1:]


@pytest.mark.parametrize("kind", [Norm, WithMethod])
def test_a_norm_of_the_users_own_is_fused_if_examples_prove_it(kind: Any) -> None:
    norm = kind()
    nn.init.normal_(norm.weight)
    [found] = rms_norms(norm).values()
    assert (found.eps, found.offset) == ("eps", 1.0 if kind is WithMethod else 0.0)
    x = torch.randn(65, 16)
    with torch.no_grad():
        expected = norm(x)
        with override_forwards(fused_forwards(find_layers(norm), Operators())):
            torch.testing.assert_close(norm(x), expected)


def test_a_norm_whose_eps_is_set_later_runs_as_it_is_written() -> None:
    norm, x = Norm(), torch.randn(3, 16)
    with torch.no_grad(), override_forwards(fused_forwards(find_layers(norm), Operators())):
        norm.eps = 1.0
        assert torch.equal(norm(x), Norm.forward(norm, x))


def test_a_hook_on_a_norm_fires_and_its_change_counts() -> None:
    norm, x = Norm(), torch.randn(3, 16)
    norm.register_forward_pre_hook(lambda module, args: (2 + args[0],))
    norm.register_forward_hook(lambda module, args, output: 3 * output)
    expected = norm(x)
    with torch.no_grad(), override_forwards(fused_forwards(find_layers(norm), Operators())):
        torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("case", ["forward", "method"])
def test_a_method_of_one_norm_s_own_is_run(case: str) -> None:
    norm, x = WithMethod(), torch.randn(3, 16)
    assert list(rms_norms(norm)) == [norm]
    setattr(norm, {"forward": "forward", "method": "_norm"}[case], lambda given: given + 1)
    assert rms_norms(norm) == {}
    expected = norm(x)
    with override_forwards(fused_forwards(find_layers(norm), Operators())):
        assert torch.equal(norm(x), expected)


def test_a_method_that_somebody_gives_the_library_s_class_is_judged_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = LlamaRMSNorm(16)
    assert list(rms_norms(norm)) == [norm]
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: F.relu(self.weight * x))
    assert rms_norms(norm) == {}
    monkeypatch.undo()
    assert list(rms_norms(norm)) == [norm]
    monkeypatch.setattr(GemmaRMSNorm, "_norm", lambda self, x: x)
    assert rms_norms(GemmaRMSNorm(16)) == {}


@pytest.mark.parametrize("other", [types.ModuleType("torch"), types.SimpleNamespace(rsqrt=torch.sqrt, float32=None)])
def test_a_norm_among_whose_names_torch_is_another_is_left_alone(other: Any) -> None:
    kind = type("Other", (LlamaRMSNorm,), {"forward": with_names(LlamaRMSNorm.forward, {"torch": other})})
    assert rms_norms(kind(16)) == {}


def wrapped(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def forward(*args: Any) -> Any:
        return 2 * function(*args)

    return forward


def test_a_wrapper_that_names_the_library_s_function_is_not_it() -> None:
    kind = type("Wrapped", (LlamaRMSNorm,), {"forward": wrapped(LlamaRMSNorm.forward)})
    assert rms_norms(kind(16)) == {}


class LayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


class ClampedLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(input.clamp(-1e4, 1e4), self.normalized_shape, self.weight, self.bias, self.eps)


class DoubledLayerNorm(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)


def test_a_layer_norm_of_the_users_own_goes_with_sums_if_it_is_one() -> None:
    norms = [kind(16) for kind in (nn.LayerNorm, LayerNorm, ClampedLayerNorm, DoubledLayerNorm)]
    assert list(sum_norms(nn.ModuleList(norms), {})) == norms[:2]


# Gated norms.


class Gated(Norm):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float() * F.silu(gate.float())
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)).type_as(x)

    def __init__(self) -> None:
        super().__init__()
        self.variance_epsilon = 1e-6


class GateAfter(Gated):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (normed * F.silu(gate.float())).type_as(x)


class OptionalGate(Gated):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x if gate is None else Gated.forward(self, x, gate)


def test_a_gated_norm_of_the_users_own_is_fused_if_examples_prove_it() -> None:
    norms = [Gated(), GateAfter(), OptionalGate()]
    assert list(gated_norms(nn.ModuleList(norms))) == norms[:1]


# Layers with residuals.


class Part(nn.Module):
    """Attention, which gives a tuple, or a perceptron."""

    def __init__(self, several: bool = False) -> None:
        super().__init__()
        self.linear, self.several = nn.Linear(16, 16), several

    def forward(self, hidden_states: Tensor, **_: Any) -> Any:
        return (self.linear(hidden_states), None) if self.several else self.linear(hidden_states)


class Decoder(nn.Module):
    """The user's own layer, as a model that is not in transformers has it."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()
        self.self_attn, self.mlp = Part(several=True), Part()
        self.factor = 1.0

    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        residual = hidden_states
        hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=mask)
        hidden_states = residual + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class WithKeywords(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=hidden_states, mask=mask, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        return residual + self.mlp(self.post_attention_layernorm(hidden_states))


class DroppingKeywords(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None, **kwargs: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=mask)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class FromNormed(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        normed = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states=normed, mask=mask)
        hidden_states = normed + hidden_states
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Parallel(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=mask)
        return hidden_states + attended + self.mlp(self.post_attention_layernorm(hidden_states))


class ByFactor(Decoder):
    """By a number that the user may set later."""

    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=mask)
        hidden_states = hidden_states + attended * self.factor
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class WithoutMask(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=None)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class InTrainingLayer(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        if self.training:
            return hidden_states
        return Decoder.forward(self, hidden_states, mask)


class ManyRows(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        return hidden_states if hidden_states.shape[0] > 64 else Decoder.forward(self, hidden_states, mask)


class ClampedHalf(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        found = Decoder.forward(self, hidden_states, mask)
        return found.clamp(max=60000) if found.dtype is torch.float16 else found


class Halved(Decoder):
    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=mask)
        hidden_states = hidden_states + attended
        return hidden_states + 0.5 * self.mlp(self.post_attention_layernorm(hidden_states))


class Twice(Decoder):
    """Calls a part once more, whose hooks would miss it."""

    def forward(self, hidden_states: Tensor, mask: Any = None) -> Tensor:
        self.mlp(hidden_states)
        return Decoder.forward(self, hidden_states, mask)


def test_calls_and_numbers_tell_a_layer_of_a_library_that_computes_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recognition, "_ANSWERS", {})
    monkeypatch.setattr(provable, "is_of_library", lambda function: True)
    others = [kind() for kind in (FromNormed, Parallel, WithoutMask, InTrainingLayer, ClampedHalf, Halved, Twice)]
    assert residuals(nn.ModuleList([*others, known := Decoder()])) == [known]


OTHERS = [
    DroppingKeywords,
    FromNormed,
    Parallel,
    ByFactor,
    WithoutMask,
    InTrainingLayer,
    ManyRows,
    ClampedHalf,
    Halved,
    Twice,
]


def residuals(model: nn.Module) -> list[nn.Module]:
    return list(residual_layers(model, sum_norms(model, rms_norms(model)))[0])


@pytest.mark.parametrize("kind", OTHERS)
def test_a_layer_that_calls_its_parts_in_another_way_is_never_fused(kind: Any) -> None:
    layer, x = kind(), torch.randn(65, 3, 16)
    assert residuals(layer) == []
    with torch.no_grad():
        expected = layer(x, mask=x)
        with override_forwards(fused_forwards(find_layers(layer), Operators())):
            torch.testing.assert_close(layer(x, mask=x), expected)


@pytest.mark.parametrize("kind", [Decoder, WithKeywords])
def test_a_layer_of_the_users_own_is_fused_if_it_is_proven(kind: Any) -> None:
    model, x, seen = kind(), torch.randn(65, 3, 16), []
    assert residuals(model) == [model]
    model.post_attention_layernorm.register_forward_hook(lambda *_: seen.append(1))

    class Recorded(Operators):
        def add_rms_norm(self, *args: Any) -> Any:
            seen.append(2)
            return super().add_rms_norm(*args)

    with torch.no_grad():
        expected = model(x, mask=x)
        with override_forwards(fused_forwards(find_layers(model), Recorded())):
            torch.testing.assert_close(model(x, mask=x), expected)
    assert seen == [1, 2, 1]


# Gated perceptrons, and activations.


class OtherGate(LlamaMLP):  # type: ignore[misc,valid-type]
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))
        return found


class ShiftedGate(LlamaMLP):  # type: ignore[misc,valid-type]
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + 1))
        return found


class GateByRows(LlamaMLP):  # type: ignore[misc,valid-type]
    def forward(self, x: Tensor) -> Tensor:
        return x if x.shape[0] > 64 else LlamaMLP.forward(self, x)


class OwnGate(LlamaMLP):  # type: ignore[misc,valid-type]
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return found


@pytest.mark.parametrize("kind", [LlamaMLP, OwnGate, OtherGate, ShiftedGate, GateByRows])
def test_a_perceptron_is_fused_only_if_it_is_proven(kind: Any) -> None:
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=32, num_attention_heads=2)
    module = kind(config)
    assert (list(gate_layers(module)) == [module]) is (kind in (LlamaMLP, OwnGate))


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Hard(nn.Module):
    """Equal to SiLU on all numbers but large ones."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 100, x + 1, x * torch.sigmoid(x))


class Trained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if self.training else x * torch.sigmoid(x)


class Beta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.beta = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def test_an_activation_is_fused_only_if_it_is_proven() -> None:
    kinds = [Swish, QuickGELU, Hard, Trained, Beta, transformers.activations.QuickGELUActivation, nn.ReLU, nn.Identity]
    modules = [kind() for kind in kinds]
    assert list(activation_layers(nn.ModuleList(modules))) == modules[:1]


# Rotary embeddings.


def attention(rotary: Any) -> Any:
    def forward(self: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin)

    return type("Attention", (nn.Module,), {"forward": with_names(forward, {"apply_rotary_pos_emb": rotary})})()


def test_a_rotary_embedding_of_the_users_own_that_tells_shapes_is_left_alone() -> None:
    def own(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return apply_rotary_pos_emb(q, k, cos, sin) if q.shape[0] < 64 else (q, k)

    library = attention(apply_rotary_pos_emb)
    assert list(rotary_layers(library)) == [library]
    for rotary in (own, wrapped(apply_rotary_pos_emb), functools.partial(apply_rotary_pos_emb), max, None):
        assert rotary_layers(attention(rotary)) == {}


# The proof itself.


def test_a_proof_advances_no_generator_and_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_ANSWERS", {})
    runs: list[int] = []
    monkeypatch.setattr(
        recognition.Candidate,
        "run",
        lambda self, *args, run=recognition.Candidate.run, **given: runs.append(1) or run(self, *args, **given),
    )
    model, state = nn.Sequential(*(Norm() for _ in range(9))), torch.get_rng_state()
    assert len(rms_norms(model)) == 9
    first = len(runs)
    assert first > 0
    assert len(rms_norms(model)) == 9
    assert len(runs) == first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad, lambda: torch.autocast("cpu")])
def test_a_proof_does_not_go_by_the_caller_s_modes(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_ANSWERS", {})
    norm, half = Norm(), Norm().bfloat16()
    with mode():
        assert list(rms_norms(nn.ModuleList([norm, half]))) == [norm, half]
    assert norm.weight.grad is None


def test_a_proof_keeps_no_model_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recognition, "_ANSWERS", {})
    norm = Norm()
    assert list(rms_norms(norm)) == [norm]
    alive = weakref.ref(norm.weight)
    del norm
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("value", [object(), torch.ones(()), nn.Identity(), [1.0], types.SimpleNamespace(scale=2.0)])
def test_an_object_that_may_change_and_stay_equal_is_no_setting(value: Any) -> None:
    class Holding(Norm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.holder.scale

    norm = Holding()
    assert provable.settings_read(norm, [Holding.forward]) == {}
    vars(norm)["holder"] = value
    assert provable.settings_read(norm, [Holding.forward]) is None


def test_functions_of_a_library_are_those_of_its_files() -> None:
    forward = LlamaRMSNorm.forward
    module = sys.modules[LlamaRMSNorm.__module__]
    assert provable_code(LlamaRMSNorm, forward, ()) == (forward,)
    copied = types.FunctionType(forward.__code__.replace(co_filename=__file__), vars(module))
    assert provable_code(LlamaRMSNorm, copied, ()) == ()  # the user's own, of other words
