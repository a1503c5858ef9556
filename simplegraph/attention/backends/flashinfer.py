"""FlashInfer over a paged cache: uniform decode in full graphs, everything else eagerly.

FlashInfer schedules on the host. `prepare` plans before every replay, outside the graph. All sizes share one integer
workspace, since no other size runs between a plan and its run.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import logging
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from simplegraph.attention.backend import AttentionBackend, Scores, check_arguments
from simplegraph.attention.cache import PagedKVCache
from simplegraph.attention.metadata.batch_metadata import BatchMetadata
from simplegraph.attention.metadata.batch_state import CommonMetadata
from simplegraph.base.config import AttentionCGSupport, CudaGraphMode
from simplegraph.base.errors import ConfigError, ReplayError, install_command
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.manager.manager import Unpack

_FLOAT_WORKSPACE_BYTES = 128 << 20
_MAX_WORKSPACE_BYTES = 8 << 30
_BLOCKS_PER_MULTIPROCESSOR = 2  # FlashInfer's scheduler considers the device full with this many

_OLDEST = (0, 5, 3)
# Last arguments of compiled planners, which depend on the release: none up to 0.6.13; later the query length, if all
# requests share one; since 0.7.4 also if it never changes. The planners have no readable signature, so each is tried.
_PLANNERS: tuple[tuple[Any, ...], ...] = ((), (0,), (0, False))
_WRAPPER = "BatchPrefillWithPagedKVCacheWrapper"
_METHODS = {
    "__init__": ("backend",),
    "plan": ("causal", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "seq_lens", "disable_split_kv"),
    "run": ("out", "lse", "return_lse"),
}
_STATES = (
    *("_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer", "_cached_module"),
    "_use_cuda_graph",
)

_event: Callable[[], Any] = torch.cuda.Event
logger = logging.getLogger("simplegraph")


class FlashInferBackend(AttentionBackend):
    """FlashInfer's paged attention. Full graphs for uniform decode of one or several tokens per request.

    Args:
        cache, metadata, num_heads, scale, softcap: as for every backend; the cache is float16 or bfloat16, on a GPU.
        workspace_bytes: device memory for partial results of split-KV, shared by all sizes; it grows if a size needs
            more.

    Raises:
        ConfigError: flashinfer-python or Triton is not installed, FlashInfer is a build without an argument that is
            needed, or the cache's dtype or device is not supported.
    """

    support = AttentionCGSupport.UNIFORM_BATCH
    name = "FlashInfer"
    features = ("window", "softcap")
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.float16, torch.bfloat16)
    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def __init__(
        self,
        cache: PagedKVCache,
        metadata: BatchMetadata,
        *,
        num_heads: int,
        workspace_bytes: int = _FLOAT_WORKSPACE_BYTES,
        **scores: Unpack[Scores],
    ) -> None:
        super().__init__(cache, metadata, num_heads=num_heads, **scores)
        try:
            import flashinfer
        except ImportError as error:
            needed = install_command("flashinfer")
            raise ConfigError(f"FlashInfer cannot be imported ({error}); to have it: {needed}") from None
        if cache.dtype not in self.dtypes or cache.device.type not in self.devices:
            raise ConfigError(
                f"the cache is {cache.dtype} on {cache.device}; FlashInfer needs float16 or bfloat16 on CUDA."
            )
        if importlib.util.find_spec("triton") is None:
            raise ConfigError("FlashInfer's pages are listed by a Triton kernel; to have it: pip install triton.")
        check_build(flashinfer)
        self._tables = _Tables(metadata, cache.device)
        workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=cache.device)
        self._proto: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, cache.layout, backend="fa2")
        check_wrapper(self._proto)
        self._copied: Any = _event()
        self._wrappers: dict[tuple[int, int], _Planned] = {}  # by tokens and requests of a graph
        multiprocessors = torch.cuda.get_device_properties(cache.device).multi_processor_count
        self._most_split_reqs = _BLOCKS_PER_MULTIPROCESSOR * multiprocessors // cache.num_kv_heads
        self._eager = _Planned(copy.copy(self._proto), self)
        self._current: _Planned | None = None
        # Last arguments of this release's planner, one of `_PLANNERS`; None if its arguments are not known.
        self._planner: tuple[Any, ...] | None = None
        self._tried_planners = False

    @property
    def window_left(self) -> int:
        """Keys that a token sees before its own; -1 for all."""
        return -1 if self.window is None else self.window - 1

    @property
    def int_workspace_bytes(self) -> int:
        """Bytes of integer workspace, on the device and in pinned memory, for all captured sizes together."""
        return int(self._proto._int_workspace_buffer.nbytes + self._proto._pin_memory_int_workspace_buffer.nbytes)

    def prepare(self, mode: CudaGraphMode, descriptor: BatchDescriptor, metadata: CommonMetadata) -> None:
        # The last plan's copies read pinned memory that this plan overwrites. They have almost always finished.
        self._copied.synchronize()
        shape, planned = (metadata.batch.num_tokens, metadata.batch.num_reqs), self._eager
        if mode is CudaGraphMode.FULL:
            shape = (metadata.num_tokens, metadata.num_reqs)
            planned = self._wrappers.get(shape) or self._for_graph(*shape)
        self._tables.fill(metadata, shape[1])
        planned.plan(*shape)
        self._copied.record()
        self._current = planned

    def run(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> None:
        self._run(layer, q, out)

    def run_with_lse(self, layer: int, q: Tensor, out: Tensor, metadata: CommonMetadata) -> Tensor:
        lse = q.new_zeros(q.shape[:2], dtype=torch.float32)
        self._run(layer, q, out, lse)
        return lse.mul_(math.log(2))  # FlashInfer returns it to the base 2

    def _run(self, layer: int, q: Tensor, out: Tensor, lse: Tensor | None = None) -> None:
        planned = self._current
        if planned is None:
            raise ReplayError("FlashInfer has no plan for this batch; call prepare, or run inside `attending`.")
        pages, rows = (self.cache.keys(layer), self.cache.values(layer)), planned.num_tokens
        options = {} if lse is None else {"lse": lse[:rows], "return_lse": True}
        planned.wrapper.run(q[:rows], pages, out=out[:rows], **options)

    def _grow_workspace(self, wrapper: Any) -> None:
        """Double the memory for partial results, for this wrapper and those made later.

        A graph's plan reserves for the worst split of its size, whatever the lengths: memory that suffices when a size
        is captured suffices for all its replays. Graphs captured before keep their old memory.
        """
        size = 2 * wrapper._float_workspace_buffer.numel()
        if size > _MAX_WORKSPACE_BYTES:
            raise ConfigError(
                f"FlashInfer asks for more than {size >> 21} MiB of workspace; capture smaller sizes, or use another "
                "backend."
            )
        if self._proto._float_workspace_buffer.numel() < size:
            self._proto._float_workspace_buffer = torch.zeros(size, dtype=torch.uint8, device=self.cache.device)
        wrapper._float_workspace_buffer = self._proto._float_workspace_buffer

    def _for_graph(self, num_tokens: int, num_reqs: int) -> _Planned:
        """Make a wrapper of fixed size that reads the persistent tables; all wrappers share the workspaces.

        FlashInfer's graph mode always splits the lengths and merges the parts. Without it, batches with enough requests
        to fill the device are not split; a plan that never splits depends on the shape alone, so those sizes do not
        use the graph mode.
        """
        wrapper = copy.copy(self._proto)
        wrapper._use_cuda_graph = num_reqs <= self._most_split_reqs
        wrapper._fixed_batch_size = num_reqs
        query = torch.arange(num_reqs + 1, dtype=torch.int32) * (num_tokens // num_reqs)
        planned = self._wrappers[num_tokens, num_reqs] = _Planned(wrapper, self, query)
        return planned


def check_build(flashinfer: Any) -> None:
    """Refuse a FlashInfer whose wrapper lacks methods that the backend calls; before anything is allocated.

    Raises:
        ConfigError: it is too old.
    """
    check_arguments(flashinfer, {_WRAPPER: ()})
    check_arguments(getattr(flashinfer, _WRAPPER), _METHODS)
    numbers = tuple(int(number) for number in re.findall(r"\d+", getattr(flashinfer, "__version__", ""))[:3])
    # Its compiled scheduler does not show its arguments; the last of those that are passed was added in this version.
    if (0, 0, 0) < numbers < _OLDEST:
        raise ConfigError(
            f"the installed FlashInfer is {'.'.join(map(str, numbers))}; expected {'.'.join(map(str, _OLDEST))} or "
            "newer. Use a newer build, or another backend."
        )


def check_wrapper(wrapper: Any) -> None:
    """Refuse a wrapper without the buffers and states that captures share.

    Raises:
        ConfigError: FlashInfer names them otherwise.
    """
    missing = [name for name in _STATES if not hasattr(wrapper, name)]
    if missing:
        raise ConfigError(
            f"the installed FlashInfer's {type(wrapper).__name__} has no {missing[0]}; use another release of it, or "
            "another backend."
        )


class _Tables:
    """The pages of each request in FlashInfer's format: counts on the host for planning, page ids on the device.

    Attributes:
        indptr: (max_num_reqs + 1,) int32, where each request's pages begin; last_page_len: (max_num_reqs,) int32,
            tokens on its last page; seq_lens: (max_num_reqs,) int32. All on the host.
        device_indptr, device_last_page_len: the same on the device; device_indices: int32, all page ids in a row.
    """

    def __init__(self, metadata: BatchMetadata, device: torch.device) -> None:
        from simplegraph.attention.kernels.pages import list_pages

        self._list_pages = list_pages
        self._page_size = metadata.page_size
        max_reqs = metadata.max_num_reqs
        self._staging = torch.zeros(2 * max_reqs + 1, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._device = torch.zeros(2 * max_reqs + 1, dtype=torch.int32, device=device)
        split = max_reqs + 1
        self.indptr, self.last_page_len = self._staging[:split], self._staging[split:]
        self.device_indptr, self.device_last_page_len = self._device[:split], self._device[split:]
        self.device_indices = torch.zeros(max_reqs * metadata.max_blocks, dtype=torch.int32, device=device)
        self.seq_lens = torch.zeros(max_reqs, dtype=torch.int32)
        self._arrays = [t.numpy() for t in (self.indptr, self.last_page_len, self.seq_lens)]

    def fill(self, metadata: CommonMetadata, padded_reqs: int) -> None:
        """Write the step's counts, without pages for padding, and list its pages, in the current stream's order."""
        indptr, last_page_len, seq_lens = self._arrays
        lengths = metadata.batch.seq_lens
        real = len(lengths)
        pages = -(-lengths // self._page_size)
        np.cumsum(pages, out=indptr[1 : real + 1])
        indptr[real + 1 : padded_reqs + 1] = indptr[real]
        last_page_len[:real] = lengths - (pages - 1) * self._page_size
        last_page_len[real:padded_reqs] = 1  # kernels have read 0 as a full page
        seq_lens[:real] = lengths
        seq_lens[real:padded_reqs] = 0
        self._device.copy_(self._staging, non_blocking=True)
        self._list_pages(metadata.block_table[:real], self.device_indptr, self.device_indices)


class _Planned:
    """A FlashInfer wrapper and its plan.

    Args:
        wrapper: FlashInfer's wrapper, in its graph mode if it may split inside a graph.
        backend: provides the tables and workspaces.
        query: (num_reqs + 1,) int32, where each request's query rows begin in a graph; None for eager steps.

    Attributes:
        num_tokens: query rows of the plan.
    """

    def __init__(self, wrapper: Any, backend: FlashInferBackend, query: Tensor | None = None) -> None:
        self.wrapper = wrapper
        self.num_tokens = 0
        self._backend = backend
        self._query = query
        self._device_query = None if query is None else query.to(backend.cache.device)
        self._whole = query is not None and not wrapper._use_cuda_graph
        self._plan_of_capture: tuple[Any, ...] | None = None
        if query is not None:
            self._point(len(query) - 1, query)

    def plan(self, num_tokens: int, num_reqs: int) -> None:
        """Schedule the step that the tables hold now.

        Raises:
            ReplayError: FlashInfer's plan differs from the one that the graph of this size was captured with.
        """
        query = self._query
        if query is None:
            query = torch.as_tensor(self._backend.metadata.batch.query_start_loc, dtype=torch.int32)[: num_reqs + 1]
        self.num_tokens = num_tokens
        is_first = self.wrapper._cached_module is None
        schedule = self._plan_fully if is_first or self._backend._planner is None else self._plan_again
        while True:
            try:
                schedule(num_reqs, query)
                break
            except RuntimeError as error:
                if "overflow" not in str(error).lower():
                    raise
                self._backend._grow_workspace(self.wrapper)
        if not self._backend._tried_planners:
            self._try_planners(num_reqs, query)
        if not self.wrapper._use_cuda_graph:
            self._point(num_reqs, query)  # `plan` has made the wrapper read FlashInfer's own copies
        if self._query is not None:
            self._check()

    def _plan_again(self, num_reqs: int, query: Tensor) -> None:
        """Do the part of FlashInfer's `plan` that follows its checks and copies; the tables replace those."""
        backend, tables, wrapper = self._backend, self._backend._tables, self.wrapper
        cache = backend.cache
        wrapper._plan_info = wrapper._cached_module.plan(
            *(wrapper._float_workspace_buffer, wrapper._int_workspace_buffer, wrapper._pin_memory_int_workspace_buffer),
            *(query, tables.indptr[: num_reqs + 1], tables.seq_lens[:num_reqs], self.num_tokens, num_reqs),
            *(backend.num_heads, cache.num_kv_heads, cache.page_size, wrapper._use_cuda_graph),
            *(cache.head_dim, cache.head_dim),
            True,  # causal
            backend.window_left,
            -1,  # no fixed split size
            self._whole,  # disables splits; False in graph mode: there FlashInfer masks idle blocks only if it splits
            0,  # colocated CTAs
            *(backend._planner or ()),
        )
        wrapper._qo_indptr_last = self.num_tokens

    def _try_planners(self, num_reqs: int, query: Tensor) -> None:
        """Find the last arguments of this release's planner, by the plan that FlashInfer's own `plan` has just made."""
        backend, plan = self._backend, tuple(self.wrapper._plan_info)
        backend._tried_planners = True
        for arguments in _PLANNERS:
            backend._planner = arguments
            with contextlib.suppress(TypeError):  # another number of arguments
                self._plan_again(num_reqs, query)
                if tuple(self.wrapper._plan_info) == plan:
                    return
        backend._planner = None
        self._plan_fully(num_reqs, query)
        logger.warning(
            "the installed FlashInfer plans with other arguments than the releases that are known, 0.5.3 to 0.7.4; its "
            "own slower `plan` prepares every step."
        )

    def _plan_fully(self, num_reqs: int, query: Tensor) -> None:
        """Call FlashInfer's own `plan`, which loads the kernels, and compiles them the first time."""
        backend, tables = self._backend, self._backend._tables
        cache = backend.cache
        total = int(tables.indptr[num_reqs])
        self.wrapper.plan(
            *(query, tables.indptr[: num_reqs + 1], tables.device_indices[:total], tables.last_page_len[:num_reqs]),
            *(backend.num_heads, cache.num_kv_heads, cache.head_dim, cache.page_size),
            causal=True,
            sm_scale=backend.scale,
            window_left=backend.window_left,
            logits_soft_cap=backend.softcap,
            q_data_type=cache.dtype,
            seq_lens=tables.seq_lens[:num_reqs],
            disable_split_kv=self._whole,
        )

    def _point(self, num_reqs: int, query: Tensor) -> None:
        """Make the kernels read the persistent tables."""
        wrapper, tables = self.wrapper, self._backend._tables
        device_query = self._device_query
        wrapper._qo_indptr_buf = query.to(wrapper.device, non_blocking=True) if device_query is None else device_query
        wrapper._paged_kv_indptr_buf = tables.device_indptr[: num_reqs + 1]
        wrapper._paged_kv_last_page_len_buf = tables.device_last_page_len[:num_reqs]
        wrapper._paged_kv_indices_buf = tables.device_indices

    def _check(self) -> None:
        """Refuse a plan that differs from the capture's: the graph holds that one's numbers as constants."""
        plan = tuple(self.wrapper._plan_info)
        if self._plan_of_capture is None:
            self._plan_of_capture = plan
        if plan != self._plan_of_capture:
            raise ReplayError(
                f"FlashInfer planned {plan} where this size was captured with {self._plan_of_capture}; the graph "
                "cannot follow. Run this batch eagerly, and report the lengths."
            )
