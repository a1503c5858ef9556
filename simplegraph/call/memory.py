"""The memory that a wrapped module's forward may write: what a run that must have no effect puts back."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor, nn

from simplegraph.base.tensors import parts, storage_key
from simplegraph.call.args import ConstantArg
from simplegraph.call.call import Call
from simplegraph.call.inputs import overlaps_itself
from simplegraph.device.generators import default_generator
from simplegraph.device.inventory import KnownMemory
from simplegraph.device.memory import SavedMemory, copy_limit
from simplegraph.guard.functions import computes_gradients
from simplegraph.guard.survey import Survey, held_tensors
from simplegraph.manager.table import ProgramTable
from simplegraph.program.held import has_address


class ModuleMemory:
    """Finds the memory that a call's forward may write.

    Args:
        table: of the graphs, for the device and its free memory.
        call: the call.
        seen: tensors that the forward was seen to use, by storage key; written: the keys of those that it wrote.
        launched: the keys of those that Triton's launches were passed, and may write to.
    """

    def __init__(
        self, table: ProgramTable, call: Call, seen: dict[int, Tensor], written: set[int], launched: set[int]
    ) -> None:
        self._table = table
        self._call = call
        self._seen = seen
        self._written = written
        self._launched = launched

    def save(self) -> SavedMemory | None:
        """Prepare to copy all of it, the caller's inputs included; None if that is too much.

        Memory that the forward was seen to write is a must. The module's other buffers and the other inputs are added
        if they fit, since kernels that torch does not dispatch write unseen.
        """
        call, written = self._call, self._written
        inputs = [(name, leaf) for name, leaf in call.tensors if leaf.numel()]
        own = {storage_key(leaf) for _, leaf in inputs}
        known = [entry for entry in self._held() if storage_key(entry[1]) not in own]
        must = [entry for entry in known if storage_key(entry[1]) in written]
        unseen = [entry for entry in known if storage_key(entry[1]) not in written]
        others = [entry for entry in unseen if not isinstance(entry[1], nn.Parameter)]
        everything = SavedMemory(must, others, inputs)
        least = SavedMemory(must, (), [entry for entry in inputs if entry[0] in call.binding.written])
        free = self._table.device.free_memory()
        limit = copy_limit(free)
        if computes_gradients(call.module):
            # An eager run needs about as much memory as its graph, which keeps that.
            left = free - max((graph.bytes for graph in self._table.stats.graphs.values()), default=0)
            any_size: bool = call.module.proves_any_size
            limit = max(0, left) if any_size else min(limit, max(0, left))
        return next((choice for choice in (everything, least) if choice.nbytes <= limit), None)

    def _held(self) -> list[tuple[str, Tensor]]:
        """List the tensors on the device that the module holds, and the memory that it was seen to write, each once."""
        device = self._table.device.torch_device
        named = [(entry.name, part) for entry in held_tensors(self._call.module) for part in parts(entry.tensor)]
        other = [tensor for key, tensor in self._seen.items() if key in self._written | self._launched]
        named += [("memory from elsewhere", _whole(tensor)) for tensor in other]
        found: dict[Hashable, tuple[str, Tensor]] = {}
        for name, tensor in named:
            if has_address(tensor) and tensor.device == device:
                part = _whole(tensor) if overlaps_itself(tensor) else tensor
                place = storage_key(part), part.storage_offset(), part.shape, part.stride(), part.dtype
                found.setdefault(place, (name, part))
        return list(found.values())

    def generators(self) -> tuple[torch.Generator, ...]:
        """Find the generators that the forward may draw from, the CPU's among them."""
        own = default_generator(self._table.device.torch_device)
        found = (own, torch.default_generator, *held_generators(self._call))
        return tuple(dict.fromkeys(found))


def _whole(tensor: Tensor) -> Tensor:
    """View all memory that a tensor is a part of, as elements like its own."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def held_generators(call: Call) -> tuple[torch.Generator, ...]:
    """Find the random generators that the module holds or is passed: a capture must know them beforehand."""
    passed = [arg.leaf for arg in call.layout.args if isinstance(arg, ConstantArg)]
    drawn = [*Survey(call.module).generators.values(), *(leaf for leaf in passed if isinstance(leaf, torch.Generator))]
    return tuple(dict.fromkeys(drawn))


def named_memory(module: nn.Module) -> tuple[KnownMemory, ...]:
    """Name the memory of every tensor that a module holds."""
    found = []
    for held in held_tensors(module):
        for storage in (part.untyped_storage() for part in parts(held.tensor) if has_address(part)):
            found.append(KnownMemory(storage.data_ptr(), storage.data_ptr() + storage.nbytes(), held.name))
    return tuple(found)
