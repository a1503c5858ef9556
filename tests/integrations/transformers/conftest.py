"""A tiny Llama with graphs to come and the same one without, and no warnings of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers = pytest.importorskip("transformers")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


@pytest.fixture
def llama(device: torch.device) -> Any:
    import tiny_models as tiny  # which needs transformers

    return tiny.build(tiny.DECODERS["llama"], device)


@pytest.fixture
def plain(device: torch.device) -> Any:
    import tiny_models as tiny

    return tiny.build(tiny.DECODERS["llama"], device)
