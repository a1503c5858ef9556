"""Rotary embeddings and cache writes of captured steps: fewer kernels, the same bits, and for these steps only."""

from __future__ import annotations

import copy
import functools
import logging
import os
import pickle
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("hypothesis")

import tiny_models as tiny  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from simplegraph.integrations.transformers.generate.store import FixedLayer  # noqa: E402
from simplegraph.integrations.transformers.kernels import usable  # noqa: E402
from simplegraph.integrations.transformers.kernels.rotary import (  # noqa: E402
    DTYPES,
    Rotate,
    apply_rotary_pos_emb,
    rotary_attentions,
    rotate_both,
    rotated_together,
    rotation,
)
from simplegraph.integrations.transformers.kernels.texts import with_names  # noqa: E402
from simplegraph.integrations.transformers.kernels.usable import triton_runs  # noqa: E402

TOKENS = 12
GREEDY = {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS, "do_sample": False}
MODELS = tiny.DECODERS | tiny.MIXTURES
WITH_ROTARY = sorted(set(MODELS) - {"gpt2"})
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter cuts numbers to bfloat16 off, where GPUs round them.
EXACT_DTYPES = [dtype for dtype in DTYPES if not (INTERPRETED and dtype is torch.bfloat16)]


def has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return torch.cuda.is_available() or INTERPRETED


needs_triton = pytest.mark.skipif(not has_triton(), reason="needs Triton, and a GPU or TRITON_INTERPRET=1")


# The functions.


def rotary_inputs(draw: Callable[..., Any], dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    """Queries and keys as slices of larger tensors, transposed or not; cos and sin of every row or of all."""
    rows, tokens, elements = draw(st.integers(1, 4)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def states() -> Tensor:
        heads, step = draw(st.integers(1, 5)), draw(st.sampled_from([1, 1, 2]))
        if draw(st.booleans()):
            made = torch.randn(rows, tokens, heads + 1, elements * step, generator=generator).transpose(1, 2)
        else:
            made = torch.randn(rows, heads + 1, tokens, elements * step, generator=generator)
        return made.to(device, dtype)[:, 1:, :, ::step]

    shape = (2, draw(st.sampled_from([1, rows])), tokens, elements)
    cos, sin = torch.randn(shape, generator=generator).to(device, dtype)
    if draw(st.booleans()):
        sin = sin.mT.contiguous().mT
    return states(), states(), cos, sin


def assert_the_same_bits(rotate: Rotate, dtype: torch.dtype, draw: Any) -> None:
    inputs = rotary_inputs(draw, dtype, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for actual, expected in zip(rotate(*inputs), modeling_llama.apply_rotary_pos_emb(*inputs), strict=True):
        assert actual.dtype is dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=60)
def test_heads_embedded_together_have_the_same_bits(dtype: torch.dtype, data: Any) -> None:
    assert_the_same_bits(rotate_both, dtype, data.draw)


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@given(data=st.data())
@settings(max_examples=60)
def test_the_kernel_has_the_same_bits(dtype: torch.dtype, data: Any) -> None:
    assert_the_same_bits(rotation(triton=True), dtype, data.draw)


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize("columns", [1, 16, 100, 2048, 5000])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_the_norm_s_kernel_is_as_exact_as_torch_s(
    dtype: torch.dtype, columns: int, offset: float, device: torch.device
) -> None:
    from simplegraph.integrations.transformers.kernels.norm_kernel import rms_norm

    x = (3 * torch.randn(3, 2, 2 * columns, device=device)).to(dtype)[..., ::2]
    weight = torch.randn(columns, device=device).to(dtype)
    exact, by_torch = (
        nn.functional.rms_norm(each, (columns,), given_weight, 1e-5)
        for each, given_weight in ((x.double(), weight.double() + offset), (x.float(), weight.float() + offset))
    )
    by_torch = by_torch.to(dtype)
    found = rms_norm(x, weight, 1e-5, offset)
    assert found.dtype is dtype
    unit = torch.finfo(dtype).eps * exact.abs()
    slack = 4 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert ((found - exact).abs() <= (4 if dtype is torch.float32 else 0.502) * unit + 1e-7).all()
    assert (found - exact).abs().max() <= (by_torch - exact).abs().max() * 1.05 + slack


@needs_triton
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@given(data=st.data())
@settings(max_examples=40)
def test_a_token_s_keys_and_values_are_written_where_they_belong_and_nowhere_else(
    dtype: torch.dtype, data: Any
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, heads, length = (data.draw(st.integers(1, most)) for most in (4, 3, 40))
    elements = data.draw(st.sampled_from([1, 16, 33, 64]))
    position = data.draw(st.integers(0, length - 1))
    states = torch.randn(2, rows, 1, heads, elements).to(device, dtype).transpose(2, 3)
    stores = [torch.randn(2, rows + 1, heads, length + 7, elements).to(device, dtype)]
    stores.append(stores[0].clone())
    for store, triton in zip(stores, (True, False), strict=True):
        keys, values = store[:, :rows, :, :length]
        layer = FixedLayer(keys, values, torch.tensor([position], device=device), 0, triton=triton)
        assert layer._are_written_together(*states)
        layer.update(*states)
    assert torch.equal(*stores)
    assert torch.equal(stores[0][0, :rows, :, position], states[0, :, :, 0])


@pytest.mark.parametrize("case", ["as kept", "float32 into bfloat16", "smaller values", "two tokens"])
def test_what_the_kernel_would_not_copy_is_written_by_torch(
    case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    kernels = ModuleType("simplegraph.attention.kernels.pages")
    kernels.write_pages = lambda *args: written.append(args)
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    dtype = torch.bfloat16 if case == "float32 into bfloat16" else torch.float32
    keys, values = torch.zeros(2, 2, 3, 8, 16, device=device, dtype=dtype)
    values = values[..., :8].clone() if case == "smaller values" else values
    tokens = 2 if case == "two tokens" else 1
    position = torch.arange(5, 5 + tokens, device=device)
    key, value = (torch.randn(2, 3, tokens, kept.shape[3], device=device) for kept in (keys, values))
    FixedLayer(keys, values, position, 0, triton=True).update(key, value)
    assert len(written) == (case == "as kept")
    if not written:
        assert torch.equal(keys[:, :, 5 : 5 + tokens], key.to(dtype))
        assert torch.equal(values[:, :, 5 : 5 + tokens], value.to(dtype))


# The swap.


def counted(calls: list[int], *tensors: Tensor) -> Any:
    calls.append(1)
    # A product of matrices picks its kernel by strides.
    return tuple(embedded.contiguous() for embedded in rotate_both(*tensors))


def attention(device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    config = transformers.LlamaConfig(**tiny.LLAMA)
    config._attn_implementation = "eager"
    return modeling_llama.LlamaAttention(config, 0).to(device, dtype).eval()


def call(module: Any, dtype: torch.dtype = torch.float32, trig: torch.dtype | None = None) -> Tensor:
    """One token of two rows."""
    device = module.q_proj.weight.device
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 1, 64, generator=generator).to(device, dtype)
    cos, sin = torch.randn(2, 2, 1, 16, generator=generator).to(device, trig or dtype)
    with torch.no_grad():
        output: Tensor = module(hidden, position_embeddings=(cos, sin), attention_mask=None)[0]
    return output


def altered(rotary: Any = modeling_llama.apply_rotary_pos_emb, half: Any = None, default: int = 1) -> Any:
    """An attention of Llama's in whose module's names a function is another."""
    rotary = with_names(rotary, {"rotate_half": half or modeling_llama.rotate_half})
    rotary.__defaults__ = (default,)
    forward = with_names(modeling_llama.LlamaAttention.forward, {"apply_rotary_pos_emb": rotary})
    return type("Altered", (modeling_llama.LlamaAttention,), {"forward": forward})


def test_attentions_are_known_by_the_text_of_the_function_that_they_call(device: torch.device) -> None:
    class Renamed(modeling_llama.LlamaAttention):  # type: ignore[misc,name-defined]
        pass

    class Wrapped(modeling_llama.LlamaAttention):  # type: ignore[misc,name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    def swapped(x):  # type: ignore[no-untyped-def]
        x1 = x[..., : x.shape[-1] // 2]
        x2 = x[..., x.shape[-1] // 2 :]
        return torch.cat((x2, -x1), dim=-1)

    def thirds(x):  # type: ignore[no-untyped-def]
        x1 = x[..., : x.shape[-1] // 3]
        x2 = x[..., x.shape[-1] // 3 :]
        return torch.cat((-x2, x1), dim=-1)

    def subtracted(q, k, cos, sin, unsqueeze_dim=1):  # type: ignore[no-untyped-def]
        cos = cos.unsqueeze(unsqueeze_dim)
        sin = sin.unsqueeze(unsqueeze_dim)
        q_embed = (q * cos) - (modeling_llama.rotate_half(q) * sin)
        k_embed = (k * cos) + (modeling_llama.rotate_half(k) * sin)
        return q_embed, k_embed

    config = transformers.LlamaConfig(**tiny.LLAMA)
    kinds = [Wrapped, altered(half=swapped), altered(half=thirds), altered(rotary=subtracted), altered(default=2)]
    unknown = [*(kind(config, 0) for kind in kinds), nn.Linear(2, 2)]
    known = [modeling_llama.LlamaAttention(config, 0), Renamed(config, 0)]
    known.append(altered()(config, 0))  # in which nothing is another
    assert rotary_attentions(nn.ModuleList([*known, *unknown])) == known


def test_an_embedding_of_part_of_a_head_is_left_alone() -> None:
    config = transformers.GPTNeoXConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99
    )
    model = modeling_gpt_neox.GPTNeoXForCausalLM(config)
    assert "apply_rotary_pos_emb" in modeling_gpt_neox.GPTNeoXAttention.forward.__code__.co_names
    assert rotary_attentions(model) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_attention_answers_to_the_bit(dtype: torch.dtype, device: torch.device) -> None:
    module, calls = attention(device, dtype), []
    expected, before = call(module, dtype), dict(vars(module))
    with rotated_together([module], functools.partial(counted, calls)):
        found = call(module, dtype)
    assert calls == [1]
    assert torch.equal(found, expected)
    assert vars(module) == before
    assert modeling_llama.LlamaAttention.forward.__globals__ is vars(modeling_llama)


@pytest.mark.parametrize("case", ["thread", "later", "another", "own forward", "mixed dtypes", "gradient"])
def test_everybody_else_has_the_model_s_own(case: str, device: torch.device) -> None:
    module, other, calls = attention(device), attention(device), []
    if case == "own forward":
        module.forward = functools.partial(type(module).forward, module)
    with rotated_together([module], functools.partial(counted, calls)):
        if case == "thread":
            thread = threading.Thread(target=call, args=(module,))
            thread.start()
            thread.join()
        elif case == "another":
            call(other)
        elif case == "own forward":
            call(module)
        elif case == "mixed dtypes":
            # Queries are of float64 then, and values are not.
            with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
                call(module, trig=torch.float64)
        elif case == "gradient":
            cos, sin = torch.randn(2, 2, 1, 16, device=device)
            hidden = torch.randn(2, 1, 64, device=device)
            module(hidden, position_embeddings=(cos, sin), attention_mask=None)[0].sum().backward()
            assert module.q_proj.weight.grad is not None
    if case == "later":
        call(module)
    assert calls == []
    assert ("forward" in vars(module)) is (case == "own forward")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_meanwhile_has_the_model_s_own(copied: Callable[[Any], Any], device: torch.device) -> None:
    module, calls = attention(device), []
    with rotated_together([module], functools.partial(counted, calls)):
        other = copied(module)
        found = call(other)
    module.o_proj.weight.data.zero_()  # which is not the copy's
    assert torch.equal(found, call(other))
    assert not torch.equal(found, call(module))
    assert calls == []


# In a generation.


@pytest.mark.parametrize("fused_kernels", [True, False])
@pytest.mark.parametrize("name", WITH_ROTARY)
def test_steps_embed_together_only_if_that_is_wanted(
    name: str, fused_kernels: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = (tiny.build(MODELS[name], device) for _ in range(2))
    calls: list[int] = []
    monkeypatch.setattr(
        "simplegraph.integrations.transformers.generate.decode_step.rotation",
        lambda **_: functools.partial(counted, calls),
    )
    batch = tiny.prompts([7, 4, 6], device)
    with graph_generation(model, max_batch_size=4, max_length=64, fused_kernels=fused_kernels) as graphs:
        found, expected = model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY)
        assert torch.equal(found, expected)
        assert graphs.stats.replays == TOKENS - 3
    layers = model.config.num_hidden_layers
    assert len(rotary_attentions(model)) == layers
    assert bool(calls) is fused_kernels
    assert len(calls) in (0, 3 * layers)  # the first step, a warmup and the capture
    calls.clear()
    model.generate(**batch, **GREEDY)
    assert not calls


class Kernels:
    """Stands in for Triton's kernels, by torch's operators."""

    def rotate(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(apply_rotary_pos_emb(*tensors))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, eps)

    def write_pages(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *rest: Any) -> None:
        for kept, state in ((keys, k), (values, v)):
            kept.index_copy_(2, slots, state.unsqueeze(2))

    # Wrong ones.

    def rounded_once(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        wide = apply_rotary_pos_emb(*(tensor.double() for tensor in (q, k, cos, sin)))
        return tuple(tensor.to(q.dtype) for tensor in wide)

    def another_eps(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self.rms_norm(x, weight, 0.1)

    def without_values(self, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, *rest: Any) -> None:
        self.write_pages(k, k, keys, values, slots)

    def without_compiler(self, *args: Any) -> Any:
        raise RuntimeError("Failed to find C compiler")


HOMES = {
    "rotate": "simplegraph.integrations.transformers.kernels.rotary_kernel",
    "rms_norm": "simplegraph.integrations.transformers.kernels.norm_kernel",
    "write_pages": "simplegraph.attention.kernels.pages",
}


@pytest.mark.parametrize(
    ("kernel", "wrong", "words"),
    [
        ("rotate", "rounded_once", "rounded"),
        ("rms_norm", "another_eps", "norm"),
        ("write_pages", "without_values", "written"),
        *((kernel, "without_compiler", "C compiler") for kernel in HOMES),
    ],
)
def test_where_a_kernel_fails_or_answers_otherwise_torch_s_operators_serve(
    kernel: str, wrong: str, words: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Device:
        """A GPU, as far as the question goes."""

        type = "cuda"

        def __str__(self) -> str:
            return "cuda:7"

    for name, home in HOMES.items():
        module = ModuleType(home)
        setattr(module, name, getattr(Kernels(), name))
        monkeypatch.setitem(sys.modules, home, module)
    arange = torch.arange
    monkeypatch.setattr(torch, "arange", lambda count, device: arange(count))
    assert triton_runs(Device(), torch.bfloat16, 64) is True
    assert not caplog.text
    monkeypatch.setattr(sys.modules[HOMES[kernel]], kernel, getattr(Kernels(), wrong))
    assert triton_runs(Device(), torch.bfloat16, 64) is False
    assert "cuda:7" in caplog.text
    assert words in caplog.text
    assert caplog.handler.level <= logging.WARNING


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@pytest.mark.parametrize("elements", [2, 64, 80, 256])
def test_the_kernels_pass_their_own_trial(dtype: torch.dtype, elements: int) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    assert usable._wrong(device, dtype, elements) is None


def test_a_cpu_is_not_asked_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usable, "_wrong", lambda *args: pytest.fail("it was tried"))
    assert triton_runs(torch.device("cpu"), torch.float32, 64) is False
