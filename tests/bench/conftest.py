"""One thread for torch: operators this small gain nothing from more, and wait long where cores are shared."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from bench.tools import fresh
from bench.tools.measure import few_threads
from bench.tools.side_by_side import SideBySide
from tests.support.where import without_gpu


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = pathlib.Path(__file__).parent
    for item in items:
        if folder in item.path.parents:
            item.add_marker(without_gpu)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with few_threads(torch.device("cpu")), pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")  # for the processes that tests start
        patch.setenv("BENCH_COMMIT", "c0ffee")  # an unpacked sdist has none
        yield


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure in this process, quicker than in fresh ones."""

    def call(function: Any, *args: Any, seconds: float) -> Any:
        try:
            return function(*args)
        except Exception as error:
            raise fresh.ProcessFailed(str(error), f"{type(error).__name__}: {error}") from error

    def run(_: SideBySide, tasks: Any) -> Iterator[tuple[Any, Any]]:
        for name, (function, args) in tasks.items():
            try:
                yield name, call(function, *args, 0, contextlib.nullcontext(), seconds=0.0)
            except fresh.ProcessFailed as error:
                yield name, error

    monkeypatch.setattr(fresh, "call", call)
    monkeypatch.setattr(fresh, "preload", lambda *_: None)
    monkeypatch.setattr(SideBySide, "run", run)
