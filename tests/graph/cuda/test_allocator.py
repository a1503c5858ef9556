"""Records of torch's CUDA allocator, by a stand-in that describes a few segments."""

from __future__ import annotations

from typing import Any

import pytest

from simplegraph.device.cuda import allocator
from simplegraph.device.cuda.allocator import Addresses, owned_addresses

OURS, OTHERS = (0, 7), (0, 0)


def segment(start: int, size: int, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
    described = [{"size": size, "state": state} for size, state in blocks]
    return {"address": start, "total_size": size, "segment_pool_id": pool, "blocks": described}


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The allocator's successive snapshots; the last one is repeated."""
    said = [[segment(100, 50, OURS), segment(200, 50, OTHERS)]]
    monkeypatch.setattr(
        allocator.torch.cuda.memory, "memory_snapshot", lambda: said.pop(0) if len(said) > 1 else said[0]
    )
    return said


def test_an_address_is_told_from_others_and_asked_about_once(snapshots: list[Any]) -> None:
    addresses = Addresses()
    found = {address: addresses.find(address, {OURS}) for address in (99, 100, 149, 150, 200, 249, 250)}
    assert found == {99: False, 100: True, 149: True, 150: False, 200: False, 249: False, 250: False}
    snapshots[:] = [[segment(0, 1000, OURS)]]
    assert not any(addresses.find(address, {OURS}) for address in (99, 150, 200, 249, 250))


def test_memory_that_was_not_there_is_asked_about_again(snapshots: list[Any]) -> None:
    addresses = Addresses()
    assert addresses.find(100, {OURS})
    snapshots[:] = [[segment(100, 50, OURS), segment(300, 50, OURS)]]
    assert addresses.find(320, {OURS})
    assert not addresses.find(350, {OURS})


def test_what_others_had_may_be_ours_after_the_next_capture(snapshots: list[Any]) -> None:
    addresses = Addresses()
    assert not addresses.find(200, {OURS})
    snapshots[:] = [[segment(100, 50, OURS), segment(200, 50, OURS)]]
    assert not addresses.find(200, {OURS})
    addresses.forget_others()
    assert addresses.find(200, {OURS})
    assert addresses.find(100, {OURS})


def test_only_blocks_that_something_owns_are_listed(snapshots: list[Any]) -> None:
    blocks = (10, "active_allocated"), (15, "inactive"), (25, "active_allocated")
    snapshots[:] = [[segment(100, 50, OURS, *blocks), segment(200, 50, OTHERS, (50, "active_allocated"))]]
    assert owned_addresses(OURS) == {100, 125}
