"""FlashAttention and FlashInfer by torch's operators on a CPU, with the rules that the real kernels have.

They read lengths, pages and schedules where the real ones do, so that a mistake in what a backend passes, at a capture
or later, is a wrong row or NaN here as it is on a GPU.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

MULTIPROCESSORS = 132


class Seen(NamedTuple):
    """What kernels see of a step, all on the device.

    Attributes:
        starts: (num_reqs + 1,) where each request's query rows begin.
        lengths: (num_reqs,) keys of each request.
        table: (num_reqs, n) its pages.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor


def attention(
    q: Tensor,
    pages: Sequence[Tensor],
    seen: Seen,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute causal attention in float64 without reading a value on the host.

    Args:
        q: (T, num_heads, head_dim).
        pages: keys and values, (num_pages, page_size, num_kv_heads, head_dim).
        seen: the step.
        scale, window, softcap, sinks: as for backends.

    Returns:
        The result (T, num_heads, head_dim), its log-sum-exp (T, num_heads), each row's request, and its place among
        the rows of that; rows behind the last request are of request `num_reqs`.
    """
    keys, values = (part.double() for part in pages)
    page_size, kv_heads = keys.shape[1:3]
    token = torch.arange(len(q), dtype=torch.int32)
    request = torch.searchsorted(seen.starts, token, right=True) - 1
    row = request.clamp(max=len(seen.lengths) - 1)
    place = token - seen.starts[row]
    position = seen.lengths[row] - (seen.starts[row + 1] - seen.starts[row]) + place
    at = torch.arange(seen.table.shape[1] * page_size)
    visible = (at <= position[:, None]) & (at < seen.lengths[row][:, None])
    if window is not None:
        visible &= at > position[:, None] - window
    table = seen.table[row].long()

    def gathered(part: Tensor) -> Tensor:
        found = part[table].flatten(1, 2)
        return found.where(visible[:, :, None, None], 0).repeat_interleave(q.shape[1] // kv_heads, dim=2)

    scores = torch.einsum("thd,tnhd->thn", q.double(), gathered(keys)) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible[:, None], -torch.inf)
    lse = total = scores.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.double())
    weights = (scores - total[..., None]).exp().nan_to_num(0)  # no keys, no output
    return torch.einsum("thn,tnhd->thd", weights, gathered(values)), lse, request, place


class FlashCall(NamedTuple):
    """What a kernel of FlashAttention was called with."""

    version: int
    window: Any
    softcap: float
    max_seqlen_q: int
    max_seqlen_k: int
    num_splits: int
    scheduled: bool
    sinks: torch.dtype | None


class VllmFlash(types.ModuleType):
    """FlashAttention as vLLM builds it, with both versions.

    Attributes:
        calls: of the kernels; schedules: of `get_scheduler_metadata`, what they say of the masks and the splits.
    """

    def __init__(self, name: str = "vllm_flash_attn", versions: Sequence[int] = (2, 3)) -> None:
        super().__init__(name)
        self.FA2_AVAILABLE, self.FA3_AVAILABLE = 2 in versions, 3 in versions
        self.calls: list[FlashCall] = []
        self.schedules: list[tuple[Any, ...]] = []

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        cu_seqlens_q: Any = None,
        page_size: int | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        has_softcap: bool = False,
        num_splits: int = 0,
    ) -> Tensor:
        assert batch_size == len(cache_seqlens)
        assert qkv_dtype is torch.bfloat16
        self.schedules.append((window_size, has_softcap, max_seqlen_k, num_splits))
        shape = (max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, page_size, causal)
        return _schedule(cache_seqlens, cu_seqlens_q, (*shape, *window_size, has_softcap, num_splits))

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
        sinks = None if s_aux is None else s_aux.dtype
        is_scheduled = scheduler_metadata is not None
        lengths = (max_seqlen_q, max_seqlen_k, num_splits)
        self.calls.append(FlashCall(fa_version, window_size, softcap, *lengths, is_scheduled, sinks))
        if fa_version == 2 and (s_aux is not None or num_splits > 1):
            raise NotImplementedError("FA2 has neither sinks nor splits that are asked for")
        step = Seen(cu_seqlens_q, seqused_k, block_table)
        masks = {"window": window_size and window_size[0] + 1, "softcap": softcap or None, "sinks": s_aux}
        _attend(q, (k, v), step, out, softmax_scale, fa_version, *lengths[:2], **masks)
        if is_scheduled:
            shape = (max_seqlen_q, max_seqlen_k, q.shape[1], k.shape[2], q.shape[2], k.shape[1], causal)
            own = _schedule(seqused_k, cu_seqlens_q, (*shape, *(window_size or (-1, -1)), softcap > 0, num_splits))
            # Work that was scheduled for other lengths or splits reads out of bounds.
            agree = (own == scheduler_metadata).all() if own.shape == scheduler_metadata.shape else torch.tensor(False)
            out.copy_(torch.where(agree, out, torch.nan))
        lse = attention(q, (k, v), step, softmax_scale, **masks)[1].float().T.contiguous()
        return (out, lse) if return_softmax_lse else out


class PlainFlash(types.ModuleType):
    """FlashAttention-2 as the project itself publishes it: it returns its result, and reads where keys would begin."""

    def __init__(self, name: str = "flash_attn") -> None:
        super().__init__(name)
        self.calls: list[FlashCall] = []

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: Any = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        return_attn_probs: bool = False,
        block_table: Any = None,
    ) -> Any:
        self.calls.append(FlashCall(2, window_size, softcap, max_seqlen_q, max_seqlen_k, 0, False, None))
        if k.shape[1] % 256:
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        out = torch.empty_like(q).fill_(torch.nan)  # as allocated
        step = Seen(cu_seqlens_q, cu_seqlens_k.diff(), block_table)
        masks = {"window": window_size[0] + 1 if window_size[0] >= 0 else None, "softcap": softcap or None}
        _attend(q, (k, v), step, out, softmax_scale, 2, max_seqlen_q, max_seqlen_k, **masks)
        lse = attention(q, (k, v), step, softmax_scale, **masks)[1].float().T.contiguous()
        return (out, lse, None) if return_attn_probs else out


def _attend(
    q: Tensor,
    pages: Sequence[Tensor],
    step: Seen,
    out: Tensor,
    scale: float,
    version: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    **masks: Any,
) -> None:
    """Write to `out` the rows that the kernel's blocks reach: no more rows of a request than were said."""
    if version == 2 and max_seqlen_q == 1 and q.shape[1] > pages[0].shape[2] and masks.get("window") is None:
        # One row for each request: query heads are taken for its tokens, and query lengths are not read.
        if len(q) != len(step.lengths):
            raise RuntimeError(f"shape '[{len(step.lengths)}, ...]' is invalid for input of {len(q)} rows")
        step = step._replace(starts=torch.arange(len(q) + 1, dtype=torch.int32))
    result, _, request, place = attention(q, pages, step, scale, **masks)
    reached = (request < len(step.lengths)) & (place < max_seqlen_q)
    inside = (step.lengths <= max_seqlen_k).all()
    out.copy_(torch.where(inside, torch.where(reached[:, None, None], result.to(out.dtype), out), torch.nan))


def _schedule(lengths: Tensor, starts: Tensor, numbers: Sequence[Any]) -> Tensor:
    """Write down what work is scheduled for."""
    constants = [torch.full_like(lengths[:1], int(number or 0)) for number in numbers]
    return torch.cat([lengths, starts, *constants])


class FlashInferModule:
    """FlashInfer's compiled planner and kernel.

    Args:
        extra: the arguments behind those that all releases have.

    Attributes:
        plans: pages and lengths of the requests of each plan, on the host.
    """

    def __init__(self, extra: tuple[Any, ...] = ()) -> None:
        self.extra = extra
        self.plans: list[tuple[list[int], list[int]]] = []

    def plan(self, floats: Tensor, ints: Tensor, pinned: Tensor, *arguments: Any) -> list[int]:
        if len(arguments) != 16 + len(self.extra):
            raise TypeError(f"Mismatched number of arguments: {3 + len(arguments)}, expected {19 + len(self.extra)}")
        starts, indptr, lengths, rows, num_reqs, heads, kv_heads, page_size, in_graph, dim, _, causal = arguments[:12]
        _, fixed, unsplit, _ = arguments[12:16]
        assert arguments[16:] == self.extra
        assert (causal, fixed) == (True, -1)
        assert int(starts[-1]) == rows or not in_graph
        if bool((indptr.diff() < 0).any()) or len(indptr) != num_reqs + 1 or len(lengths) != num_reqs:
            raise RuntimeError("kv_indptr should be non-negative")
        self.plans.append((indptr.diff().tolist(), lengths.tolist()))
        # The work of a replay: rows and pages of each request.
        work = torch.cat([starts.diff(), indptr.diff()]).int()
        pinned[: work.nbytes] = work.view(torch.uint8)
        ints.copy_(pinned)
        # A plan in graph mode depends on the shape alone.
        return [rows, num_reqs, heads, kv_heads, page_size, dim, int(in_graph), int(unsplit)]

    def paged_run(
        self, wrapper: Any, q: Tensor, pages: Sequence[Tensor], out: Tensor, lse: Tensor | None, plan: Sequence[int]
    ) -> None:
        count = plan[1]
        work = wrapper._int_workspace_buffer[: 8 * count].view(torch.int32)
        rows, planned = work[:count], work[count:]
        starts, indptr, last = wrapper._qo_indptr_buf, wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf
        indices = wrapper._paged_kv_indices_buf
        if wrapper._kv_layout == "HND":
            pages = [part.transpose(1, 2) for part in pages]
        page_size = pages[0].shape[1]
        found = indptr.diff()
        lengths = ((found - 1) * page_size + last).clamp(min=0)
        places = (indptr[:-1, None] + torch.arange(len(indices))).clamp(max=len(indices) - 1)
        # Work covers the pages that were planned: the rest of longer requests is not attended to.
        step = Seen(starts, lengths.minimum(planned * page_size), indices[places])
        window = None if wrapper._window_left < 0 else wrapper._window_left + 1
        masks = {"window": window, "softcap": wrapper._logits_soft_cap or None}
        result, sums, request, place = attention(q, pages, step, wrapper._sm_scale, **masks)
        request = request.clamp(max=count - 1)
        result = result.to(out.dtype)
        # A last page of 0 tokens has been read as a full one.
        result = torch.where((last[request] == 0)[:, None, None], torch.nan, result)
        out.copy_(torch.where((place < rows[request])[:, None, None], result, out))
        if lse is not None:
            lse.copy_(sums / torch.log(torch.tensor(2.0, dtype=torch.float64)))


class FlashInferWrapper:
    """FlashInfer's wrapper of paged attention; see `FlashInferModule` for what it calls."""

    module = FlashInferModule()

    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        assert backend == "fa2"
        self.device, self._kv_layout = float_workspace_buffer.device, kv_layout
        self._float_workspace_buffer = float_workspace_buffer
        self._int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)
        self._use_cuda_graph, self._fixed_batch_size = False, 0
        self._cached_module: Any = None
        self._plan_info: Any = None
        self._qo_indptr_buf: Any = None
        self._paged_kv_indptr_buf: Any = None
        self._paged_kv_indices_buf: Any = None
        self._paged_kv_last_page_len_buf: Any = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float = 1.0,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = None,
        seq_lens: Any = None,
        disable_split_kv: bool = False,
    ) -> None:
        count = len(qo_indptr) - 1
        self._qo_indptr_last = int(qo_indptr[-1])
        if self._use_cuda_graph:
            if count != self._fixed_batch_size:
                raise ValueError("The batch size should be fixed during the lifecycle of the wrapper")
            for buffer, given in (
                (self._qo_indptr_buf, qo_indptr),
                (self._paged_kv_indptr_buf, paged_kv_indptr),
                (self._paged_kv_last_page_len_buf, paged_kv_last_page_len),
                (self._paged_kv_indices_buf[: len(paged_kv_indices)], paged_kv_indices),
            ):
                buffer.copy_(given)
        else:
            self._qo_indptr_buf, self._paged_kv_indptr_buf = qo_indptr.clone(), paged_kv_indptr.clone()
            self._paged_kv_indices_buf = paged_kv_indices.clone()
            self._paged_kv_last_page_len_buf = paged_kv_last_page_len.clone()
        self._cached_module = self.module
        workspaces = self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer
        self._plan_info = self._cached_module.plan(
            *workspaces,
            *(qo_indptr, paged_kv_indptr, seq_lens, self._qo_indptr_last, count, num_qo_heads, num_kv_heads, page_size),
            *(self._use_cuda_graph, head_dim_qk, head_dim_qk, causal, window_left, -1, disable_split_kv, 0),
            *self.module.extra,
        )
        self._window_left, self._logits_soft_cap, self._sm_scale = window_left, logits_soft_cap or 0.0, sm_scale

    def run(self, q: Tensor, paged_kv_cache: Any, out: Any = None, lse: Any = None, return_lse: bool = False) -> Any:
        if len(q) != self._qo_indptr_last:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._qo_indptr_last})")
        self._cached_module.paged_run(self, q, paged_kv_cache, out, lse if return_lse else None, self._plan_info)
        return (out, lse) if return_lse else out


class _Event:
    """An event of a device that has always arrived."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def stand_in_flash(
    monkeypatch: pytest.MonkeyPatch, *modules: types.ModuleType, capability: tuple[int, int] = (9, 0)
) -> None:
    """Install builds of FlashAttention, each under its name, and no other; for a GPU of this compute capability."""
    import sys

    from simplegraph.attention.backends import flash_attention, flash_kernels

    for name in flash_kernels.MODULES:
        monkeypatch.setitem(sys.modules, name, None)  # which makes its import fail
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(flash_attention, "_capability", lambda device: capability)
    stand_in_card(monkeypatch)


def stand_in_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let backends ask a GPU's properties on a CPU."""
    card = types.SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


def stand_in_flashinfer(
    monkeypatch: pytest.MonkeyPatch, module: FlashInferModule | None = None, version: str = "0.6.13", **changes: Any
) -> FlashInferModule:
    """Install a stand-in for FlashInfer, which runs on a CPU, and return what plans and computes in it.

    Args:
        monkeypatch: of the test.
        module: what plans and computes.
        version: the release that it says it is.
        **changes: attributes of its wrapper.
    """
    import importlib.util
    import sys

    from simplegraph.attention.backends import flashinfer

    def list_pages(block_table: Tensor, indptr: Tensor, indices: Tensor) -> None:
        for row, (start, end) in enumerate(zip(indptr.tolist(), indptr.tolist()[1:], strict=False)):
            if row < len(block_table):
                indices[start:end] = block_table[row, : end - start]

    built: Any = types.ModuleType("flashinfer")
    wrapper = type("BatchPrefillWithPagedKVCacheWrapper", (FlashInferWrapper,), changes)
    wrapper.module = module or FlashInferModule()  # type: ignore[attr-defined]
    built.BatchPrefillWithPagedKVCacheWrapper, built.__version__ = wrapper, version
    monkeypatch.setitem(sys.modules, "flashinfer", built)
    pages: Any = types.ModuleType("pages")
    pages.list_pages = list_pages
    monkeypatch.setitem(sys.modules, "simplegraph.attention.kernels.pages", pages)
    find: Callable[..., Any] = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: name == "triton" or find(name, *rest))
    monkeypatch.setattr(flashinfer, "_event", _Event)
    monkeypatch.setattr(flashinfer.FlashInferBackend, "devices", ("cuda", "cpu"))
    stand_in_card(monkeypatch)
    found: FlashInferModule = wrapper.module  # type: ignore[attr-defined]
    return found
