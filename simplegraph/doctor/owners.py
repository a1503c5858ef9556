"""Tell who owns device memory at a moment, and later whether a graph's addresses are still theirs."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import enum
import operator
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing import reductions

from simplegraph.base.walk import REGISTERED, Policy, Walk, all_tensors, items_of
from simplegraph.device.kernel_names import launched_by_torch

# Typed loosely because torch leaves it untyped.
_weak_reference: Callable[[torch.UntypedStorage], Any] = reductions.StorageWeakRef
_DEFAULT_POOL = (0, 0)


class State(enum.Enum):
    """Whose memory it is."""

    POOL = "memory of a graph's pool"
    TENSOR = "a tensor's memory"
    WORKSPACE = "allocated memory that no Python object holds, such as a library's workspace"
    OUTSIDE = "device memory that torch did not allocate"
    FREED = "memory that was given back"


class MemoryBlock(NamedTuple):
    """A range of the allocator's: whether it is allocated, the pool it is in, and where it was allocated if known."""

    start: int
    end: int
    active: bool
    pool: Hashable
    where: str


class Blocks:
    """Blocks that the allocator has at a moment.

    Args:
        segments: as torch describes them.
        is_device_memory: True for an address of the device that the driver knows.
    """

    def __init__(self, segments: Iterable[dict[str, Any]], is_device_memory: Callable[[int], bool]) -> None:
        blocks: list[MemoryBlock] = []
        for segment in segments:
            start, pool = segment["address"], tuple(segment["segment_pool_id"])
            for block in segment["blocks"]:
                end, active = start + block["size"], block["state"] == "active_allocated"
                blocks.append(MemoryBlock(start, end, active, pool, _user_line(block.get("frames", ()))))
                start = end
        self.all = sorted(blocks, key=operator.itemgetter(0))
        self._starts = [block.start for block in self.all]
        self.is_device_memory = is_device_memory

    def find(self, address: int) -> MemoryBlock | None:
        """Find the block that an address is in."""
        at = bisect.bisect_right(self._starts, address) - 1
        return self.all[at] if at >= 0 and address < self.all[at].end else None


class ModuleTensor(NamedTuple):
    """A tensor of a module by name: the memory that it was in, and how to find the module's current tensor.

    Attributes:
        root: the id of the outermost module that has it.
    """

    name: str
    start: int
    end: int
    module: weakref.ref[nn.Module]
    keys: tuple[Any, ...]
    root: int

    def address(self) -> int | None:
        """Return where the module has this tensor now; None if it has none there, or is gone."""
        value: Any = vars(self.module()) if self.module() is not None else {}
        with contextlib.suppress(Exception):  # a container that changed, a tensor without memory
            for key in self.keys:
                value = value[key]
            return int(value.data_ptr()) or None
        return None


@dataclasses.dataclass(eq=False)
class MemoryOwner:
    """Tells who has a block of memory at a moment.

    Attributes:
        state: whose it is.
        block: the memory; None if the allocator has none there.
        name: of its tensors, by module or shape.
        storages: weak references to what holds it, empty if Python sees nobody.
        floating: weak references to its tensors of floating point.
        slots: tensors of modules in it, ordered.
    """

    state: State
    block: MemoryBlock | None
    name: str = ""
    storages: list[Any] = dataclasses.field(default_factory=list)
    floating: list[weakref.ref[Tensor]] = dataclasses.field(default_factory=list)
    slots: list[ModuleTensor] = dataclasses.field(default_factory=list)

    @property
    def alive(self) -> bool:
        """True if its holders still hold it, as far as Python sees: its storages are alive, where they were."""
        return not self.storages or any(map(self._holds, self.storages))

    def _holds(self, reference: Any) -> bool:
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        return (
            storage is not None and self.block is not None and self.block.start <= storage.data_ptr() < self.block.end
        )

    def slot(self, address: int) -> ModuleTensor | None:
        """Find the module's tensor that an address is in."""
        at = bisect.bisect_right(self.slots, address, key=operator.attrgetter("start")) - 1
        return self.slots[at] if at >= 0 and address < self.slots[at].end else None

    def described(self, address: int) -> str:
        """Describe it for a reader."""
        slot = self.slot(address)
        name = slot.name if slot is not None else self.name
        return f"{name} ({self.state.value})" if name else self.state.value


class Use(NamedTuple):
    """A graph's first use of an owner's memory: the node and the address."""

    owner: MemoryOwner
    slot: ModuleTensor | None
    address: int
    node: int


class MemorySurvey:
    """The device's memory at a moment: blocks, live tensors in them, and their names by module.

    It looks at every object that the garbage collector knows, which takes some 50 ms in a large process.

    Attributes:
        blocks: of the allocator.
        modules: by the id of an outermost module, its parameters and those of modules inside.
    """

    def __init__(self, blocks: Blocks, device: str) -> None:
        self.blocks = blocks
        self.modules: dict[int, list[Use]] = {}
        self._owners: dict[int, MemoryOwner] = {}
        self._by_address: dict[int, MemoryOwner | None] = {}
        chosen = all_tensors(nn.Module)
        for tensor in (it for it in chosen if issubclass(type(it), Tensor)):
            with contextlib.suppress(Exception):  # of a subclass without memory, or half made
                self._note_tensor(tensor, device)
        for slot in _slots([it for it in chosen if issubclass(type(it), nn.Module)], device):
            owner = self.find(slot.start)
            if owner is not None:
                owner.slots.append(slot)
                if slot.keys[0] == "_parameters":
                    self.modules.setdefault(slot.root, []).append(Use(owner, slot, slot.start, 0))
        for owner in self._owners.values():
            owner.slots.sort(key=operator.attrgetter("start", "end"))

    def _note_tensor(self, tensor: Tensor, device: str) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device.type != device:  # a fake tensor says it is on the device, and torch warns of asking it where
            return
        block = self.blocks.find(storage.data_ptr())
        if block is None:
            return
        pool = State.TENSOR if block.pool == _DEFAULT_POOL else State.POOL
        owner = self._owners.setdefault(block.start, MemoryOwner(pool, block))
        owner.storages.append(_weak_reference(storage))
        if tensor.is_floating_point():
            owner.floating.append(weakref.ref(tensor))
        owner.name = owner.name or f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"

    def find(self, address: int) -> MemoryOwner | None:
        """Find who has the memory at an address; None if it is no address of the device."""
        if address not in self._by_address:
            self._by_address[address] = self._look_up(address)
        return self._by_address[address]

    def _look_up(self, address: int) -> MemoryOwner | None:
        block = self.blocks.find(address)
        if block is None:
            return MemoryOwner(State.OUTSIDE, None) if self.blocks.is_device_memory(address) else None
        if block.start not in self._owners:
            state = State.WORKSPACE if block.active else State.FREED
            self._owners[block.start] = MemoryOwner(state if block.pool == _DEFAULT_POOL else State.POOL, block)
        return self._owners[block.start]


def _slots(modules: Sequence[nn.Module], device: str) -> Iterator[ModuleTensor]:
    """List the tensors of modules: parameters, buffers and plain attributes, by the names that the outermost gives."""
    inside = {id(child) for module in modules for child in (vars(module).get("_modules") or {}).values()}
    seen: set[int] = set()
    for root in (module for module in modules if id(module) not in inside):
        walk = Walk([root], Policy(depth=1), seen)
        for thing, contents, _ in walk:
            above, name = walk.way_to(thing)
            is_module = issubclass(type(thing), nn.Module)
            for key, tensor in items_of(contents) if is_module or type(thing) in (list, tuple, dict) else ():
                if not issubclass(type(tensor), Tensor):
                    continue
                module, keys = (thing, (key,)) if is_module else (above, (name, key))
                is_named = is_module or name in REGISTERED
                path = walk.path_of(key, thing) if is_named else f"{walk.path(thing)}[{key!r}]"
                with contextlib.suppress(Exception):  # of a subclass without memory
                    if tensor.untyped_storage().device.type == device and (start := tensor.data_ptr()):
                        steps = zip(tensor.shape, tensor.stride(), strict=True)
                        end = start + (1 + sum((size - 1) * step for size, step in steps)) * tensor.element_size()
                        yield ModuleTensor(
                            f"{type(root).__name__}.{path}", start, end, weakref.ref(module), keys, id(root)
                        )
        seen |= walk.ways.keys()


def _user_line(frames: Iterable[dict[str, Any]]) -> str:
    """Say which line allocated a block, where torch's memory history knows."""
    lines = ((frame["filename"], frame["line"]) for frame in frames)
    users_lines = (f"{name}:{line}" for name, line in lines if name.endswith(".py") and "/torch/" not in name)
    return next(users_lines, "")


# The memory that a graph uses, and its present state.


def credible(owner: MemoryOwner, address: int, kernel: str, *, certain: bool) -> bool:
    """True if a word in a kernel's parameters is certainly an address that the kernel uses.

    A word of a struct may be padding with any content, so it counts only if a tensor begins at this address. Libraries
    that torch calls do not reset arguments that a kernel does not use, so their words do not count as addresses of
    memory that was freed before.
    """
    if owner.state in (State.OUTSIDE, State.FREED):
        return certain and not launched_by_torch(kernel)
    if certain or owner.block is None or owner.state is State.POOL:
        return certain
    slot = owner.slot(address)
    return address in (owner.block.start, slot.start if slot is not None else 0)


def judge(use: Use, now: Blocks, survey: Callable[[], MemorySurvey]) -> tuple[str, str] | None:
    """Return (kind of the fault, present owner) of memory that a graph uses; None without a fault.

    Args:
        use: the use of the memory.
        now: the allocator's present blocks.
        survey: surveys the memory again; called only if the tensors are gone and their memory is not.
    """
    owner, block = use.owner, now.find(use.address)
    if block is None:
        if owner.state is not State.OUTSIDE:
            return "unmapped", "memory that torch gave back to the driver"
        return None if now.is_device_memory(use.address) else ("unmapped", "no memory of the device any more")
    if owner.state in (State.TENSOR, State.WORKSPACE, State.FREED):
        state = "" if block.active else State.FREED.value
        moved = _moved(use)
        if moved:
            return "stale", f"{state or 'still allocated'}, and {moved}"
        if state:
            return "freed", state
    if not owner.alive and block.active:
        other = survey().find(use.address)
        if other is not None and other.storages:
            return "taken", other.described(use.address)
    return None


def _moved(use: Use) -> str:
    """Say where the module's tensor that was at an address is now; empty if one of another name is still there."""
    if use.slot is None:
        return ""
    places = {
        slot: slot.address() for slot in use.owner.slots if slot.start <= use.slot.start and slot.end >= use.slot.end
    }
    now = places[use.slot]
    if now is None or any(place == slot.start for slot, place in places.items()):
        return ""
    return f"{use.slot.name} is at {now:#x}"
