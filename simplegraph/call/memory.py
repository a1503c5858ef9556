"""The memory that a forward uses beside its arguments, and the changes that it makes to these."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.base.modes import outside_modes
from simplegraph.base.nested import containers, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import OwnedTensor, gradient_of, has_address, lies_at, parts, storage_key
from simplegraph.call.call import Call, is_copied
from simplegraph.call.inputs import PLAIN_TENSORS, ConstantArg, Spans, overlaps_itself
from simplegraph.call.signature import CallReader
from simplegraph.device.memory import (
    HostRandom,
    SavedMemory,
    copy_limit,
    default_generator,
    put_random_states,
    random_states,
)
from simplegraph.guard.functions import computes_gradients
from simplegraph.guard.guards import MemoryRead
from simplegraph.guard.survey import Survey
from simplegraph.manager.table import ProgramTable
from simplegraph.program.index_checks import IndexChecks
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.probes import Probe, Run
from simplegraph.program.snapshot import Snapshot


@dataclasses.dataclass(eq=False)
class MemoryInUse:
    """The memory that a module's forward was seen to use beside its arguments.

    Attributes:
        read: what it reads or writes; written: storage keys of what it writes to.
        launched: those of what Triton's launches were passed, and may write to.
    """

    read: MemoryRead = dataclasses.field(default_factory=MemoryRead)
    written: set[int] = dataclasses.field(default_factory=set)
    launched: set[int] = dataclasses.field(default_factory=set)

    def add(
        self, survey: Survey, observers: Sequence[MemoryObserver], inputs: set[int], device: torch.device | None
    ) -> None:
        """Take in what runs were seen to use.

        Args:
            survey: of their module.
            observers: of the runs.
            inputs: storage keys of their inputs.
            device: on which counts tell who holds memory; constants that are moved there are kept in other ways, too.
        """
        read, held = self.read, {key for each in survey.tensors.values() for key in each.memory}
        for observer in observers:
            read.unseen = read.unseen or observer.reads_anything
            for key, tensor in (*observer.external.items(), *observer.passed.items()):
                if key in inputs:
                    continue
                read.keys.add(key)
                known = read.elsewhere.get(key)
                # If it moved since, its key means another's memory.
                if key not in held and (known is None or storage_key(known.tensor) != key):
                    read.elsewhere[key] = OwnedTensor(tensor, tells=tensor.device == device)
            self.launched |= observer.launched  # an argument may be the module's own memory
            self.written |= {key for key in observer.written if key in held or key not in inputs}

    def check(self, call: Call) -> None:
        """Refuse arguments that lie in memory which the forward writes to, or through which it writes to what it reads.

        Raises:
            CannotBind: there are such.
        """
        written, names = call.binding.written, []
        copied = {arg.name for arg in call.layout.args if is_copied(arg)}
        for name, key in call.memory.items():
            if name in copied and (key in self.written or (name in written and key in self.read.keys)):
                names.append(name)
        if names:
            raise CannotBind(Reason.ALIASED, f"{', '.join(names)} and memory of the module")

    def guards(self, call: Call) -> list[tuple[int, Spans]]:
        """Return, by the index of an argument, where a replayed call's may not lie; see `check`."""
        known = {key: owned.tensor for key, owned in self.read.elsewhere.items()}
        held = (part for each in call.survey.tensors.values() for part in parts(each.tensor))
        known |= {storage_key(part): part for part in held if has_address(part)}
        everything = Spans(known[key] for key in self.read.keys | self.written if key in known)
        written = Spans(known[key] for key in self.written if key in known)
        guards = []
        for index, arg in enumerate(call.layout.args):
            spans = everything if arg.name in call.binding.written else written
            if is_copied(arg) and spans:
                guards.append((index, spans))
        return guards

    def save(self, table: ProgramTable, call: Call) -> SavedMemory | None:
        """Prepare to copy all that a call's forward may write, its inputs included; None if that is too much.

        Memory that the forward was seen to write is a must. The module's other buffers and the other inputs are added
        if they fit, since kernels that torch does not dispatch write unseen.
        """
        written = self.written
        device = table.device.torch_device  # what a call is passed on the CPU, no forward that is captured writes to
        inputs = [(name, leaf) for name, leaf in call.tensors if leaf.numel() and leaf.device == device]
        own = {storage_key(leaf) for _, leaf in inputs}
        known = [entry for entry in self._held(call, device) if storage_key(entry[1]) not in own]
        must = [entry for entry in known if storage_key(entry[1]) in written]
        unseen = [entry for entry in known if storage_key(entry[1]) not in written]
        others = [entry for entry in unseen if not isinstance(entry[1], nn.Parameter)]
        everything = SavedMemory(must, others, inputs)
        least = SavedMemory(must, (), [entry for entry in inputs if entry[0] in call.binding.written])
        free = table.device.free_memory()
        limit = copy_limit(free)
        if computes_gradients(call.module):
            # An eager run needs about as much memory as its graph, which keeps that.
            left = free - max((graph.bytes for graph in table.stats.graphs.values()), default=0)
            any_size: bool = call.module.proves_any_size
            limit = max(0, left) if any_size else min(limit, max(0, left))
        return next((choice for choice in (everything, least) if choice.nbytes <= limit), None)

    def _held(self, call: Call, device: torch.device) -> list[tuple[str, Tensor]]:
        """List the tensors on the device that the module holds, and the memory that it was seen to write, each once."""
        named = [(entry.name, part) for entry in call.survey.tensors.values() for part in parts(entry.tensor)]
        named += [
            ("memory from elsewhere", _whole(owned.tensor))
            for key, owned in self.read.elsewhere.items()
            if key in self.written or key in self.launched
        ]
        found: dict[Hashable, tuple[str, Tensor]] = {}
        for name, tensor in named:
            if has_address(tensor) and tensor.device == device:
                part = _whole(tensor) if overlaps_itself(tensor) else tensor
                place = storage_key(part), part.storage_offset(), part.shape, part.stride(), part.dtype
                found.setdefault(place, (name, part))
        return list(found.values())


def _whole(tensor: Tensor) -> Tensor:
    """View all memory that a tensor is a part of, as elements like its own."""
    return tensor.detach().as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)


def held_generators(call: Call) -> tuple[torch.Generator, ...]:
    """Find the random generators that the module holds or is passed: a capture must know them beforehand."""
    passed = [arg.leaf for arg in call.layout.args if isinstance(arg, ConstantArg)]
    drawn = [*call.survey.generators.values(), *(leaf for leaf in passed if issubclass(type(leaf), torch.Generator))]
    return tuple(dict.fromkeys(drawn))


def drawn_generators(call: Call, device: torch.device) -> tuple[torch.Generator, ...]:
    """Find the generators that the forward may draw from on a device, the CPU's among them."""
    found = (default_generator(device), torch.default_generator, *held_generators(call))
    return tuple(dict.fromkeys(found))


class Undo(contextlib.ExitStack):
    """Copies memory and the states of random generators, and puts them back when it is closed.

    Args:
        saved: the memory; None for none.
        generators: beside Python's and NumPy's.
        kept: memory that the caller puts back, and that is not copied.
        budget: bytes beside `saved` that may be copied later.
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
        self._keys, self._budget = {key for each in (saved, kept) if each is not None for key in each.keys}, budget
        if saved is not None:
            self.callback(saved.put, saved.copy())
        self.callback(put_random_states, generators, random_states(generators))
        self.callback(HostRandom().put_back)

    def watch(self, module: Any, *, code: bool = False) -> Snapshot:
        """Put back what places below a module hold, too; `code` is as for `Snapshot`."""
        snapshot = Snapshot(module, code=code)

        def put_back() -> None:
            snapshot.take_notes()
            snapshot.put_back(snapshot.changes())

        self.callback(put_back)
        return snapshot

    def copy(self, tensor: Tensor) -> None:
        """Copy all memory that a tensor is a part of, unless it was copied before or the budget does not allow it."""
        if storage_key(tensor) not in self._keys and tensor.untyped_storage().nbytes() <= self._budget:
            with outside_modes():
                memory = SavedMemory([("", tensor)])
                self.callback(memory.put, memory.copy())
            self._keys |= memory.keys
            self._budget -= memory.nbytes


@dataclasses.dataclass(eq=False)
class Rehearsals(Probe):
    """Puts back what rehearsed runs of a call's forward wrote and drew.

    The module's memory is copied before such a run, if it is not too much: kernels that torch does not dispatch write
    unseen. Of other memory, what other runs wrote, too, is copied before an operator writes there, as far as the copies
    fit. What this run alone writes may be a cache that it fills, and that Python takes to be filled from now on.

    Args:
        seen: what the forward was seen to use.
        table: of the call's graphs.
        call: whose forward runs.
        observers: of runs since then.
    """

    seen: MemoryInUse
    table: ProgramTable
    call: Call
    observers: Sequence[MemoryObserver]

    @contextlib.contextmanager
    def around(self, run: Run) -> Iterator[None]:
        """Put back at the end of a rehearsed run what it changed."""
        if not run.rehearsed:
            yield
            return
        seen, device = self.seen, self.table.device
        saved, budget = seen.save(self.table, self.call), copy_limit(device.free_memory())
        with Undo(saved, drawn_generators(self.call, device.torch_device), budget=budget) as undo:

            def copy(tensor: Tensor) -> None:
                if (key := storage_key(tensor)) in seen.written or any(
                    key in each.written or each.made(tensor) for each in self.observers
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
    """Run the call's module on these arguments, and note if it does to them what no replay can, or writes to them.

    A run that sets gradients of tensors that the module holds does what no replay can, too.

    Args:
        call: what is called.
        reader: names its arguments.
        args: these.
        kwargs: these.
        limit: bytes of arguments that may be copied, to find what kernels write that torch does not dispatch.
        recorded: the run is a recording, whose gradients mean nothing outside of it.
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
    """Let no graph serve calls that set gradients, but for training steps; `put_back` what they were."""
    is_looked_at = not computes_gradients(call.module) and call.plain.names(_SETTING_GRADIENTS)
    held = call.survey.tensors.values() if is_looked_at else ()
    before = [(each, gradient_of(each.tensor)) for each in held]
    try:
        yield
    finally:
        changed = [(each, gradient) for each, gradient in before if gradient_of(each.tensor) is not gradient]
        for each, gradient in changed if put_back else ():
            each.tensor.grad = gradient
    if changed:
        call.binding.refuse(
            CannotBind(Reason.PYTHON_STATE, f"the gradient of {changed[0][0].name}; {_GRADIENT_REMEDY}")
        )


_SETTING_GRADIENTS = ("grad", "zero_grad", "backward")
_GRADIENT_REMEDY = "write to it in place, set it outside of the call, or let simplegraph.train_step have the whole step"


def _bits(tensor: Tensor) -> Tensor:
    """View a tensor's elements as bytes; they are copied where they do not lie in a row."""
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    # One element lies in a row whatever its stride is, but torch views only a stride of 1 as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


class _Arguments:
    """The arguments of one run of a forward, as they were before it.

    Args:
        args, kwargs: what the forward is called with.
        reader: names the leaves.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], reader: CallReader) -> None:
        self._value = args, dict(kwargs)
        self._names = reader.names
        self._leaves, self._spec = flatten(self._value)
        self._containers = containers(self._value)
        self._looks = [_look(leaf) for leaf in self._leaves]

    def copied(self, call: Call, limit: int) -> list[tuple[str, Tensor, int, Tensor]]:
        """Copy what tensors hold, small ones first: a name, the tensor, its memory's size and a copy each."""
        left = {arg.name for arg in call.layout.args if is_copied(arg)} - call.binding.written
        leaves = zip(self._names(self._spec), self._leaves, strict=True) if limit else ()
        copies = []
        with outside_modes():  # who observes the run does not see this
            tensors = [(name, leaf.detach()) for name, leaf in leaves if name in left and type(leaf) in PLAIN_TENSORS]
            for name, view in sorted(tensors, key=lambda entry: entry[1].nbytes):
                limit -= view.nbytes
                if limit < 0:
                    break
                copies.append((name, view, view.untyped_storage().nbytes(), _bits(view).clone()))
        return copies

    def effect(self, result: Any) -> CannotBind | None:
        """Say what the forward did that a replay cannot; `result` is what it returned."""
        (leaves, spec), names = flatten(self._value), self._names(self._spec)
        if spec != self._spec:
            changed = sorted(set(names) ^ set(self._names(spec))) or names
        else:
            known = zip(names, self._leaves, leaves, self._looks, strict=True)
            changed = [name for name, then, now, look in known if then is not now or _look(now) != look]
            held = zip(self._containers, containers(self._value), strict=True)
            if not changed and any(then is not now for then, now in held):
                changed = names
        if changed:
            return CannotBind(Reason.CHANGED_ARGUMENTS, ", ".join(changed[:5]))
        own = {id(container) for container in self._containers}
        found = next((container for container in containers(result) if id(container) in own), None)
        if found is not None:
            kind = type(found).__name__
            return CannotBind(Reason.UNSUPPORTED_OUTPUT, f"a {kind} that the forward was passed; return a new one")
        return None


def _look(leaf: Any) -> Any:
    """Describe everything about a tensor that Python can change, but for its values."""
    if not issubclass(type(leaf), Tensor) or not has_address(leaf):
        return None
    return lies_at(leaf), leaf.requires_grad, {key: id(value) for key, value in vars(leaf).items()}
