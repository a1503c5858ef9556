"""The leanest capture for arms that are not ours: one session for all sizes, bare captures, one pool.

The compiled arms are captured as carefully as this library's, so that the comparison is of the compiler alone, and the
lean loop shows what captures cost without this library.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ALIASES = ("_construct_storage_from_data_pointer", "_construct_CUDA_Tensor_From_Storage_And_Metadata")


class LeanCapture:
    """Captures into one pool on one stream; use inside `session`."""

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs = 0

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        """Synchronize and collect garbage once for all captures; the garbage collector is off meanwhile."""
        torch.cuda.synchronize()
        gc.collect()
        gc.freeze()
        gc.disable()
        try:
            with self.on_stream():
                yield
        finally:
            gc.enable()
            gc.unfreeze()

    @contextlib.contextmanager
    def on_stream(self) -> Iterator[None]:
        """Run on the capture stream; warmups too, since workspaces and free blocks belong to a stream."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)

    def capture(self, function: Callable[..., Any], *args: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Capture one call; return the graph and the call's result."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            result = function(*args)
        finally:
            graph.capture_end()
        self.graphs += 1
        return graph, result


def can_alias() -> bool:
    """True if this torch can make tensors that do not own their memory."""
    return all(hasattr(torch._C, name) for name in _ALIASES)


def alias(tree: Any) -> Any:
    """Return the same tensors without owning their memory, so that later captures may reuse it.

    Correct only for pool memory that every replay writes before it reads it.
    """
    return pytree.tree_map_only(Tensor, _alias, tree) if can_alias() else tree


def _alias(tensor: Tensor) -> Tensor:
    if not tensor.is_cuda:
        return tensor
    storage = tensor.untyped_storage()
    metadata = {
        "nbytes": storage.nbytes(),
        "data_ptr": storage.data_ptr(),
        "size": tuple(tensor.shape),
        "stride": tensor.stride(),
        "dtype": tensor.dtype,
        "device": tensor.device,
        "storage_offset": tensor.storage_offset(),
    }
    unowned = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(metadata, unowned)
