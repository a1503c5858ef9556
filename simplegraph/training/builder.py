"""The way from a training call to its pair of graphs: eager calls that teach, and the capture of both."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from simplegraph.base.context import bypassed
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key, wait_collectives
from simplegraph.call.arguments import invoke_watched
from simplegraph.call.call import Call
from simplegraph.call.inputs import InputSet
from simplegraph.call.memory import ModuleMemory
from simplegraph.call.outside import MemoryInUse
from simplegraph.call.plan import Plan
from simplegraph.call.signature import CallReader
from simplegraph.device.generators import drew, random_states
from simplegraph.device.memory import copy_limit
from simplegraph.device.protocol import CAPTURE_LOCK, GraphDevice
from simplegraph.guard.effects import ModuleState
from simplegraph.guard.guards import CapturedState
from simplegraph.guard.snapshot import has_address, tensors_in
from simplegraph.guard.survey import Survey
from simplegraph.manager.jobs import CaptureJob
from simplegraph.manager.touched import inspect_graphs
from simplegraph.program.escapes import KEPT_REMEDY, kept_by
from simplegraph.program.host.warmup import HostWarmup
from simplegraph.program.observe import MemoryObserver
from simplegraph.training.backwards import set_up_backwards
from simplegraph.training.leaves import HookWatch, Leaves, replicas_refused
from simplegraph.training.lessons import Lessons
from simplegraph.training.pair import GraphPair, Lane, Returned
from simplegraph.training.recording import Recording, Tape, written_outputs
from simplegraph.training.routes import Backward

_WRITTEN = "the forward writes to {}; under grad mode pass what it may not change"


class PairBuilder:
    """Builds the pairs of one module in one mode, training or not.

    Args:
        module: what is captured.
        reader: names its arguments.
        lanes: where pairs live.

    Attributes:
        state: what the graphs read of the module; None before the first capture.
        seen: memory that the forward was seen to use beside its arguments.
        leaves: tensors of the module that may want gradients.
    """

    def __init__(self, module: nn.Module, reader: CallReader, lanes: list[Lane]) -> None:
        self.reader, self.lanes = reader, lanes
        self.state: CapturedState | None = None
        self.seen = MemoryInUse()
        self.leaves = Leaves(module)
        self.table = lanes[0].manager.table
        self.device: GraphDevice = lanes[0].manager.device

    def memory(self, call: Call) -> ModuleMemory:
        """Find the memory that a call's forward may write."""
        return ModuleMemory(self.table, call, self.seen.read.elsewhere, self.seen.written)

    def note_seen(self, module: nn.Module, observers: Sequence[MemoryObserver], inputs: set[int]) -> None:
        """Own what runs were seen to read, beside their inputs and what the module holds; note what they wrote."""
        survey = Survey(module)
        self.seen.add(survey, observers, inputs)
        if self.state is not None:
            self.state.accept(survey)

    # Eager calls.

    def run_as_called(self, call: Call, key: Hashable, lessons: Lessons) -> Any:
        """Run eagerly, with the caller's own tensors, and learn from the call and its backward."""
        binding, memory = call.binding, call.memory
        generators = self.memory(call).generators()
        before = random_states(generators)
        observer, host, hooks = MemoryObserver(), HostWarmup(self.device.torch_device), HookWatch()
        limit = copy_limit(self.device.free_memory())
        run = binding.counted.eager_run(call.module)
        with bypassed(Reason.NESTED), run, replicas_refused(binding), hooks, host.following(observer), observer:
            result = wait_collectives(invoke_watched(call, self.reader, call.args, call.kwargs, limit))
        self.table.constants.learn(key, host.copies, host.sources, met_host=host.met_host)
        binding.draws |= observer.may_draw and drew(generators, before)
        binding.note_written(observer, memory)
        binding.refused = observer.refused
        self.note_seen(call.module, [observer], set(memory.values()))
        binding.learn_outputs(call.batch, *flatten(result))
        self._refuse(call, hooks)
        self.watch(call, result, lessons)
        binding.called = True
        binding.warm[call.padded] += 1
        return result

    def _refuse(self, call: Call, hooks: HookWatch) -> None:
        """Note why no pair can serve such calls, if a run showed that."""
        binding, why = call.binding, ""
        if hooks.found is not None:
            why = f"the forward calls {hooks.found}, and a replay runs no hook that it registers"
        elif binding.written:
            why = _WRITTEN.format(", ".join(sorted(binding.written)))
        if why and binding.unsupported is None:
            binding.unsupported = CannotBind(Reason.UNTRAINABLE, why)

    def watch(self, call: Call, result: Any, lessons: Lessons) -> None:
        """Learn from what an eager call returned, and from its backward."""
        outputs = written_outputs(flatten(result)[0], [*call.leaves, *self.leaves.tensors])
        lessons.watch(outputs)
        self.lanes[0].handing_out.watch(outputs)

    # Captures.

    def capture(self, call: Call, key: Hashable, lane: Lane, lessons: Lessons) -> GraphPair:
        """Capture a call's forward and its backward.

        Raises:
            CannotBind: they cannot be.
            CaptureError: likewise, and ``on_capture_failure`` is "raise".
        """
        table = lane.manager.table
        table.constants = self.table.constants  # what was learnt of the calls holds in each lane
        inputs = InputSet(call.layout.args, call.batch, call.leaves)
        with torch.no_grad():
            inputs.load(call.tensors, call.batch, call.padded)
        recording = Recording(call, self.reader, self.leaves, inputs, lessons, table.config.state_key)
        jobs = recording.jobs(key, lane.number)
        set_up_backwards(self.device)
        state = ModuleState((call.module, *call.trusted), self.device, lane.manager.pool, call.binding.counted)
        capture = lane.manager.new_capture(jobs, lazy=True, retry=False, state=state)
        kept: list[str] = []
        try:
            with CAPTURE_LOCK, contextlib.ExitStack() as undo:
                undo.callback(lambda: kept.extend(state.put_back()))
                summary = capture.run()
            summary = inspect_graphs(capture, summary)
        except BaseException:
            table.forget(jobs)
            raise
        finally:
            recording.tape.outputs.clear()
        self._note_captured(call, capture.observers, capture.reads, inputs, recording)
        failed = summary.failed
        if failed:
            table.forget(jobs)
        elif why := self._refusal(call, capture.observers, kept):
            failed = table.refuse(jobs[:1], *why)
            table.forget(jobs[1:])
        if failed:
            table.raise_failure(failed)
            raise CannotBind(Reason.CAPTURE_FAILED, str(next(iter(failed.values()))).splitlines()[0])
        after = capture.observers[1:]
        read = {key for observer in after for key in observer.external}
        pair = self._pair(call, lane, inputs, recording, jobs, read)
        if not any(observer.unseen for observer in after):
            pair.lend(recording.written, set().union(*(observer.given for observer in after)))
        return pair

    def _refusal(self, call: Call, observers: Sequence[MemoryObserver], kept: Sequence[str]) -> tuple[str, str] | None:
        """Say why graphs that were captured cannot serve, and what to do."""
        if kept:
            return kept_by(kept), KEPT_REMEDY
        if call.binding.counted.names:
            return call.binding.counted.refusal
        limit = copy_limit(self.device.free_memory())
        if any(observer.unseen for observer in observers) and (names := call.never_compared(limit, proven=False)):
            cause = f"kernels that torch does not dispatch may write to {', '.join(names)}"
            return cause, "Set num_warmups=1, so that inputs are compared before and after a run."
        return None

    def _note_captured(
        self,
        call: Call,
        observers: Sequence[MemoryObserver],
        reads: dict[tuple[Any, ...], Tensor],
        inputs: InputSet,
        recording: Recording,
    ) -> None:
        """Take note of everything that the graphs read."""
        buffers = [buffer for buffer in recording.gradients if buffer is not None]
        own = inputs.storages | call.host_copies | set(map(storage_key, buffers))
        self.note_seen(call.module, observers, own)
        read = self.seen.read
        read.values |= {place: tensor for place, tensor in reads.items() if place[0] not in own}
        if read.unseen:  # which may read what the arguments hold, too
            passed = (part for thing in call.trusted for part in tensors_in(thing) if has_address(part))
            read.elsewhere |= {storage_key(part): part for part in passed}
        if self.state is None:
            self.state = CapturedState(call.module)
        self.state.take(read)

    def _pair(
        self,
        call: Call,
        lane: Lane,
        inputs: InputSet,
        recording: Recording,
        jobs: Sequence[CaptureJob],
        read_after: set[int],
    ) -> GraphPair:
        table, tape, arguments = lane.manager.table, recording.tape, recording.arguments
        forward, *backwards = (table.graphs[job.key] for job in jobs)
        self._check_outputs(table, jobs, forward.program.outputs, tape, inputs)
        state = cast(CapturedState, self.state)
        plan = Plan(call, table, forward, inputs, state, self.seen.guards(call))
        made = [
            Backward(graph, outputs, places)
            for graph, outputs, places in zip(backwards, recording.patterns, recording.places, strict=True)
        ]
        for other in made[1:]:
            other.graph.leave_unverified("for gradients of other outputs than the calls before")
        constant = frozenset(range(len(tape.reaches))) - tape.wanting
        returned = Returned(cast(TreeSpec, tape.spec), tape.leaves, tape.written, tape.given, constant)
        read = [tensor for tensor in arguments.held.originals if storage_key(tensor) in read_after]
        leaves = dict(enumerate(arguments.leaves))
        reached = frozenset().union(*tape.reaches)  # what no output depends on is no part of eager's graph either
        attached = {number: leaf for number, leaf in leaves.items() if number in reached}
        more = recording.gradients, tape.reaches, attached, read, recording.retains, self.leaves.tensors
        return GraphPair(lane, jobs, plan, made, returned, *more)

    def _check_outputs(
        self, table: Any, jobs: Sequence[CaptureJob], outputs: Sequence[Tensor], tape: Tape, inputs: InputSet
    ) -> None:
        """Refuse outputs in memory that the graph does not write: a copy of them would not be what eager returns."""
        own = inputs.storages
        foreign = [out for out in outputs if not table.device.in_pool(table.pool, out) and storage_key(out) not in own]
        if foreign:
            cause = f"an output of shape {tuple(foreign[0].shape)} is memory of the module, or a view of it"
            failed = table.refuse(jobs[:1], cause, "Return a clone.")
            table.forget(jobs[1:])
            table.raise_failure(failed)
            raise CannotBind(Reason.CAPTURE_FAILED, cause)
