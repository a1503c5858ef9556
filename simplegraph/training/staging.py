"""Brings inputs from pinned host memory to the device while the step before still runs there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.nested import flatten

_new_stream: Callable[[torch.device], torch.cuda.Stream] = (
    torch.cuda.Stream
)  # typed here because torch leaves it untyped


class Staging:
    """Copies pinned tensors to a GPU on a stream of its own, which does not wait for the work that is queued.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _new_stream(device)

    def staged(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments with device copies in place of pinned tensors; the current stream waits for the copies."""
        leaves, spec = flatten((args, dict(kwargs)))
        if not any(map(_is_pinned, leaves)):
            return args, dict(kwargs)
        current = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream), torch.no_grad():
            copies = [leaf.to(self._device, non_blocking=True) if _is_pinned(leaf) else leaf for leaf in leaves]
        current.wait_stream(self._stream)
        for leaf, copy in zip(leaves, copies, strict=True):
            if copy is not leaf:
                copy.record_stream(current)  # whose memory belongs to the other stream
        moved: tuple[tuple[Any, ...], dict[str, Any]] = spec.unflatten(copies)
        return moved


def _is_pinned(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cpu and leaf.layout is torch.strided and leaf.is_pinned()
