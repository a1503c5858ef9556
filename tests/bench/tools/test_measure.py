"""Memory of graphs is told apart from that of other processes and of eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.tools.measure import DeviceMemory

GPU = torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {"free": 900 * MIB, "segments": [], "emptied": 0}

    def empty() -> None:
        found["emptied"] += 1

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (found["free"], 1000 * MIB))
    monkeypatch.setattr(
        torch.cuda,
        "memory_reserved",
        lambda device: sum(each["total_size"] for each in found["segments"] if each["device"] == device.index),
    )
    monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", lambda: found["segments"])
    return found


def segment(size: int, pool: tuple[int, int] = (0, 0), device: int = 0) -> dict[str, Any]:
    return {"total_size": size * MIB, "segment_pool_id": pool, "device": device}


def test_another_process_counts_in_free_memory_only_and_an_eager_call_not_in_pools(counters: dict[str, Any]) -> None:
    counters["segments"] = [segment(10), segment(20, (0, 1))]
    before = DeviceMemory.now(GPU)
    assert before is not None
    counters["segments"] += [segment(2), segment(24, (0, 2)), segment(7, (0, 2), device=1)]
    counters["free"] -= (2 + 24 + 500) * MIB
    after = DeviceMemory.now(GPU)
    assert after is not None
    spent = {name: count // MIB for name, count in before.spent(after).items()}
    assert spent == {"device_bytes": 526, "reserved_bytes": 26, "pool_bytes": 24}


def test_the_cache_is_emptied_unless_a_clock_runs_after_it(counters: dict[str, Any]) -> None:
    DeviceMemory.now(GPU, release=False)
    assert counters["emptied"] == 0
    DeviceMemory.now(GPU)
    assert counters["emptied"] == 1
    assert DeviceMemory.now(torch.device("cpu")) is None
