"""The inventory of a graph, as a stand-in for the driver tells it, with parameters in memory of this process."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from stand_in_driver import Driver, Kernel, Other, pointer

from simplegraph.device.cuda.inventory.nodes import ProcessMemory, readable_ranges
from simplegraph.device.cuda.inventory.places import Places, device_memory, read_inventory
from simplegraph.device.protocol import Inventory, MemoryKind, MemorySpan
from simplegraph.doctor.touches import report_lines

BASE = 0x7F00_4000_0000
POOL, OTHER_POOL, WORKSPACES = (0, 3), (0, 4), (0, 5)


def segment(start: int, pool: tuple[int, int], *blocks: tuple[int, str]) -> dict[str, Any]:
    total = sum(size for size, _ in blocks)
    described = [{"size": size, "state": state} for size, state in blocks]
    return {"address": BASE + start, "total_size": total, "segment_pool_id": pool, "blocks": described}


LIVE, FREE = "active_allocated", "inactive"
SEGMENTS = [
    segment(0x0000, (0, 0), (0x400, LIVE), (0x400, FREE), (0x800, LIVE)),
    segment(0x2000, POOL, (0x800, LIVE), (0x800, FREE)),
    segment(0x4000, OTHER_POOL, (0x1000, LIVE)),
    segment(0x6000, WORKSPACES, (0x1000, LIVE)),
]
WEIGHT, FREED, UNKNOWN, TEMPORARY = BASE, BASE + 0x480, BASE + 0x900, BASE + 0x2880
FOREIGN_POOL, WORKSPACE, UNMAPPED, LIBRARY = BASE + 0x4010, BASE + 0x6020, BASE + 0x8030, BASE + 0x7000
KNOWN = [MemorySpan(WEIGHT, WEIGHT + 0x400, "weight")]
FORMER = [(BASE + 0x8000, BASE + 0x9000)]


def places(**more: Any) -> Places:
    return Places(SEGMENTS, [POOL], [WORKSPACES], KNOWN, FORMER, **more)


def taken(*nodes: Any, **more: Any) -> Inventory:
    return read_inventory(Driver(nodes), [1], lambda: places(**more))


def seen(inventory: Inventory) -> list[tuple[str, MemoryKind, int, bool]]:
    return [(touch.node, touch.place, touch.offset, touch.certain) for touch in inventory.touches]


@pytest.mark.parametrize("how", [{}, {"function": False}, {"together": True}])
def test_each_pointer_of_a_kernel_is_in_the_memory_it_belongs_to(how: dict[str, bool]) -> None:
    scalar = struct.pack("<i", 7)
    every = (WEIGHT + 8, FREED, UNKNOWN, TEMPORARY, FOREIGN_POOL, WORKSPACE, UNMAPPED)
    found = taken(Kernel("scale", *map(pointer, every), scalar, struct.pack("<q", 1 << 20), **how))
    assert seen(found) == [
        ("scale", MemoryKind.KNOWN, 8, True),
        ("scale", MemoryKind.FREED, 0x80, True),
        ("scale", MemoryKind.FOREIGN, 0x100, True),
        ("scale", MemoryKind.POOL, 0x880, True),
        ("scale", MemoryKind.FOREIGN, 0x10, True),
        ("scale", MemoryKind.WORKSPACE, 0x20, True),
        ("scale", MemoryKind.FREED, 0x30, True),
    ]
    assert (found.nodes, found.notes) == (1, {})


def test_a_word_of_a_struct_is_uncertain_and_an_array_of_pointers_is_not() -> None:
    mixed = pointer(UNKNOWN, 5, FREED) + struct.pack("<i", 1)
    found = taken(Kernel("gemm", mixed), Kernel("add", pointer(WEIGHT, UNKNOWN)))
    assert [touch.certain for touch in found.touches] == [False, False, True, True]
    assert [touch.address for touch in found.certain(MemoryKind.FOREIGN)] == [UNKNOWN]
    assert not found.certain(MemoryKind.FREED)


def test_the_end_of_a_tensor_is_not_the_freed_memory_behind_it() -> None:
    end = WEIGHT + 0x400
    assert [place for _, place, *_ in seen(taken(Kernel("sum", pointer(WEIGHT), pointer(end))))] == [MemoryKind.KNOWN]
    assert [place for _, place, *_ in seen(taken(Kernel("sum", pointer(end))))] == [MemoryKind.FREED]


_AT_THE_END = ((0x200, LIVE), (0x1600, FREE), (0x800, LIVE))


@pytest.mark.parametrize(
    ("blocks", "output", "freed"),
    [(_AT_THE_END, 0x000, True), (_AT_THE_END, 0x1800, False), ([(0x2000, FREE)], 0x000, True)],
    ids=["a tensor in front", "one that ends there", "one that was given back since"],
)
def test_freed_memory_right_behind_the_pool_is_only_the_end_of_a_tensor_that_ends_there(
    blocks: Sequence[tuple[int, str]], output: int, freed: bool
) -> None:
    segments = [segment(0, POOL, *blocks), segment(0x2000, (0, 0), (0x800, FREE))]
    kernel = Kernel("scale", pointer(BASE + 0x2000), pointer(BASE + output))
    found = read_inventory(Driver([kernel]), [1], lambda: Places(segments, [POOL]))
    assert (MemoryKind.FREED in [touch.place for touch in found.touches]) is freed


def test_copies_fills_and_graphs_inside_are_read_too() -> None:
    nodes = [
        Other(1, source_type=2, source=UNKNOWN, target_type=2, target=TEMPORARY),
        Other(1, source_type=1, source=UNKNOWN, target_type=2, target=WEIGHT),  # from the host
        Other(2, target=FREED),
        Other(4, inside=[Kernel("inner", pointer(WEIGHT)), Other(4, inside=[Kernel("innermost", pointer(WEIGHT))])]),
    ]
    assert [(node, place) for node, place, *_ in seen(taken(*nodes))] == [
        ("copy from", MemoryKind.FOREIGN),
        ("copy to", MemoryKind.POOL),
        ("copy to", MemoryKind.KNOWN),
        ("memset", MemoryKind.FREED),
        ("inner", MemoryKind.KNOWN),
        ("innermost", MemoryKind.KNOWN),
    ]


def test_what_cannot_be_read_is_noted_and_the_rest_is_read() -> None:
    gone = Kernel("gone", pointer(WEIGHT))
    gone.addresses[0] = 8  # no address of this process: a crash, were it read
    nodes = [gone, Other(13), Other(3), Other(6), Other(5), Kernel("scale", pointer(WEIGHT))]
    found = taken(*nodes)
    assert found.notes == {"parameters of gone": 1, "conditional node": 1, "host callback": 1}
    assert (found.nodes, [touch.node for touch in found.touches]) == (6, ["scale"])
    assert next(report_lines(found)) == "scale: weight"
    assert "not read: 1 x conditional node" in list(report_lines(found))


def test_an_address_of_the_host_is_no_memory_that_a_device_had_there_before() -> None:
    factor = ctypes.create_string_buffer(8)  # as cuBLAS passes it beside its value
    address = ctypes.addressof(factor)
    before = Places([], [], former=[(address & ~0xFFF, (address & ~0xFFF) + 0x2000), *FORMER])
    kernel = Kernel("sgemm", pointer(address), pointer(UNMAPPED))
    found = read_inventory(Driver([kernel]), [1], lambda: before)
    assert [(touch.address, touch.parameter) for touch in found.touches] == [(UNMAPPED, 1)]


def test_a_small_number_in_front_of_half_an_old_address_is_no_freed_memory() -> None:
    gone = 0x7F47_0000_0000
    before = Places([], [], former=[(gone, gone + (1 << 22))])
    words = [gone + 999, gone, gone + (1 << 21)]
    nodes = [*(Kernel("reduce", pointer(word, 5)) for word in words), Kernel("scale", pointer(gone))]
    found = read_inventory(Driver(nodes), [1], lambda: before)
    assert [(touch.node, touch.address, touch.certain) for touch in found.touches] == [
        ("reduce", gone + (1 << 21), False),
        ("scale", gone, True),
    ]


def test_kernels_whose_memory_is_accounted_for_are_left_out_if_so_asked() -> None:
    nodes = [
        Kernel("add", pointer(WEIGHT), pointer(TEMPORARY), pointer(WORKSPACE)),
        Kernel("scale", pointer(WEIGHT), pointer(UNKNOWN)),
        Other(2, target=TEMPORARY),
        Other(1, source_type=2, source=FREED, target_type=2, target=TEMPORARY),
    ]
    found = read_inventory(Driver(nodes), [1], places, every=False)
    assert [(touch.node, touch.place.name) for touch in found.touches] == [
        *(("scale", "KNOWN"), ("scale", "FOREIGN")),
        *(("copy from", "FREED"), ("copy to", "POOL")),
    ]
    assert found.nodes == 4


def test_a_kernel_costs_two_calls_of_the_driver_and_all_are_read_at_once() -> None:
    calls: list[str] = []

    class Counting(Driver):
        def __getattribute__(self, name: str) -> Any:
            calls.append(name)
            return super().__getattribute__(name)

    class CountingMemory(ProcessMemory):
        def read(self, pieces: Any) -> Any:
            calls.append("read")
            return super().read(pieces)

    kernels = [Kernel("scale", pointer(WEIGHT), pointer(UNKNOWN), together=True) for _ in range(100)]
    for kernel in kernels:
        kernel.fill = kernels[0].fill  # one function
    driver = Counting(kernels)
    calls.clear()
    found = read_inventory(driver, [1], places, CountingMemory)
    assert len(found.touches) == 200
    assert calls.count("read") == 2
    assert calls.count("cuGraphKernelNodeGetParams_v2") <= 101
    assert calls.count("cuFuncGetParamInfo") <= 5


def test_kernels_that_are_of_no_interest_are_not_read_and_nobody_is_asked_where_memory_is() -> None:
    def unasked() -> Places:
        raise AssertionError

    add, scale = (Kernel(name, pointer(UNKNOWN)) for name in ("add", "scale"))
    found = read_inventory(Driver([add, add]), [1], unasked, every=False, plain=lambda name: name == "add")
    assert (found.nodes, found.touches, found.notes) == (2, [], {})
    found = read_inventory(Driver([add, scale]), [1], places, every=False, plain=lambda name: name == "add")
    assert [(touch.node, touch.number) for touch in found.touches] == [("scale", 1)]
    assert len(read_inventory(Driver([add, scale]), [1], places, plain=lambda name: name == "add").touches) == 2


def test_what_the_host_can_read_is_told_from_what_its_devices_have() -> None:
    maps = b"""10000-20000 r-xp 00000000 08:01 42 /usr/lib/libc.so.6
200000000-200200000 ---p 00000000 00:00 0
200200000-200400000 rw-s 00000000 00:06 5 /dev/nvidiactl
7f07a0000000-7f07a0021000 rw-p 00000000 00:00 0
7f07a1000000-7f07a2000000 rw-s 7f07a1000000 00:06 7 /dev/nvidia-uvm
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]
"""
    found = [(0x10000, 0x20000), (0x7F07A0000000, 0x7F07A0021000), (0x7FFC00000000, 0x7FFC00021000)]
    assert readable_ranges(maps) == found


class Older(Driver):
    """Cannot tell the parameters of a kernel."""

    @property
    def cuFuncGetParamInfo(self) -> Any:
        raise AttributeError


@pytest.mark.parametrize("driver", [None, Older([])])
def test_a_driver_that_cannot_tell_leaves_a_note(driver: Any) -> None:
    found = read_inventory(driver, [1], places)
    assert list(found.notes) == [f"the driver has no {'cuGraphGetNodes' if driver is None else 'cuFuncGetParamInfo'}"]


def test_whatever_goes_wrong_leaves_a_note() -> None:
    driver = Driver([Kernel("scale", pointer(WEIGHT))])
    driver.cuGraphNodeGetType = lambda *args: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    assert list(read_inventory(driver, [1], places).notes) == ["ZeroDivisionError: division by zero"]


def test_memory_that_torch_did_not_allocate_is_told_by_the_driver() -> None:
    class Asked:
        def cuPointerGetAttribute(self, kind: Any, attribute: int, address: Any) -> int:
            kind._obj.value = 2
            return 0 if address.value == LIBRARY else 1

    nodes = [Kernel("nccl", pointer(LIBRARY), pointer(LIBRARY + 0x800))]
    found = taken(*nodes, is_device_memory=device_memory(Asked()))
    assert [(touch.address, touch.place) for touch in found.touches] == [(LIBRARY, MemoryKind.OUTSIDE)]


def test_memory_of_this_process_is_read_and_a_wrong_address_is_none() -> None:
    text = ctypes.create_string_buffer(b"abcdefgh", 8)
    with ProcessMemory() as memory:
        at = ctypes.addressof(text)
        assert memory.read([(at + 4, 4), (8, 8), (at, 8)]) == [b"efgh", None, b"abcdefgh"]
        assert (memory.holds(at), memory.holds(8)) == (True, False)
