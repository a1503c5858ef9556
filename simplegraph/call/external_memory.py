"""The memory that a forward uses beside its arguments, and changes that it makes to its arguments."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.modes import outside_modes
from simplegraph.base.nested import containers, flatten, library_remedy
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import OwnedTensor, gradient_of, has_address, lies_at, parts, storage_key
from simplegraph.call.call import Call, is_copied
from simplegraph.call.entries import as_dicts, states_of, written_mappings
from simplegraph.call.inputs import PLAIN_TENSORS, ConstantArg, Spans, overlaps_itself
from simplegraph.call.signature import CallReader
from simplegraph.device.saved_state import (
    HostRandom,
    SavedMemory,
    copy_limit,
    default_generator,
    put_random_states,
    random_states,
)
from simplegraph.guard.guards import MemoryRead
from simplegraph.guard.plain_state import PlainState
from simplegraph.guard.survey import Survey
from simplegraph.manager.table import ProgramTable
from simplegraph.program.index_checks import IndexChecks
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.probes import Probe, Run
from simplegraph.program.snapshot import Snapshot


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
            read.unseen = read.unseen or observer.reads_anything
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


class Undo(contextlib.ExitStack):
    """Copies memory and the states of random generators, and restores them when it is closed.

    Args:
        saved: the memory to copy; None for none.
        generators: random generators beside Python's and NumPy's.
        kept: memory that the caller restores, so that it is not copied.
        budget: the most bytes that `copy` may copy.
    """

    def __init__(
        self,
        saved: SavedMemory | None,
        generators: Sequence[torch.Generator],
        *,
        kept: SavedMemory | None = None,
        budget: float = float("inf"),
    ) -> None:
        super().__init__()
        self._keys, self._budget = (
            {key for memory in (saved, kept) if memory is not None for key in memory.keys},
            budget,
        )
        if saved is not None:
            self.callback(saved.put, saved.copy())
        self.callback(put_random_states, generators, random_states(generators))
        self.callback(HostRandom().put_back)

    def watch(self, module: Any, *, code: bool = False, plain: PlainState | None = None) -> Snapshot:
        """Also restore the Python state below a module; `code` is as for `Snapshot`.

        During `plain.capture_or_proof`, what another thread sets meanwhile stays.
        """
        snapshot = Snapshot(module, code=code)

        def put_back() -> None:
            with contextlib.nullcontext() if plain is None else plain.keeping_others(module):
                snapshot.take_done_flags()
                snapshot.put_back(snapshot.changes())

        self.callback(put_back)
        return snapshot

    def copy(self, tensor: Tensor) -> None:
        """Copy a tensor's whole storage, unless it was copied before or exceeds the budget."""
        if storage_key(tensor) not in self._keys and tensor.untyped_storage().nbytes() <= self._budget:
            with outside_modes():
                memory = SavedMemory([("", tensor)])
                self.callback(memory.put, memory.copy())
            self._keys |= memory.keys
            self._budget -= memory.nbytes


@dataclasses.dataclass(eq=False)
class Rehearsals(Probe):
    """Undoes the writes and random draws of rehearsed runs of a call's forward.

    The module's memory is copied before such a run, unless it is too large, since writes by kernels that torch does not
    dispatch are not observed. Other memory is copied before an operator writes to it, if other runs wrote to it, too,
    and if the copy fits the budget. Memory that only this run writes stays: it may be a cache that Python code takes
    for filled from now on.

    Args:
        seen: the memory that observed runs of the forward used.
        table: the table of the call's graphs.
        call: the call whose forward runs.
        observers: observers of the runs since then.
    """

    seen: MemoryInUse
    table: ProgramTable
    call: Call
    observers: Sequence[MemoryObserver]

    @contextlib.contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Undo the changes of a rehearsed run at its end."""
        if not run.rehearsed:
            yield
            return
        seen, device = self.seen, self.table.device
        saved, budget = seen.save(self.table, self.call), copy_limit(device.free_memory())
        with Undo(saved, drawn_generators(self.call, device.torch_device), budget=budget) as undo:

            def copy(tensor: Tensor) -> None:
                if (key := storage_key(tensor)) in seen.written or any(
                    key in observer.written or observer.made(tensor) for observer in self.observers
                ):
                    undo.copy(tensor)

            run.before_write = copy
            with IndexChecks():
                yield


def invoke_watched(
    call: Call,
    reader: CallReader,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    limit: int = 0,
    *,
    recorded: bool = False,
) -> Any:
    """Run a call's module; note the arguments that it writes, and refuse changes that a replay would not make.

    Calls that set `.grad` of the module's tensors are refused, too.

    Args:
        call: the call.
        reader: names its arguments.
        args: positional arguments.
        kwargs: keyword arguments.
        limit: the most bytes of arguments to copy, to find writes by kernels that torch does not dispatch.
        recorded: True if the run is a recording, whose gradients are undefined afterwards.
    """
    arguments = _Arguments(args, kwargs, reader)
    copies = arguments.copied(call, limit)
    with _gradients_kept(call, put_back=recorded):
        result = call.run(args, kwargs)
    with outside_modes():
        for name, view, nbytes, copy in copies:
            if view.untyped_storage().nbytes() != nbytes or not torch.equal(_bits(view), copy):
                call.binding.written.add(name)
            call.binding.compared.add(name)
    if (effect := arguments.effect(result)) is not None:
        call.binding.refuse(effect)
    return result


@contextlib.contextmanager
def _gradients_kept(call: Call, *, put_back: bool) -> Iterator[None]:
    """Refuse graphs of calls that set gradients, except training steps; `put_back` restores the gradients."""
    is_looked_at = not call.computes_gradients and call.plain.names(_SETTING_GRADIENTS)
    held = call.survey.tensors.values() if is_looked_at else ()
    before = [(entry, gradient_of(entry.tensor)) for entry in held]
    try:
        yield
    finally:
        changed = [(entry, gradient) for entry, gradient in before if gradient_of(entry.tensor) is not gradient]
        for entry, gradient in changed if put_back else ():
            entry.tensor.grad = gradient
    if changed:
        call.binding.refuse(
            CannotBind(Reason.PYTHON_STATE, f"the gradient of {changed[0][0].name}; {_GRADIENT_REMEDY}")
        )


_SETTING_GRADIENTS = ("grad", "zero_grad", "backward")
_GRADIENT_REMEDY = (
    "write to it in place, set it outside of the call, return what torch.autograd.grad(loss, inputs) gives in place of "
    "calling backward(), or let simplegraph.train_step have the whole step"
)


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor's elements as bytes, copied if they are not contiguous."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # A tensor of one element is contiguous with any stride, but torch views only a stride of 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Arguments:
    """The arguments of one run of a forward, saved before the run.

    Args:
        args, kwargs: the arguments of the forward.
        reader: names the leaves.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reader: CallReader) -> None:
        self._mappings = written_mappings(args, kwargs)  # their entries are outputs
        self._states = states_of(self._mappings) if self._mappings else []
        self._value = args, dict(kwargs)
        if self._mappings:
            self._value = tuple(map(as_dicts, args)), {name: as_dicts(value) for name, value in kwargs.items()}
        self._names = reader.names
        self._leaves, self._spec = flatten(self._value)
        self._containers = containers(self._value)
        self._looks = [_look(leaf) for leaf in self._leaves]

    def copied(self, call: Call, limit: int) -> list[tuple[str, Tensor, int, Tensor]]:
        """Copy the values of tensors, small tensors first; return (name, tensor, bytes of its storage, copy)."""
        names = {arg.name for arg in call.layout.args if is_copied(arg)} - call.binding.written
        leaves = zip(self._names(self._spec), self._leaves, strict=True) if limit else ()
        copies = []
        with outside_modes():  # hidden from observers of the run
            tensors = [(name, leaf.detach()) for name, leaf in leaves if name in names and type(leaf) in PLAIN_TENSORS]
            for name, view in sorted(tensors, key=lambda entry: entry[1].nbytes):
                limit -= view.nbytes
                if limit < 0:
                    break
                copies.append((name, view, view.untyped_storage().nbytes(), _bits(view).clone()))
        return copies

    def effect(self, result: Any) -> CannotBind | None:
        """Return the refusal for a change of the arguments that a replay cannot make; None if there is none.

        `result` is the result of the forward.
        """
        (leaves, spec), names = flatten(self._value), self._names(self._spec)
        if spec != self._spec:
            changed = sorted(set(names) ^ set(self._names(spec))) or names
        else:
            compared = zip(names, self._leaves, leaves, self._looks, strict=True)
            changed = [name for name, before, now, look in compared if before is not now or _look(now) != look]
            compared_containers = zip(self._containers, containers(self._value), strict=True)
            if not changed and any(before is not now for before, now in compared_containers):
                changed = names
            if not changed and self._mappings and self._states != states_of(self._mappings):
                changed = [f"what a {type(self._mappings[0]).__name__} is beside its items, such as its batch size"]
        if changed:
            return CannotBind(Reason.CHANGED_ARGUMENTS, self._remedy() or ", ".join(changed[:5]))
        passed = {id(container) for container in (*self._containers, *self._mappings)}
        returned = next((container for container in containers(result) if id(container) in passed), None)
        if returned is not None:
            kind = type(returned).__name__
            return CannotBind(Reason.UNSUPPORTED_OUTPUT, f"a {kind} that the forward was passed; return a new one")
        return None

    def _remedy(self) -> str:
        """Advise what to pass instead of a library's mapping that no graph can write; empty if there is none."""
        kinds = {type(container): library_remedy(type(container)) for container in self._containers}
        return next((remedy.format("an argument", kind.__name__) for kind, remedy in kinds.items() if remedy), "")


def _look(leaf: Any) -> Any:
    """Describe all properties of a tensor that Python code can change, except its values."""
    if not issubclass(type(leaf), Tensor) or not has_address(leaf):
        return None
    return lies_at(leaf), leaf.requires_grad, {key: id(value) for key, value in vars(leaf).items()}
