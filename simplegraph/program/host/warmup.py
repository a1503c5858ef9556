"""The mode of a warmup: copies to the device what the run moves there."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from simplegraph.base.constants import LARGEST_TOTAL_BYTES, span
from simplegraph.base.operators import without_modes
from simplegraph.base.tensors import storage_key
from simplegraph.program.host.modes import HostMode


class HostWarmup(HostMode):  # type: ignore[no-untyped-call]
    """Follows a warmup, and copies what it moves to the device; the run reads these copies.

    Attributes:
        copies: device copies of what was moved, by content.
        sources: the CPU tensors from before among what was moved.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: dict[Hashable, Tensor] = {}
        self.sources: list[Tensor] = []

    def _copy(self, key: Hashable, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        if key not in self.copies:
            # No inference tensor: captures in other modes read it, too.
            with without_modes(), torch.inference_mode(False), torch.no_grad():
                if not self._emulated and storage_key(source) not in self._made:
                    if sum(map(span, (*self.sources, source))) > LARGEST_TOTAL_BYTES:
                        return make()
                    self.sources.append(source)
                self.copies[key] = make()
        return self.copies[key]
