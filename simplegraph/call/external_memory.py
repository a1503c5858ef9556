"""The memory that a forward reads and writes beside its arguments, and the random generators that it may draw from."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import OwnedTensor, has_address, parts, storage_key
from simplegraph.call.call import Call, is_copied
from simplegraph.call.inputs import ConstantArg, Spans, overlaps_itself
from simplegraph.device.saved_state import SavedMemory, copy_limit, default_generator
from simplegraph.guard.guards import MemoryRead
from simplegraph.guard.survey import Survey
from simplegraph.manager.table import ProgramTable
from simplegraph.program.observe import MemoryObserver


@dataclasses.dataclass(eq=False)
class MemoryInUse:
    """The memory that observed runs of a module's forward used beside its arguments.

    Attributes:
        read: memory that the forward reads or writes; written: storage keys of memory that it writes.
        launched: storage keys of tensors that Triton launches were passed, and may write to.
    """

    read: MemoryRead = dataclasses.field(default_factory=MemoryRead)
    written: set[int] = dataclasses.field(default_factory=set)
    launched: set[int] = dataclasses.field(default_factory=set)

    def add(
        self, survey: Survey, observers: Sequence[MemoryObserver], inputs: set[int], device: torch.device | None
    ) -> None:
        """Add memory that observed runs used.

        Args:
            survey: the survey of the module.
            observers: the observers of the runs.
            inputs: storage keys of the runs' inputs.
            device: the device on which reference counts show if something else holds memory; None if none.
        """
        read, module_keys = self.read, {key for tensor in survey.tensors.values() for key in tensor.memory}
        for observer in observers:
            read.reads_anything = read.reads_anything or observer.reads_anything
            for key, tensor in (*observer.external.items(), *observer.passed.items()):
                if key in inputs:
                    continue
                read.keys.add(key)
                elsewhere = read.elsewhere.get(key)
                # If the earlier tensor was moved since, another tensor's memory may have its key.
                if key not in module_keys and (elsewhere is None or storage_key(elsewhere.tensor) != key):
                    # Constants that are moved to the device are also held by the table.
                    read.elsewhere[key] = OwnedTensor(tensor, counts=tensor.device == device)
            self.launched |= observer.launched  # an argument may be the module's own memory
            self.written |= {key for key in observer.written if key in module_keys or key not in inputs}

    def check(self, call: Call) -> None:
        """Refuse arguments in memory that the forward writes, and arguments that it writes in memory that it reads.

        Raises:
            CannotBind: there is such an argument.
        """
        written, names = call.binding.written, []
        copied = {arg.name for arg in call.layout.args if is_copied(arg)}
        for name, key in call.memory.items():
            if name in copied and (key in self.written or (name in written and key in self.read.keys)):
                names.append(name)
        if names:
            raise CannotBind(Reason.ALIASED, f"{', '.join(names)} and memory of the module")

    def guards(self, call: Call) -> list[tuple[int, Spans]]:
        """Return (index of an argument, memory in which it must not be for a replay); see `check`."""
        tensors = {key: owned.tensor for key, owned in self.read.elsewhere.items()}
        module_parts = (part for entry in call.survey.tensors.values() for part in parts(entry.tensor))
        tensors |= {storage_key(part): part for part in module_parts if has_address(part)}
        everything = Spans(tensors[key] for key in self.read.keys | self.written if key in tensors)
        written = Spans(tensors[key] for key in self.written if key in tensors)
        guards = []
        for index, arg in enumerate(call.layout.args):
            spans = everything if arg.name in call.binding.written else written
            if is_copied(arg) and spans:
                guards.append((index, spans))
        return guards

    def save(self, table: ProgramTable, call: Call) -> SavedMemory | None:
        """Choose the memory to save before a run of a call's forward; None if the forward writes too much.

        Memory that observed runs wrote is required, inputs included. The module's other buffers and the other inputs
        are added if they fit, since writes by kernels that torch does not dispatch are not observed.
        """
        written = self.written
        device = table.device.torch_device  # no forward that is captured writes to CPU arguments
        inputs = [(name, leaf) for name, leaf in call.tensors if leaf.numel() and leaf.device == device]
        input_keys = {storage_key(leaf) for _, leaf in inputs}
        held = [entry for entry in self._held(call, device) if storage_key(entry[1]) not in input_keys]
        must = [entry for entry in held if storage_key(entry[1]) in written]
        unseen = [entry for entry in held if storage_key(entry[1]) not in written]
        others = [entry for entry in unseen if not isinstance(entry[1], nn.Parameter)]
        everything = SavedMemory(must, others, inputs)
        least = SavedMemory(must, (), [entry for entry in inputs if entry[0] in call.binding.written])
        free = table.device.free_memory()
        limit = copy_limit(free)
        if call.computes_gradients:
            # An eager run needs about as much memory as the graph, beside the graph's own memory.
            available = free - max((graph.bytes for graph in table.stats.graphs.values()), default=0)
            any_size: bool = call.module.proves_any_size
            limit = max(0, available) if any_size else min(limit, max(0, available))
        return next((choice for choice in (everything, least) if choice.nbytes <= limit), None)

    def _held(self, call: Call, device: torch.device) -> list[tuple[str, Tensor]]:
        """List the module's tensors on the device, and other memory that observed runs wrote, each once."""
        named = [(entry.name, part) for entry in call.survey.tensors.values() for part in parts(entry.tensor)]
        named += [
            ("memory from elsewhere", _whole(owned.tensor))
            for key, owned in self.read.elsewhere.items()
            if key in self.written or key in self.launched
        ]
        tensors: dict[Hashable, tuple[str, Tensor]] = {}
        for name, tensor in named:
            if has_address(tensor) and tensor.device == device:
                part = _whole(tensor) if overlaps_itself(tensor) else tensor
                place = storage_key(part), part.storage_offset(), part.shape, part.stride(), part.dtype
                tensors.setdefault(place, (name, part))
        return list(tensors.values())


def _whole(tensor: Tensor) -> Tensor:
    """Return a view of a tensor's whole storage, in its dtype."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def held_generators(call: Call) -> tuple[torch.Generator, ...]:
    """List the random generators that the module holds or is passed; a capture must register them."""
    passed = [arg.leaf for arg in call.layout.args if isinstance(arg, ConstantArg)]
    drawn = [*call.survey.generators.values(), *(leaf for leaf in passed if issubclass(type(leaf), torch.Generator))]
    return tuple(dict.fromkeys(drawn))


def drawn_generators(call: Call, device: torch.device) -> tuple[torch.Generator, ...]:
    """List the generators that the forward may draw from on a device, including the CPU's."""
    generators = (default_generator(device), torch.default_generator, *held_generators(call))
    return tuple(dict.fromkeys(generators))
