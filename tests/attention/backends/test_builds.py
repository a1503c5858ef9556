"""Libraries that lack a function or an argument are found when the backend is made; stand-ins for their modules."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from simplegraph import ConfigError
from simplegraph.attention import (
    FlashAttentionBackend,
    PagedKVCache,
)
from simplegraph.attention.backends import flash_attention
from simplegraph.attention.backends.flash_attention import problem_of
from simplegraph.attention.backends.flashinfer import FlashInferBackend, check_build, check_wrapper
from tests.support.attention_engine import AttentionEngine
from tests.support.reference_attention import reference_attention

CPU = torch.device("cpu")


class Flash(types.ModuleType):
    """FlashAttention as vLLM builds it: attends by the reference, and notes the masks that it was called with."""

    FA3_AVAILABLE = True

    def __init__(self, cache: PagedKVCache | None = None) -> None:
        super().__init__("vllm_flash_attn")
        self.scheduled: list[tuple[Any, ...]] = []
        self.computed: list[tuple[Any, ...]] = []

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Tensor,
        qkv_dtype: Any = None,
        cu_seqlens_q: Any = None,
        page_size: Any = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        has_softcap: bool = False,
        num_splits: int = 0,
    ) -> Tensor:
        self.scheduled.append((window_size, has_softcap, max_seqlen_k))
        return torch.zeros(batch_size, dtype=torch.int32)

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: Tensor,
        max_seqlen_k: int,
        seqused_k: Any = None,
        softmax_scale: float = 1.0,
        causal: bool = False,
        window_size: Any = None,
        softcap: float = 0.0,
        block_table: Any = None,
        return_softmax_lse: bool = False,
        out: Any = None,
        scheduler_metadata: Any = None,
        num_splits: int = 0,
        fa_version: int = 2,
        s_aux: Any = None,
    ) -> Any:
        self.computed.append((window_size, softcap, max_seqlen_k, None if s_aux is None else s_aux.dtype))
        cache = types.SimpleNamespace(
            keys=lambda layer: k, values=lambda layer: v, layout="NHD", page_size=k.shape[1], num_kv_heads=k.shape[2]
        )
        masks = {"window": window_size and window_size[0] + 1, "softcap": softcap or None, "sinks": s_aux}
        queries, lengths = cu_seqlens_q.diff(), seqused_k
        real = int((lengths > 0).sum())
        rows = int(cu_seqlens_q[real])
        assert lengths.max() <= max_seqlen_k
        found: Any = cache
        step = (queries[:real].tolist(), lengths[:real].tolist(), block_table.tolist()[:real])
        out[:rows] = reference_attention(q[:rows], found, 0, *step, softmax_scale, **masks)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Iterator[Flash]:
    found = Flash()
    monkeypatch.setattr(flash_attention, "flash_module", lambda device: found)
    card = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    with torch.inference_mode():
        yield found


def test_a_window_of_w_is_w_minus_1_in_the_schedule_and_in_the_kernel(flash: Flash) -> None:
    """Else the schedule is for other work than the kernel's. Only keys of the window are in its longest length."""
    capped = functools.partial(FlashAttentionBackend, softcap=2.0)
    served = AttentionEngine(capped, CPU, window=6, mode="NONE", dtype=torch.bfloat16, max_tokens=8)
    for seed in range(6):
        served.step(served.requests("mixed" if seed % 2 else "decode", 3, seed), seed)
    longest = 6 - 1 + 8 + 4 - 1
    assert set(flash.computed) == {((5, 0), 2.0, longest, None)}
    assert set(flash.scheduled) == {((5, 0), True, longest)}


def test_without_a_window_nothing_is_said_of_one(flash: Flash) -> None:
    served = AttentionEngine(FlashAttentionBackend, CPU, mode="NONE", dtype=torch.bfloat16)
    served.step(served.requests("decode", 3, 1), 1)
    assert set(flash.computed) == {(None, 0.0, 48, None)}
    assert set(flash.scheduled) == {((-1, -1), False, 48)}


def test_sinks_go_to_the_kernel_in_bfloat16(flash: Flash) -> None:
    sinks = {layer: torch.full((4,), float(layer), dtype=torch.bfloat16) for layer in range(2)}
    settings: dict[str, Any] = {"mode": "NONE", "dtype": torch.bfloat16}
    served = AttentionEngine(functools.partial(FlashAttentionBackend, sinks=sinks), CPU, **settings)
    served.step(served.requests("decode", 3, 1), 1)
    assert {call[3] for call in flash.computed} == {torch.bfloat16}
    whole = {layer: one.float() for layer, one in sinks.items()}
    with pytest.raises(ConfigError, match=r"sinks are not torch.bfloat16"):
        AttentionEngine(functools.partial(FlashAttentionBackend, sinks=whole), CPU, **settings)


def without(function: Any, *names: str) -> Any:
    """The function of an older build, which takes all but these arguments."""
    import inspect

    signature = inspect.signature(function)
    kept = [one for name, one in signature.parameters.items() if name not in names]

    def older(*args: Any, **options: Any) -> Any:
        raise TypeError("called")

    older.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return older


@pytest.mark.parametrize(
    ("function", "argument", "options", "window"),
    [
        ("flash_attn_varlen_func", "window_size", {}, 6),
        ("get_scheduler_metadata", "window_size", {}, 6),
        ("flash_attn_varlen_func", "softcap", {"softcap": 2.0}, None),
        ("get_scheduler_metadata", "has_softcap", {"softcap": 2.0}, None),
        ("flash_attn_varlen_func", "s_aux", {"sinks": {n: torch.zeros(4, dtype=torch.bfloat16) for n in (0, 1)}}, None),
    ],
)
def test_a_flash_attention_without_an_argument_is_refused_only_if_that_is_needed(
    flash: Flash, function: str, argument: str, options: dict[str, Any], window: int | None
) -> None:
    setattr(flash, function, without(getattr(flash, function), argument))
    settings: dict[str, Any] = {"mode": "NONE", "dtype": torch.bfloat16}
    AttentionEngine(FlashAttentionBackend, CPU, **settings)
    with pytest.raises(ConfigError, match=f"vllm_flash_attn has a {function} without the argument {argument}"):
        AttentionEngine(functools.partial(FlashAttentionBackend, **options), CPU, window=window, **settings)


@pytest.mark.parametrize(
    ("function", "argument"),
    [
        ("flash_attn_varlen_func", "scheduler_metadata"),
        ("flash_attn_varlen_func", "num_splits"),
        ("get_scheduler_metadata", "page_size"),
        ("flash_attn_varlen_func", "block_table"),
        ("flash_attn_varlen_func", "fa_version"),
    ],
)
def test_a_flash_attention_that_is_too_old_says_the_argument(
    monkeypatch: pytest.MonkeyPatch, function: str, argument: str
) -> None:
    module = Flash()
    monkeypatch.setitem(sys.modules, "older_flash", module)
    assert problem_of("older_flash") is None
    setattr(module, function, without(getattr(module, function), argument))
    assert problem_of("older_flash") == f"has a {function} without the argument {argument}"
    setattr(module, function, None)
    assert problem_of("older_flash") == f"has no {function}"


def test_functions_that_take_anything_or_do_not_tell_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = Flash()
    monkeypatch.setitem(sys.modules, "older_flash", module)
    module.flash_attn_varlen_func = lambda *args, **options: None
    module.get_scheduler_metadata = min  # compiled, without a signature
    assert problem_of("older_flash") is None


class Wrapper:
    """FlashInfer's wrapper, as far as it is asked before the first plan."""

    def __init__(self, workspace: Tensor, layout: str, backend: str = "auto") -> None:
        self._float_workspace_buffer = self._int_workspace_buffer = self._pin_memory_int_workspace_buffer = workspace
        self._cached_module, self._use_cuda_graph = None, False

    def plan(
        self,
        indptr: Tensor,
        causal: bool = False,
        sm_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: Any = None,
        q_data_type: Any = None,
        seq_lens: Any = None,
        disable_split_kv: bool = False,
    ) -> None: ...

    def run(self, q: Tensor, pages: Any, out: Any = None, lse: Any = None, return_lse: bool = False) -> None: ...


def flashinfer(version: str = "0.6.1", **changes: Any) -> Any:
    wrapper = type("BatchPrefillWithPagedKVCacheWrapper", (Wrapper,), changes)
    built: Any = types.ModuleType("flashinfer")
    built.BatchPrefillWithPagedKVCacheWrapper, built.__version__ = wrapper, version
    return built


def test_a_flashinfer_with_all_arguments_is_taken() -> None:
    for version in ("0.5.3", "0.6.1.post1", "0.0.0+unknown"):
        check_build(flashinfer(version))
    check_wrapper(Wrapper(torch.zeros(1), "NHD"))


@pytest.mark.parametrize(
    ("method", "argument"),
    [
        ("plan", "disable_split_kv"),
        ("plan", "seq_lens"),
        ("plan", "window_left"),
        ("run", "lse"),
        ("__init__", "backend"),
    ],
)
def test_a_flashinfer_without_an_argument_is_refused(method: str, argument: str) -> None:
    older = flashinfer(**{method: without(getattr(Wrapper, method), argument)})
    with pytest.raises(ConfigError, match=f"Wrapper has a {method} without the argument {argument}"):
        check_build(older)


def test_a_flashinfer_without_the_wrapper_or_of_an_old_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="flashinfer has no BatchPrefillWithPagedKVCacheWrapper"):
        check_build(types.ModuleType("flashinfer"))
    with pytest.raises(ConfigError, match=r"FlashInfer is 0.4.1; expected 0.5.3 or newer"):
        check_build(flashinfer("0.4.1"))


def test_a_flashinfer_that_names_its_buffers_otherwise_is_refused() -> None:
    wrapper = Wrapper(torch.zeros(1), "NHD")
    del wrapper._int_workspace_buffer
    with pytest.raises(ConfigError, match="Wrapper has no _int_workspace_buffer"):
        check_wrapper(wrapper)


def test_a_window_of_w_is_w_minus_1_on_flashinfers_left() -> None:
    backend = FlashInferBackend.__new__(FlashInferBackend)
    for window, left in ((None, -1), (1, 0), (128, 127)):
        backend.window = window
        assert backend.window_left == left
    assert "sinks" not in FlashInferBackend.features
