"""Questions about a capture to the driver, by a stand-in that answers for a small graph."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from simplegraph.device.cuda import driver as capturing
from simplegraph.device.cuda.driver import captured_nodes, captured_so_far, nodes_reaching, unjoined_operations

KERNEL, HOST, RECORD = 0, 3, 7
STREAM = 77


class Driver:
    """Answers of CUDA's driver about one capture."""

    def __init__(self, kinds: dict[int, int], edges: list[tuple[int, int]], ends: list[int], status: int = 1) -> None:
        self.kinds, self.edges, self.status = kinds, edges, status
        self.count, self.ends = len(ends), (ctypes.c_void_p * 9)(*ends)

    def cuStreamGetCaptureInfo_v2(self, stream: Any, *outputs: Any) -> int:
        assert stream.value == STREAM
        status, number, graph = (output._obj for output in outputs[:3])
        status.value, number.value, graph.value = self.status, 3, 5
        return 0

    def cuStreamGetCaptureInfo_v3(self, stream: Any, *outputs: Any) -> int:
        assert stream.value == STREAM
        status, _, graph, ends, _, count = (output._obj for output in outputs)
        status.value, graph.value, count.value = self.status, 5, self.count
        ends.contents = ctypes.c_void_p.from_buffer(self.ends)
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        count._obj.value = len(self.kinds)
        if nodes is not None:
            nodes[:] = list(self.kinds)
        return 0

    def cuGraphGetEdges_v2(self, graph: Any, starts: Any, targets: Any, data: Any, count: Any) -> int:
        count._obj.value = len(self.edges)
        if starts is not None:
            assert ctypes.sizeof(data) == 8 * len(self.edges)
            starts[:], targets[:] = ([edge[end] for edge in self.edges] for end in (0, 1))
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.kinds[node.value]
        return 0


class OlderDriver:
    """Has none of these."""


# A matrix product, a collective that reads it, and an addition; the collective's library records an event, too.
PRODUCT, COLLECTIVE, EVENT, ADDITION, HOSTS = 11, 12, 13, 14, 15
KINDS = {PRODUCT: KERNEL, COLLECTIVE: KERNEL, EVENT: RECORD, ADDITION: KERNEL, HOSTS: HOST}
FORKED = [(PRODUCT, COLLECTIVE), (COLLECTIVE, EVENT), (PRODUCT, ADDITION), (HOSTS, COLLECTIVE)]
JOINED = [*FORKED, (COLLECTIVE, ADDITION)]


@pytest.mark.parametrize(
    ("edges", "ends", "unjoined"),
    [
        (JOINED, [ADDITION], 0),
        (FORKED, [ADDITION, COLLECTIVE], 0),
        (FORKED, [ADDITION], 1),
        (FORKED, [PRODUCT], 2),
        ([], [], 3),
    ],
)
def test_a_collective_that_the_stream_does_not_wait_for_is_found_and_its_events_are_not_counted(
    edges: list[tuple[int, int]], ends: list[int], unjoined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "cuda_driver", lambda: Driver(KINDS, edges, ends))
    assert unjoined_operations(STREAM) == unjoined


@pytest.mark.parametrize("driver", [None, OlderDriver(), Driver(KINDS, FORKED, [ADDITION], status=2)])
def test_a_driver_that_does_not_say_is_taken_at_its_silence(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capturing, "cuda_driver", lambda: driver)
    assert unjoined_operations(STREAM) == 0


def test_long_chains_are_followed_to_their_beginning() -> None:
    chain = list(range(50_000))
    assert nodes_reaching([chain[-1]], chain[:-1], chain[1:]) == set(chain)


@pytest.mark.parametrize(
    ("driver", "progress"),
    [(Driver(KINDS, FORKED, []), (3, len(KINDS))), (Driver(KINDS, FORKED, [], status=2), None), (None, None)],
)
def test_the_progress_of_a_capture_is_its_number_and_the_count_of_its_operations(
    driver: Any, progress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capturing, "cuda_driver", lambda: driver)
    assert captured_so_far(STREAM) == progress
    assert captured_nodes(STREAM) == (None if progress is None else progress[1])
