"""What sleeps in one test is awake, and forgotten, in the next."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import simplegraph as sg
from simplegraph.base.extras import memory_sources


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    sg.wake()
    memory_sources.clear()
    gc.collect()
