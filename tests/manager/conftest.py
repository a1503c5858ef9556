"""Fixtures of the manager's tests."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.manager.engines import Engine


@pytest.fixture
def measured() -> None:
    gc.collect()  # graphs of other tests, in cycles of theirs, must not be freed while this one measures


@pytest.fixture
def engine(device: torch.device) -> Engine:
    return Engine(device)
