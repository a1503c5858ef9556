"""Rotary embeddings of captured steps: fewer kernels, the same bits, and for these steps only."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", minversion="5.0")
pytest.importorskip("hypothesis")

import tiny_models as tiny  # noqa: E402
from changed_texts import changed  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from interpreted import EXACT_DTYPES, needs_triton  # noqa: E402
from tiny_generation import GREEDY, TOKENS  # noqa: E402
from transformers.models.gpt_neox import modeling_gpt_neox  # noqa: E402
from transformers.models.llama import modeling_llama  # noqa: E402

from simplegraph.fused.choice import chosen_operators  # noqa: E402
from simplegraph.fused.layers.kinds import fused_forwards  # noqa: E402
from simplegraph.fused.layers.provable import with_names  # noqa: E402
from simplegraph.fused.layers.rotary import rotary_layers  # noqa: E402
from simplegraph.fused.torch_operators import DTYPES, Operators  # noqa: E402
from simplegraph.integrations.transformers import graph_generation  # noqa: E402
from simplegraph.integrations.transformers.overrides import override_forwards  # noqa: E402

MODELS = tiny.DECODERS | tiny.MIXTURES
WITH_ROTARY = sorted(set(MODELS) - {"gpt2"})
Rotate = Callable[..., Any]


def counted(note: Callable[[Any], Any]) -> Operators:
    """Operators that note each rotation."""

    class Counted(Operators):
        def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            note(object())
            # A product of matrices picks its kernel by strides.
            return tuple(embedded.contiguous() for embedded in super().rotate(q, k, cos, sin))

    return Counted()


def rotary_attentions(model: nn.Module) -> list[nn.Module]:
    return list(rotary_layers(model))


def rotary_forwards(model: nn.Module, calls: list[Any]) -> Any:
    return fused_forwards(rotary_layers(model), counted(calls.append))


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
    assert_the_same_bits(Operators().rotate, dtype, data.draw)


@needs_triton
@pytest.mark.parametrize("dtype", EXACT_DTYPES)
@given(data=st.data())
@settings(max_examples=60)
def test_the_kernel_has_the_same_bits(dtype: torch.dtype, data: Any) -> None:
    assert_the_same_bits(chosen_operators(triton=True).rotate, dtype, data.draw)


# The forwards.


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
    forward = with_names(inspect.unwrap(modeling_llama.LlamaAttention.forward), {"apply_rotary_pos_emb": rotary})
    return type("Altered", (modeling_llama.LlamaAttention,), {"forward": forward})


def test_attentions_are_known_by_the_function_that_they_call(device: torch.device) -> None:
    class Renamed(modeling_llama.LlamaAttention):  # type: ignore[misc,name-defined]
        pass

    class Wrapped(modeling_llama.LlamaAttention):  # type: ignore[misc,name-defined]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    swapped = changed(modeling_llama.rotate_half, "(-x2, x1)", "(x2, -x1)")
    thirds = changed(modeling_llama.rotate_half, ": x.shape[-1] // 2]", ": x.shape[-1] // 3]")
    subtracted = changed(modeling_llama.apply_rotary_pos_emb, "(q * cos) +", "(q * cos) -")
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
    assert "apply_rotary_pos_emb" in inspect.unwrap(modeling_gpt_neox.GPTNeoXAttention.forward).__code__.co_names
    assert rotary_attentions(model) == []


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_attention_answers_to_the_bit(dtype: torch.dtype, device: torch.device) -> None:
    module, calls = attention(device, dtype), []
    expected, before = call(module, dtype), dict(vars(module))
    with override_forwards(rotary_forwards(module, calls)):
        found = call(module, dtype)
    assert len(calls) == 1
    assert torch.equal(found, expected)
    assert vars(module) == before
    assert inspect.unwrap(modeling_llama.LlamaAttention.forward).__globals__ is vars(modeling_llama)


def test_a_caller_from_before_the_cache_was_renamed_gets_its_cache_filled(device: torch.device) -> None:
    module, cache = attention(device, torch.float32), transformers.DynamicCache()
    with override_forwards(rotary_forwards(module, [])), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)
        hidden, (cos, sin) = torch.randn(2, 1, 64, device=device), torch.randn(2, 2, 1, 16, device=device)
        module(hidden, position_embeddings=(cos, sin), attention_mask=None, past_key_values=cache)
    assert cache.get_seq_length() == 1


@pytest.mark.parametrize("case", ["thread", "later", "another", "own forward", "mixed dtypes", "gradient"])
def test_everybody_else_has_the_model_s_own(case: str, device: torch.device) -> None:
    module, other, calls = attention(device), attention(device), []
    if case == "own forward":
        module.forward = functools.partial(type(module).forward, module)
    with override_forwards(rotary_forwards(module, calls)):
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
    with override_forwards(rotary_forwards(module, calls)):
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
    calls = functools.lru_cache(maxsize=None)(lambda call: None)  # a list that grows is a reason to run eagerly
    monkeypatch.setattr(
        "simplegraph.integrations.transformers.generate.decoder.operators_of", lambda *args: counted(calls)
    )
    batch = tiny.prompts([7, 4, 6], device)
    with graph_generation(model, max_batch_size=4, max_length=64, fused_kernels=fused_kernels) as graphs:
        found, expected = model.generate(**batch, **GREEDY), plain.generate(**batch, **GREEDY)
        assert torch.equal(found, expected)
        assert graphs.stats.replays == TOKENS - 2
    layers = model.config.num_hidden_layers
    assert len(rotary_attentions(model)) == layers
    assert calls.cache_info().misses == (2 * layers if fused_kernels else 0)  # the first step, the capture
    calls.cache_clear()
    model.generate(**batch, **GREEDY)
    assert not calls.cache_info().misses
