"""Proven RMS norms run as one kernel each, in captured steps only, and are as exact."""

from __future__ import annotations

import inspect
import threading
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from interpreted import EXACT_DTYPES, needs_triton  # noqa: E402
from operators_seen import OperatorRecorder  # noqa: E402
from stand_ins import stand_in_kernels  # noqa: E402
from tiny_generation import GREEDY, TOKENS  # noqa: E402
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.mamba2.modeling_mamba2 import Mamba2Config, Mamba2Model  # noqa: E402
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402

from simplegraph.fused.choice import chosen_operators  # noqa: E402
from simplegraph.fused.layers.kinds import KINDS, RMS_NORM, find_layers, fused_forwards  # noqa: E402
from simplegraph.fused.layers.norms import rms_norms  # noqa: E402
from simplegraph.fused.torch_operators import Operators  # noqa: E402
from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from simplegraph.integrations.transformers.overrides import override_forwards  # noqa: E402


def norm_forwards(model: nn.Module, *, triton: bool = False) -> Any:
    layers = find_layers(model, KINDS.keys() - {RMS_NORM})
    return fused_forwards(layers, chosen_operators(triton=triton))


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, T5LayerNorm, GemmaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_is_within_a_unit_in_the_last_place(kind: Any, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    norm = kind(64, eps=1e-3).to(device, dtype)
    norm.weight.data.normal_()
    hidden = torch.randn(3, 5, 64, device=device).to(dtype)
    expected = norm(hidden)
    assert list(rms_norms(norm)) == [norm]
    with (
        mock.patch.object(nn.functional, "rms_norm", wraps=nn.functional.rms_norm) as one,
        override_forwards(norm_forwards(norm)),
    ):
        found = norm(hidden)
    one.assert_called_once()
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert vars(norm).keys() == vars(kind(64)).keys()


@pytest.mark.parametrize("case", ["few columns", "too many columns", "gradient", "another dtype"])
def test_triton_s_norm_is_for_what_it_takes(case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernels:
        MAX_COLUMNS = 8

        def norm(self, x: Tensor, residual: None, weight: Tensor, bias: None, eps: float, *, offset: float) -> Any:
            return torch.full_like(x, eps), x  # told apart by its answer

    stand_in_kernels(monkeypatch, Kernels())
    columns = 16 if case == "too many columns" else 8
    norm = LlamaRMSNorm(columns, eps=0.25).to(device)
    hidden = torch.randn(3, columns, device=device)
    hidden = hidden.double() if case == "another dtype" else hidden
    expected = norm(hidden)
    with torch.set_grad_enabled(case == "gradient"), override_forwards(norm_forwards(norm, triton=True)):
        found = norm(hidden)
    assert torch.equal(found, torch.full_like(hidden, 0.25)) is (case == "few columns")
    if case != "few columns":
        torch.testing.assert_close(found, expected)


TINY_MAMBA2 = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "vocab_size": 99}
TINY_MAMBA2 |= {"num_hidden_layers": 2, "chunk_size": 8}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_norm_of_mamba2_is_one_operator(groups: int, dtype: torch.dtype, device: torch.device) -> None:
    kind = type(Mamba2Model(Mamba2Config(**TINY_MAMBA2)).layers[0].mixer.norm)
    sizes = (64 // groups,) if "group_size" in inspect.signature(kind).parameters else ()
    if not sizes and groups > 1:
        pytest.skip("this version of transformers has one group")
    norm = kind(64, *sizes, eps=1e-3).to(device, dtype)
    norm.weight.data.normal_()
    hidden, gate = torch.randn(3, 5, 64, device=device).to(dtype), torch.randn(3, 5, 128, device=device).to(dtype)
    gate = gate[..., 64:]
    counted = mock.Mock(wraps=Operators().gated_rms_norm)
    forwards = norm_forwards(norm)
    with mock.patch.object(Operators, "gated_rms_norm", lambda self, *given: counted(*given)):
        with override_forwards(forwards):
            found = norm(hidden, gate)
            assert counted.call_args.args[4] == groups
            assert torch.equal(found, norm(hidden, gate))
        assert counted.call_count == 2
        for given in [(hidden,), (hidden, None), (hidden, gate[:1]), (hidden, gate.double())]:
            with override_forwards(forwards):
                other = norm(*given)
            torch.testing.assert_close(other, norm(*given))
        assert counted.call_count == 2
    expected = norm(hidden, gate)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("case", ["another one later", "one that does not divide", "0"])
def test_a_gated_norm_goes_by_the_group_size_that_its_forward_reads(case: str, device: torch.device) -> None:
    kind = type(Mamba2Model(Mamba2Config(**TINY_MAMBA2)).layers[0].mixer.norm)
    if "group_size" not in inspect.signature(kind).parameters:
        pytest.skip("this version of transformers has one group")
    norm = kind(24, 24).to(device)
    forwards = norm_forwards(norm)
    norm.group_size = {"another one later": 8, "one that does not divide": 7, "0": 0}.get(case, 8)
    hidden, gate = torch.randn(2, 3, 24, device=device)
    try:
        expected = norm(hidden, gate)
    except (RuntimeError, ZeroDivisionError) as error:
        with override_forwards(forwards), pytest.raises(type(error)):
            norm(hidden, gate)
        return
    with override_forwards(forwards):
        torch.testing.assert_close(norm(hidden, gate), expected)


@pytest.mark.parametrize("weight", [None, 1.0, torch.ones(())], ids=["none", "a number", "no dimension"])
def test_a_gated_norm_without_a_row_of_weights_is_left_alone(weight: Any) -> None:
    kind = type(Mamba2Model(Mamba2Config(**TINY_MAMBA2)).layers[0].mixer.norm)
    norm = kind(24, *[24] * ("group_size" in inspect.signature(kind).parameters))
    del norm.weight
    norm.weight = weight
    assert find_layers(norm) == {}


def test_the_layers_of_a_mamba2_have_their_gated_norms_fused(device: torch.device) -> None:
    model = Mamba2Model(Mamba2Config(**TINY_MAMBA2)).to(device).eval()
    norms = [layer.mixer.norm for layer in model.layers]
    assert {module: layer.kind for module, layer in find_layers(model).items() if module in norms} == dict.fromkeys(
        norms, RMS_NORM
    )
    assert not set(norms) & find_layers(model, {RMS_NORM}).keys()
    tokens = torch.randint(90, (2, 7), device=device)
    with torch.no_grad():
        expected = model(tokens).last_hidden_state
        with override_forwards(norm_forwards(model)):
            found = model(tokens).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_only_norms_that_are_proven_are_fused() -> None:
    class Doubled(LlamaRMSNorm):  # type: ignore[misc,valid-type]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return 2 * super().forward(hidden_states)

    class Renamed(LlamaRMSNorm):  # type: ignore[misc,valid-type]
        pass

    class WithoutConstants(LlamaRMSNorm):  # type: ignore[misc,valid-type]
        def forward(self, hidden_states: Tensor) -> Tensor:
            return hidden_states + torch.tanh(hidden_states)

    own = WithoutConstants.forward
    own.__code__ = own.__code__.replace(co_consts=())  # as Python 3.14 has it

    class ByHalf(GemmaRMSNorm):  # type: ignore[misc,valid-type]
        def _norm(self, x: Tensor) -> Tensor:
            return x * 0.5

    norms = [Doubled(8), Renamed(8), ByHalf(8), nn.RMSNorm(8), nn.LayerNorm(8), WithoutConstants(8)]
    model = nn.ModuleList([LlamaRMSNorm(8), *norms])
    assert list(rms_norms(model)) == [model[0], model[2]]


def test_a_forward_of_the_users_own_stays_and_hooks_fire(device: torch.device) -> None:
    patched, hooked = (LlamaRMSNorm(8).to(device) for _ in range(2))
    patched.forward = lambda hidden: hidden + 1
    fired = []
    hooked.register_forward_hook(lambda *args: fired.append(1))
    hidden = torch.randn(2, 8, device=device)
    with override_forwards(norm_forwards(nn.ModuleList([patched, hooked]))):
        assert torch.equal(patched(hidden), hidden + 1)
        hooked(hidden)
    assert fired == [1]
    assert torch.equal(patched(hidden), hidden + 1)
    assert "forward" not in vars(hooked)


def test_a_norm_of_which_a_part_is_the_users_own_stays(device: torch.device) -> None:
    patched, other = (GemmaRMSNorm(8).to(device) for _ in range(2))
    patched._norm = lambda x: x * 0.5
    norms = nn.ModuleList([patched, other])
    assert list(rms_norms(norms)) == [other]
    with override_forwards(norm_forwards(norms)):
        assert torch.equal(patched(torch.ones(2, 8, device=device)), torch.full((2, 8), 0.5, device=device))


class Own(Tensor):
    """A tensor as a DTensor is one, which need not know every operator."""


@pytest.mark.parametrize("case", ["dtype", "float64", "autocast", "thread", "subclass", "keyword"])
def test_where_a_fused_norm_would_be_another_the_model_s_own_runs(case: str, device: torch.device) -> None:
    dtype = torch.float64 if case == "float64" else torch.float32
    norm = (GemmaRMSNorm if case == "keyword" else LlamaRMSNorm)(8).to(device, dtype)
    hidden = torch.randn(2, 8, device=device, dtype=torch.bfloat16 if case == "dtype" else dtype)
    hidden = hidden.as_subclass(Own) if case == "subclass" else hidden
    names: list[str] = []

    def call() -> None:
        with OperatorRecorder() as recorder, torch.autocast(device.type, torch.bfloat16, enabled=case == "autocast"):
            assert (norm(x=hidden) if case == "keyword" else norm(hidden)).dtype == dtype
        names.extend(recorder.names)

    call()
    expected = names.copy()
    names.clear()
    with override_forwards(norm_forwards(norm)):
        if case == "thread":
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
        else:
            call()
    assert names == expected


@pytest.mark.parametrize("fused_kernels", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma", "gemma3", "mixtral", "t5"])
def test_a_generation_has_fused_norms_in_its_steps_only_if_they_are_wanted(
    name: str, fused_kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tiny.DECODERS | tiny.MIXTURES | tiny.ENCODER_DECODERS
    plain, model = (tiny.build(models[name], device) for _ in range(2))
    calls = []
    rms_norm = nn.functional.rms_norm
    monkeypatch.setattr("simplegraph.fused.choice._problem", lambda *args: "tested elsewhere")
    norms = rms_norms(model.get_decoder())  # proven here, by examples that are not counted
    assert len(norms) > 4
    monkeypatch.setattr(nn.functional, "rms_norm", lambda *args, **kwargs: calls.append(1) or rms_norm(*args, **kwargs))
    batch = tiny.prompts([7, 4, 6], device)
    with graph_generation(model, max_batch_size=4, max_length=64, fused_kernels=fused_kernels) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == TOKENS - 2, graphs.report()
    steps = 2  # the compared one, which is the first, and the capture
    assert len(calls) >= steps * len(norms) * fused_kernels
    assert len(calls) % len(norms) == 0
    assert bool(calls) is fused_kernels


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize("columns", [1, 16, 100, 2048, 5000])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_s_kernel_is_as_exact_as_torch_s(
    dtype: torch.dtype, columns: int, offset: float, device: torch.device
) -> None:
    from simplegraph.fused.triton_operators import TritonOperators

    x = (3 * torch.randn(3, 2, 2 * columns, device=device)).to(dtype)[..., ::2]
    weight = torch.randn(columns, device=device).to(dtype)
    exact, by_torch = (
        nn.functional.rms_norm(each, (columns,), given_weight, 1e-5)
        for each, given_weight in ((x.double(), weight.double() + offset), (x.float(), weight.float() + offset))
    )
    by_torch = by_torch.to(dtype)
    found = TritonOperators().rms_norm(x, weight, 1e-5, offset)
    assert found.dtype is dtype
    unit = torch.finfo(dtype).eps * exact.abs()
    slack = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((found - exact).abs() <= (4 if dtype is torch.float32 else 0.502) * unit + 1e-7).all()
    assert (found - exact).abs().max() <= (by_torch - exact).abs().max() * 1.05 + slack
