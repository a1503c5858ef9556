"""Captures on the emulator, and how their results are compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from simplegraph.device.emulator.arena import EmulatorSegment
from simplegraph.device.emulator.device import emulator
from simplegraph.device.protocol import GraphPool

GRAD_MODES = [torch.no_grad, torch.inference_mode]
READ_BACK = "Python read back the value of a tensor, which has none while it is captured"
device = emulator()


def capture(
    pool: GraphPool, run: Callable[[], Any], *, continues: bool = False, generators: tuple[torch.Generator, ...] = ()
) -> tuple[EmulatorSegment, Any]:
    with device.on_capture_stream(), torch.no_grad():
        try:
            device.begin(pool, generators, continues=continues)
            output = run()
            return device.end(), output
        except BaseException:
            device.abandon()
            raise


def leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    torch.utils._pytree.tree_map_only(Tensor, found.append, tree)
    return found


def assert_same(actual: Any, expected: Any) -> None:
    """Equal bit for bit, NaN for NaN."""
    assert len(leaves(actual)) == len(leaves(expected)) > 0
    for one, other in zip(leaves(actual), leaves(expected), strict=True):
        torch.testing.assert_close(one.resolve_conj(), other.resolve_conj(), rtol=0, atol=0, equal_nan=True)
