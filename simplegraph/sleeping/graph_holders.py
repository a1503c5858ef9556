"""Find the holders of graphs and the memory that their graphs read: memory that sleeps, and memory that stays awake."""

from __future__ import annotations

import bisect
import dataclasses
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from simplegraph.base.errors import InputError
from simplegraph.base.tensors import has_address
from simplegraph.base.tensors import parts as parts_of
from simplegraph.call.call import Graphed
from simplegraph.device.inventory import take_inventory
from simplegraph.device.kernel_names import readable
from simplegraph.device.protocol import Inventory, MemoryKind, MemorySpan
from simplegraph.guard.survey import held_tensors
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.stats import wrappers
from simplegraph.program.program import Program
from simplegraph.sleeping.regions import MemoryRegion, Span, gib, refusing_region, storage_span

_TOUCHED: weakref.WeakKeyDictionary[Program, tuple[str, ...]] = weakref.WeakKeyDictionary()
_SHOWN = 3  # names in a line


@dataclasses.dataclass(frozen=True, eq=False)
class Holder:
    """A holder of graphs: the runner of a wrapped module, or a manager, with its module if that is known."""

    graphs: Any
    module: nn.Module | None = None

    @property
    def name(self) -> str:
        """Its name in reports."""
        return str(self.graphs.stats.name)

    @property
    def builders(self) -> list[Any]:
        """The builders of its graphs; none for an engine's manager."""
        return [] if isinstance(self.graphs, CudaGraphManager) else self.graphs.builders

    @property
    def managers(self) -> list[CudaGraphManager]:
        """Its managers."""
        if isinstance(self.graphs, CudaGraphManager):
            return [self.graphs]
        return [builder.manager for builder in self.builders]

    @property
    def modules(self) -> list[nn.Module]:
        """Its module, and the modules that its graphs were captured from."""
        captured = [builder.state.module() for builder in self.builders if builder.state is not None]
        return list({id(module): module for module in (self.module, *captured) if module is not None}.values())

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that its module holds or its graphs read, with names."""
        for module in self.modules:
            yield from ((held.name, held.tensor) for held in held_tensors(module))
        for builder in self.builders:
            yield from (("a tensor from elsewhere", owned.tensor) for owned in builder.seen.read.elsewhere.values())
            for inputs in builder.inputs_of.values():
                for name, static_input in inputs.inputs.items():
                    yield f"argument {name}", static_input.view(inputs.capacity)
        for manager in self.managers:
            yield from (("a buffer of the engine", tensor) for tensor in manager.kept_alive)
            yield from (("a tensor that no operator named", tensor) for tensor in manager.table.foreign)

    def memory(self, kind: str) -> dict[Span, str]:
        """Return the names of its tensors' memory on devices of a type."""
        names: dict[Span, str] = {}
        for name, tensor in self.tensors():
            for part in parts_of(tensor):
                if has_address(part) and part.device.type == kind and refusing_region(part) is None:
                    names.setdefault(storage_span(part.untyped_storage()), name)
        return {span: name for span, name in names.items() if span.size}

    def loaded(self) -> Iterator[int]:
        """Return the addresses of the memory that a checkpoint of its modules would load."""
        values = [value for module in self.modules for value in module.state_dict(keep_vars=True).values()]
        parts = (part for value in values if issubclass(type(value), Tensor) for part in parts_of(value))
        return (part.untyped_storage().data_ptr() for part in parts if has_address(part))


def holders_of(owner: Any) -> list[Holder]:
    """List the holders of a wrapped module and its submodules, or of a manager; all holders of the process for None.

    Raises:
        InputError: `owner` is something else.
    """
    if owner is None:
        return [Holder(runner) for runner in wrappers()]
    if isinstance(owner, CudaGraphManager):
        return [Holder(owner)]
    if not isinstance(owner, nn.Module):
        raise InputError(
            f"owner is a {type(owner).__name__}; expected a wrapped module, a CudaGraphManager, or None for everything."
            " For one of several models, a function or a training step, call its own sleep() or wake()."
        )
    return [Holder(module._graph_runner, module) for module in owner.modules() if isinstance(module, Graphed)]


class RegionMap:
    """Finds the region that an address is in."""

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        blocks = sorted((*block, index) for index, region in enumerate(regions) for block in region.blocks)
        self._starts, self._blocks, self.regions = [block[0] for block in blocks], blocks, regions

    def find(self, address: int) -> MemoryRegion | None:
        """Return the region; None if the address is in none."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0 or address >= self._blocks[at][0] + self._blocks[at][1]:
            return None
        return self.regions[self._blocks[at][2]]

    def region_of(self, tensor: Tensor) -> MemoryRegion | None:
        """Return the region of a tensor's memory, asleep or not; None if it is in no region."""
        for part in parts_of(tensor):
            if has_address(part):
                asleep = refusing_region(part)
                region = asleep if asleep in self.regions else None
                region = self.find(part.data_ptr()) if asleep is None else region
                if region is not None:
                    return region
        return None

    def is_read_by(self, layer: nn.Module) -> bool:
        """True if a parameter or buffer of the layer itself is in a region."""
        own = (*layer.parameters(recurse=False), *layer.buffers(recurse=False))
        return any(self.region_of(tensor) is not None for tensor in own)

    def of(self, holder: Holder) -> set[MemoryRegion]:
        """Find the regions that have memory of a holder's graphs."""
        own = {region for manager in holder.managers for region in self.regions if region.holds_graphs(manager.pool)}
        named = [span.address for kind in ("cuda", "cpu") for span in holder.memory(kind)]
        return own | {region for region in map(self.find, (*named, *_addresses(holder))) if region is not None}


def _addresses(holder: Holder) -> Iterator[int]:
    """Yield addresses outside of the graphs' own memory that they touch according to the driver."""
    for manager in holder.managers:
        for graph in manager.table.graphs.values():
            inventory: Inventory | None = graph.counters.inventory
            touches = inventory.touches if inventory is not None else ()
            yield from (touch.address for touch in touches if touch.certain)


def kept_awake(holder: Holder, places: RegionMap) -> list[str]:
    """Describe the memory outside of all regions that a holder's graphs read: it stays awake."""
    kept: list[str] = []
    for kind in dict.fromkeys(manager.device.torch_device.type for manager in holder.managers):
        left = {span: name for span, name in holder.memory(kind).items() if places.find(span.address) is None}
        if left:
            names = ", ".join(list(dict.fromkeys(left.values()))[:_SHOWN])
            kept.append(f"{holder.name}: {names} ({len(left)} in all, {gib(sum(span.size for span in left))} GiB)")
    for manager in holder.managers:
        table = manager.table
        if table.graphs and not any(region.holds_graphs(manager.pool) for region in places.regions):
            kept.append(f"{holder.name}: memory of graphs from before the first sg.sleepable()")
        named = [
            *(MemorySpan(span.address, sum(span), name) for span, name in holder.memory("cuda").items()),
            *(
                MemorySpan(block.address, sum(block), region.part)
                for region in places.regions
                for block in region.blocks
            ),
        ]
        for graph in table.graphs.values():
            if graph.program not in _TOUCHED:
                inventory = take_inventory(table.device, table.pool, graph.program.segments, named)
                _TOUCHED[graph.program] = () if inventory is None else tuple(_foreign(inventory))
            kept += [f"{holder.name}: {line}" for line in _TOUCHED[graph.program]]
    return list(dict.fromkeys(kept))


def _foreign(inventory: Inventory) -> Iterator[str]:
    for kind in (MemoryKind.FOREIGN, MemoryKind.OUTSIDE, MemoryKind.FREED):
        for touch in inventory.certain(kind)[:1]:
            yield f"{kind.value}, read by the kernel {readable(touch.node)}"
