"""Captures on a real GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simplegraph.device.cuda.device import CudaDevice
from simplegraph.device.cuda.graph import CudaSegment
from simplegraph.device.protocol import GraphPool

MIB = 1 << 20


def capture(
    cuda: CudaDevice, pool: GraphPool, run: Callable[[], Any], generators: tuple[torch.Generator, ...] = ()
) -> tuple[CudaSegment, Any]:
    with cuda.on_capture_stream(), torch.no_grad():
        try:
            cuda.begin(pool, generators)
            output = run()
            segment = cuda.end()
            if segment is not None:
                segment.wait()
            return segment, output
        except BaseException:
            cuda.abandon()
            raise


def read_item(x: Tensor) -> Any:
    return x.sum().item()
