"""Every test of the emulator has a pool, and leaves no capture behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from simplegraph.device.emulator.arena import DEFAULT_STREAM
from simplegraph.device.protocol import GraphPool
from tests.graph.emulator.captures import device


@pytest.fixture
def pool() -> GraphPool:
    return device.new_pool()


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    yield
    capturing = device.is_capturing()
    device.abandon()
    assert not capturing
    assert device.current_stream() == DEFAULT_STREAM
    assert torch._C._len_torch_dispatch_stack() == torch._C._len_torch_function_stack() == 0
