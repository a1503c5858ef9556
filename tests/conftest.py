"""One suite for both devices: `device` is a GPU where there is one and the CPU, hence the emulator, elsewhere."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest
import torch

GPU_TESTS = pathlib.Path(__file__).parent / "gpu"

if importlib.util.find_spec("hypothesis"):  # optional here
    import hypothesis

    # A first example pays for imports and captures, so time says nothing about a test here.
    hypothesis.settings.register_profile("simplegraph", deadline=None)
    hypothesis.settings.load_profile("simplegraph")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if GPU_TESTS in item.path.parents:
            item.add_marker(pytest.mark.gpu)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
