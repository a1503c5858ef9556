"""A captured step runs fewer kernels than the model's own forward, and answers the same."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

transformers = pytest.importorskip("transformers", minversion="5.0")

import tiny_models as tiny  # noqa: E402
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # noqa: E402
from transformers.modeling_utils import AttentionInterface  # noqa: E402
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm  # noqa: E402
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaRMSNorm  # noqa: E402
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm  # noqa: E402
from transformers.models.t5.modeling_t5 import T5LayerNorm  # noqa: E402

from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from simplegraph.integrations.transformers.kernels.grouped_heads import grouped_heads  # noqa: E402
from simplegraph.integrations.transformers.kernels.norms import fused, rms_norms  # noqa: E402

TOKENS = 12
GREEDY = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
ROWS, SHARED, GROUPS, LENGTH, ELEMENTS = 3, 2, 4, 32, 16


class Recorder(TorchDispatchMode):
    """The operators that ran, and the largest result that is not a view of an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.overloadpacket.__name__)
        if isinstance(result, Tensor) and not any(alias.alias_info for alias in func._schema.returns):
            self.largest = max(self.largest, result.numel())
        return result


# Heads that share keys and values.


class Attention(nn.Module):
    num_key_value_groups = GROUPS
    is_causal = True


def attention_inputs(device: torch.device, queries: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys and values out of a longer store, and a mask that hides some positions."""
    torch.manual_seed(0)
    query = torch.randn(ROWS, SHARED * GROUPS, queries, ELEMENTS, device=device)
    store = torch.randn(2, ROWS + 1, SHARED, 2 * LENGTH, ELEMENTS, device=device)
    mask = torch.rand(ROWS, 1, queries, LENGTH, device=device) > 0.4
    mask[..., 0] = True
    return query, store[0, :ROWS, :, :LENGTH], store[1, :ROWS, :, :LENGTH], mask


def registered(*tensors: Any, module: Any = None, **kwargs: Any) -> Tensor:
    output: Tensor = AttentionInterface()["sdpa"](module or Attention(), *tensors, **kwargs)[0]
    return output


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_heads_in_groups_give_the_same_sums_without_copying_keys(
    masked: bool, scaling: float | None, device: torch.device
) -> None:
    query, keys, values, mask = attention_inputs(device)
    given = (query, keys, values, mask if masked else None)
    expected = registered(*given, scaling=scaling)
    with grouped_heads(), Recorder() as recorder:
        found = registered(*given, scaling=scaling)
    assert recorder.largest < keys.numel()
    assert found.shape == expected.shape == (ROWS, 1, SHARED * GROUPS, ELEMENTS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_a_mask_becomes_numbers_once_for_all_layers(device: torch.device) -> None:
    given = attention_inputs(device)
    with grouped_heads(), Recorder() as recorder:
        first = registered(*given)
        before = recorder.names.count("masked_fill_")
        second = registered(*given)
        other = registered(*given[:3], ~given[3])
    assert before == 1
    assert recorder.names.count("masked_fill_") == 2
    assert torch.equal(first, second)
    torch.testing.assert_close(other, registered(*given[:3], ~given[3]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", ["two queries", "a mask of each head", "numbers", "bias", "no groups"])
def test_everything_else_is_what_it_was(case: str, device: torch.device) -> None:
    query, keys, values, mask = attention_inputs(device, queries=2 if case == "two queries" else 1)
    module, kwargs = Attention(), {}
    given: tuple[Any, ...] = (query, keys, values, mask)
    if case == "a mask of each head":
        given = (query, keys, values, torch.rand(ROWS, SHARED * GROUPS, 1, LENGTH, device=device) > 0.4)
    elif case == "numbers":
        given = (query, keys, values, torch.randn(ROWS, 1, 1, LENGTH, device=device))
    elif case == "bias":
        kwargs["position_bias"] = torch.randn(1, SHARED * GROUPS, 1, LENGTH, device=device)
    elif case == "no groups":
        module.num_key_value_groups, given = 1, (query[:, :SHARED], keys, values, mask)
    expected = registered(*given, module=module, **kwargs)
    with grouped_heads():
        torch.testing.assert_close(registered(*given, module=module, **kwargs), expected, rtol=1e-6, atol=1e-6)


def test_other_threads_and_whoever_comes_later_find_transformers_own(device: torch.device) -> None:
    given = attention_inputs(device)
    operators: list[list[str]] = []

    def elsewhere() -> None:
        with Recorder() as recorder:
            registered(*given)
        operators.append(recorder.names)

    elsewhere()
    with grouped_heads():
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        with pytest.raises(ValueError, match="the step"), grouped_heads():
            raise ValueError("the step")
        assert AttentionInterface()["sdpa"] is not sdpa_attention_forward
    assert operators[0] == operators[1]
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward


def test_an_attention_that_a_user_registered_as_sdpa_is_called(device: torch.device) -> None:
    calls = []

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("sdpa", own)
    try:
        with grouped_heads():
            registered(*attention_inputs(device))
        assert AttentionInterface()["sdpa"] is own
    finally:
        AttentionInterface.register("sdpa", sdpa_attention_forward)
    assert calls == [1]


# Norms.


@pytest.mark.parametrize("kind", [LlamaRMSNorm, Olmo2RMSNorm, T5LayerNorm, GemmaRMSNorm, Gemma3RMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fused_norm_is_within_a_unit_in_the_last_place(kind: Any, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(0)
    norm = kind(64, eps=1e-3).to(device, dtype)
    norm.weight.data.normal_()
    hidden = torch.randn(3, 5, 64, device=device).to(dtype)
    expected = norm(hidden)
    assert list(rms_norms(norm)) == [norm]
    with mock.patch.object(nn.functional, "rms_norm", wraps=nn.functional.rms_norm) as one, fused(rms_norms(norm)):
        found = norm(hidden)
    one.assert_called_once()
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert vars(norm).keys() == vars(kind(64)).keys()


@pytest.mark.parametrize("case", ["few columns", "too many columns", "gradient", "another dtype"])
def test_triton_s_norm_is_for_what_it_takes(case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ModuleType("simplegraph.integrations.transformers.kernels.norm_kernel")
    kernel.MAX_COLUMNS = 8
    kernel.rms_norm = lambda x, weight, eps, offset: torch.full_like(x, eps)  # told apart by its answer
    monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
    columns = 16 if case == "too many columns" else 8
    norm = LlamaRMSNorm(columns, eps=0.25).to(device)
    hidden = torch.randn(3, columns, device=device)
    hidden = hidden.double() if case == "another dtype" else hidden
    expected = norm(hidden)
    with torch.set_grad_enabled(case == "gradient"), fused(rms_norms(norm), triton=True):
        found = norm(hidden)
    assert torch.equal(found, torch.full_like(hidden, 0.25)) is (case == "few columns")
    if case != "few columns":
        torch.testing.assert_close(found, expected)


def test_only_norms_of_a_known_text_are_fused() -> None:
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
    with fused(rms_norms(nn.ModuleList([patched, hooked]))):
        assert torch.equal(patched(hidden), hidden + 1)
        hooked(hidden)
    assert fired == [1]
    assert torch.equal(patched(hidden), hidden + 1)
    assert "forward" not in vars(hooked)


def test_a_norm_of_which_a_part_is_the_users_own_stays(device: torch.device) -> None:
    patched, other = (GemmaRMSNorm(8).to(device) for _ in range(2))
    patched._norm = lambda x: x * 0.5
    norms = rms_norms(nn.ModuleList([patched, other]))
    assert list(norms) == [other]
    with fused(norms):
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
        with Recorder() as recorder, torch.autocast(device.type, torch.bfloat16, enabled=case == "autocast"):
            assert (norm(x=hidden) if case == "keyword" else norm(hidden)).dtype == dtype
        names.extend(recorder.names)

    call()
    expected = names.copy()
    names.clear()
    with fused(rms_norms(norm)):
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
    monkeypatch.setattr("simplegraph.integrations.transformers.generate.decoder.triton_runs", lambda *args: False)
    monkeypatch.setattr(nn.functional, "rms_norm", lambda *args, **kwargs: calls.append(1) or rms_norm(*args, **kwargs))
    batch = tiny.prompts([7, 4, 6], device)
    with graph_generation(model, max_batch_size=4, max_length=64, fused_kernels=fused_kernels) as graphs:
        assert torch.equal(model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY))
        assert graphs.stats.replays == TOKENS - 3
    steps = 2  # the compared one, which is the first, and the capture
    norms = rms_norms(model.get_decoder())
    assert len(norms) > 4
    assert len(calls) >= steps * len(norms) * fused_kernels
    assert len(calls) % len(norms) == 0
    assert bool(calls) is fused_kernels
