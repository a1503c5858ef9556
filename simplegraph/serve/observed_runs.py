"""Eager runs of a module's forward, observed: what they read and write beside their arguments."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.context import bypassed
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import Reason
from simplegraph.base.tensors import storage_key
from simplegraph.call.call import Call, is_copied
from simplegraph.call.external_memory import MemoryInUse, drawn_generators
from simplegraph.call.inputs import HostArg, InputSet
from simplegraph.call.signature import CallReader
from simplegraph.call.watched_run import invoke_watched
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.saved_state import copy_limit, drew, random_states
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.guards import CapturedState
from simplegraph.guard.survey import Survey
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.observation import Observation, run_observed
from simplegraph.program.breaks.break_calls import BreakTrace
from simplegraph.program.host_arguments import HostArguments
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.probes import Probe
from simplegraph.program.steady_reads import KnownTensors


@dataclasses.dataclass(eq=False)
class ObservedRuns:
    """Runs the forward of one module eagerly, and learns from what it observes.

    Args:
        manager: holds the Programs.
        reader: reads calls, and learns from calls that succeeded.

    Attributes:
        state: the module's state that the Programs read; None before the first capture.
        seen: memory that observed runs of the forward used beside the arguments.
        recorded: storage keys of external memory that the latest captures read.
        ran_on: the GPU of the kernels of the latest eager run, if neither an argument nor a weight is on a GPU; else
            None.
        probes: further probes for captures.
    """

    manager: CudaGraphManager
    reader: CallReader
    state: CapturedState | None = None
    seen: MemoryInUse = dataclasses.field(default_factory=MemoryInUse)
    recorded: set[int] = dataclasses.field(default_factory=set)
    ran_on: torch.device | None = None
    probes: Sequence[Probe] = ()

    def run_eagerly(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Hashable | None = None,
        *,
        rows: int,
        arguments: HostArguments | None = None,
        before_write: Callable[[Tensor], object] = lambda _: None,
    ) -> tuple[Any, MemoryObserver, BreakTrace | None]:
        """Run eagerly with these arguments, and observe the run; trace breaks, and keep constants for `key`."""
        watched = call.binding.repeated_changes[call.padded].eager_run(call.module)
        limit = copy_limit(self.manager.device.free_memory())
        generators = drawn_generators(call, self.manager.device.torch_device)
        before = random_states(generators)
        passed, _ = flatten((args, kwargs))
        copied = {storage_key(leaf) for leaf, arg in zip(passed, call.layout.args, strict=True) if is_copied(arg)}
        # The run is on the caller's stream, since work of the forward in other threads waits for no other stream. A
        # forward that runs a backward is on the capture stream: nodes that accumulate gradients may live until the
        # capture, and keep the stream of their first use.
        stream: contextlib.AbstractContextManager[object]
        stream = self.manager.device.on_capture_stream() if call.computes_gradients else CAPTURE_LOCK
        with stream, bypassed(Reason.NESTED), watched:
            result, observer, trace = run_observed(
                self.manager.table,
                lambda: invoke_watched(call, self.reader, args, kwargs, limit),
                key,
                traced=call.breaks,
                rows=rows,
                inputs=copied,
                arguments=arguments,
                before_write=before_write,
                tensors=known_tensors(call, copied),
            )
        call.binding.draws |= observer.may_draw and drew(generators, before)
        for leaf in flatten(result)[0] if call.computes_gradients else ():
            if issubclass(type(leaf), Tensor) and leaf.is_cuda and leaf.layout is torch.strided:
                for part in leaf.unbind()[:1] if leaf.is_nested else [leaf]:  # all parts share one memory
                    part.record_stream(torch.cuda.current_stream(leaf.device))
        return result, observer, trace

    def learn_hosts(self, call: Call, arguments: HostArguments) -> bool:
        """Learn how a run used CPU tensors that it was passed; True if such calls are read differently from now on."""
        call.binding.waited |= arguments.waited
        return self.reader.learn_hosts(arguments)

    def keep_external(self, call: Call, observers: Sequence[MemoryObserver], inputs: set[int]) -> None:
        """Keep alive the memory that observed runs read, except inputs and tensors of the module; note their writes."""
        call.binding.differentiates |= any(observer.differentiates for observer in observers)
        call.binding.only_computes &= not any(
            observer.written or observer.launched or observer.unseen for observer in observers
        )
        if call.carried.places:
            call.carried.note_read({key for observer in observers for key in observer.external} - inputs)
        unread = call.module.note_read(observers) if isinstance(call.module, FunctionModule) else set()
        # Reference counts do not show who holds gradients and learning rates of a training step.
        device = None if call.computes_gradients else self.manager.device.torch_device
        self.seen.add(call.survey, observers, inputs | unread, device)
        if self.state is not None:
            self.state.accept(call.survey)

    def note_seen(self, call: Call, inputs: InputSet, observation: Observation, buffers: Iterable[Tensor] = ()) -> None:
        """Note the memory that observed runs read and wrote, except `buffers` of the call."""
        for observer in observation.observers:
            call.binding.note_written(observer, inputs.memory)
            call.binding.learn_numbers(self.manager.table, observer.numbers, in_graph=observer.captures)
        host_copies = (arg.leaf for arg in call.layout.args if isinstance(arg, HostArg))
        storages = inputs.storages.union(map(storage_key, (*buffers, *host_copies)))
        self.keep_external(call, observation.observers, storages)
        self.recorded = {key for observer in observation.observers if observer.captures for key in observer.external}
        self.seen.read.values |= {
            place: tensor for place, tensor in observation.reads.items() if place[0] not in storages
        }
        self.seen.read.versions += observation.versions

    def reads_unseen(self, call: Call) -> bool:
        """True if the latest graphs read memory outside of their pool that nothing else ever held."""
        device, pool, elsewhere = self.manager.device, self.manager.pool, self.seen.read.elsewhere
        # The tensors that TorchScript makes of numbers are on the CPU, unseen: on the emulator they are device memory.
        makes_numbers = device.emulated and bool(call.survey.scripted or call.plain.scripts)
        found = (elsewhere[key] for key in self.recorded & elsewhere.keys())
        return any(
            owned.was_never_held()
            and not device.in_pool(pool, owned.tensor)
            and not (makes_numbers and owned.tensor.dim() == 0)
            for owned in found
        )


def known_tensors(call: Call, inputs: Collection[int]) -> KnownTensors:
    """Return the tensors whose values may be constants in a graph; `inputs` has the storage keys of data."""
    if call.computes_gradients:  # a training step writes parameters: no value is a constant
        return KnownTensors(lambda tensor: (), inputs)
    survey = functools.cache(lambda: Survey(call.module))
    return KnownTensors(lambda tensor: survey().tensors_at(tensor), inputs)
