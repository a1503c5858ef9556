"""Fixtures of the tests of a real GPU."""

from __future__ import annotations

import faulthandler
import gc
import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from simplegraph.device.cuda.device import CudaDevice, cuda_device
from simplegraph.device.protocol import GraphPool

_KEPT = 2**30  # bytes, of each of several workers on one GPU


@pytest.fixture(autouse=True)
def _memory_released() -> Iterator[None]:
    """Give memory back after tests that took much, for other workers; after all where a sanitizer sees reads of it."""
    yield
    if os.environ.get("TESTS_RELEASE_MEMORY") or torch.cuda.memory_reserved() > _KEPT:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _no_alarm(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No graph is said to touch memory of no tensor, or that was given back, but where a test makes one do so."""
    yield
    if request.node.path.name not in ("test_cuda_inventory.py", "test_cuda_audit.py"):
        said = [record.getMessage() for record in caplog.get_records("call")]
        assert not [text for text in said if "belongs to no tensor" in text or "that was given back" in text]


@pytest.fixture
def cuda() -> CudaDevice:
    return cuda_device(torch.cuda.current_device())


@pytest.fixture
def pool(cuda: CudaDevice) -> Iterator[GraphPool]:
    pool = cuda.new_pool()
    yield pool
    torch.cuda.synchronize()
    cuda.release_pool(pool)


@pytest.fixture
def x() -> Tensor:
    return torch.arange(8.0, device="cuda")


@pytest.fixture
def device_left_alone() -> Iterator[None]:
    yield
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    torch.cuda.synchronize()


@pytest.fixture
def device_works(no_grad: None) -> Iterator[None]:
    """The test runs without gradients; after it, nothing is being captured and the device still works."""
    yield
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(3, device="cuda")
    torch.cuda.synchronize()


@pytest.fixture
def timed_inference() -> Iterator[None]:
    """The test runs in inference mode, and ends the process after four minutes: an unplanned replay can loop."""
    faulthandler.dump_traceback_later(240, exit=True)
    with torch.inference_mode():
        yield
    torch.cuda.synchronize()
    faulthandler.cancel_dump_traceback_later()
