"""The mode of a warmup: copies to the device what the run moves there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.constants import LARGEST_TOTAL_BYTES, content, span
from simplegraph.base.operators import without_modes
from simplegraph.base.tensors import storage_key
from simplegraph.program.host.modes import HostMode, is_list, target


class HostWarmup(HostMode):  # type: ignore[no-untyped-call]
    """Follows a warmup, and copies what it moves to the device. The run itself is as it would be.

    Attributes:
        copies: device copies of what was moved, by content.
        sources: the CPU tensors from before among what was moved.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: dict[Hashable, Tensor] = {}
        self.sources: list[Tensor] = []

    def _lift(self, func: Any, tensor: Tensor) -> Tensor:
        result: Tensor = func(tensor)
        self.met_host = True
        if is_list(tensor):
            self._keep(content(tensor), tensor, tensor.clone)
        return result

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        self._keep((content(args[0]), *target(kwargs)), args[0], result.clone)
        return result

    def _copy_of(self, value: Tensor, device: torch.device, source: Tensor) -> Tensor:
        self._keep((content(value), device), source, lambda: value.to(device))
        return value

    def _chosen(self, args: tuple[Any, ...], moved: tuple[Any, ...]) -> tuple[Any, ...]:
        return args

    def _keep(self, key: Hashable, source: Tensor, copy: Callable[[], Tensor]) -> None:
        if key in self.copies:
            return
        # No inference tensor: captures in other modes read it, too.
        with without_modes(), torch.inference_mode(False), torch.no_grad():
            if not self._emulated and storage_key(source) not in self._made:
                if sum(map(span, (*self.sources, source))) > LARGEST_TOTAL_BYTES:
                    return
                self.sources.append(source)
            self.copies[key] = copy()
