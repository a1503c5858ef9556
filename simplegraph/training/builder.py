"""The steps from a training call to its pair of graphs: eager calls to learn from, and the capture of both."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.call.call import Binding, Call
from simplegraph.call.external_memory import held_generators
from simplegraph.call.inputs import InputSet
from simplegraph.call.watched_run import invoke_watched
from simplegraph.guard.guards import CapturedState
from simplegraph.manager.lifecycle import SizeRecord
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.observation import Observation
from simplegraph.manager.stats import where_failed
from simplegraph.manager.table import CaptureJob
from simplegraph.program.probes import Probe, RecordedRun
from simplegraph.serve.builder import GraphBuilder
from simplegraph.training.gradients import replicas_refused, set_up_backwards
from simplegraph.training.notes import BackwardNotes, HookWatch
from simplegraph.training.pair import LastForward, PairPlan
from simplegraph.training.recording import Leaves, Recording, written_outputs

_MAX_BEFORE = 3  # calls between the first one and its backward that count as warmups
_WRITTEN = "the forward writes to {}; under grad mode pass what it may not change"


@dataclasses.dataclass(eq=False)
class PairBuilder(GraphBuilder):
    """Builds the pairs of one module in one mode, training or not; see `GraphBuilder`.

    Attributes:
        last: the forward that last ran in the pairs' memory.
        pairs: pairs by call and the needs of its backward.
        leaves: tensors of the module that may require gradients; None before the first call.
    """

    last: LastForward = dataclasses.field(default_factory=LastForward)
    pairs: dict[Hashable, PairPlan] = dataclasses.field(default_factory=dict)
    leaves: Leaves | None = None
    _notes: weakref.WeakKeyDictionary[Binding, BackwardNotes] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    _read: set[int] = dataclasses.field(default_factory=set)  # storage keys of tensors that the latest backwards read
    _recording: Recording | None = None

    def drop(self) -> None:
        """Drop the graphs; a pair whose backward is pending keeps its memory, and new graphs use other memory."""
        self.pairs.clear()
        if self.last.pending:
            table, manager = self.manager.table, self.manager
            table.stats.dropped(table.graphs)
            table.graphs.clear()
            self.manager = CudaGraphManager(manager.config, device=manager.device, requests=False, stats=manager.stats)
            self.last = LastForward()
        super().drop()

    def notes(self, call: Call) -> BackwardNotes:
        """Return the notes of backwards of such calls."""
        return self._notes.setdefault(call.binding, BackwardNotes(self.manager.device.torch_device.type))

    def key(self, call: Call) -> tuple[Hashable, ...]:
        """Return the key of a call's pair; the signature comes first."""
        return (*call.key, call.spec, self.notes(call).needs)

    def leaves_of(self, module: nn.Module) -> Leaves:
        """Return the tensors of the module that may require gradients, as of the latest capture."""
        self.leaves = self.leaves or Leaves(module)
        return self.leaves

    # The lifecycle of a call.

    def record(self, call: Call) -> SizeRecord:
        """Return the lifecycle of a pair, which is its forward's."""
        return call.binding.size((*self.key(call), "forward"))

    def admit(self, call: Call) -> tuple[Call, SizeRecord]:
        """Also refuse a call that no pair can serve; see `GraphBuilder.admit`."""
        admitted = super().admit(call)
        if self.notes(call).twice:
            raise CannotBind(Reason.UNTRAINABLE, "its backward is to be differentiated itself (create_graph=True)")
        return admitted

    def missing_upfront(self, call: Call) -> str:
        """Say that nothing can be captured up front."""
        return "training graphs are captured by the calls that they serve"

    def warmups_left(self, binding: Binding, rows: int, mode: CudaGraphMode, descriptor: BatchDescriptor) -> int:
        """Count the eager calls before the capture; the backward of at least one must have run."""
        notes = self._notes.get(binding)
        unseen = notes is None or notes.seen is None
        return max(super().warmups_left(binding, rows, mode, descriptor), int(unseen))

    # Eager calls.

    def warm_up(self, call: Call) -> Any:
        """Run a call that is a warmup, or whose backward is observed."""
        if super().warmups_left(call.binding, call.batch, *call.dispatch[:2]) > 0:
            return super().warm_up(call)
        said = "with training=True, graphs are captured after the first backward of such a call, and none has run yet"
        notes = self.notes(call)
        notes.calls_before += 1
        # Several forwards may lead to one backward. After so many, none may ever come.
        reason = Reason.WARMUP if notes.calls_before <= _MAX_BEFORE else Reason.GRAD
        self.manager.stats.ran_eagerly(reason, said, call.batch)
        result = call.run(call.args, call.kwargs)
        self.watch(call, result)
        return result

    def run_as_called(self, call: Call, reason: Reason, detail: str = "") -> Any:
        """Run eagerly, with the caller's own tensors, and learn from the call and its backward."""
        binding, hooks, why = call.binding, HookWatch(), ""
        with replicas_refused(binding), hooks:
            result = super().run_as_called(call, reason, detail)
        if hooks.method is not None:
            why = f"the forward calls {hooks.method}, and a replay runs no hook that it registers"
        elif binding.written:
            why = _WRITTEN.format(", ".join(sorted(binding.written)))
        if why and binding.refusal is None:
            binding.refuse(CannotBind(Reason.UNTRAINABLE, why))
        self.watch(call, result)
        return result

    def watch(self, call: Call, result: Any) -> None:
        """Learn from the outputs of an eager call, and from its backward."""
        given = [*call.leaves, *self.leaves_of(call.module).tensors]
        self.notes(call).watch(written_outputs(flatten(result)[0], given))

    # Captures.

    def capture(self, call: Call) -> None:
        """Capture the pair that serves such calls.

        Raises:
            CannotBind: it cannot be captured.
            CaptureError: it cannot be captured, and ``on_capture_failure`` is "raise".
        """
        if self.last.pending:  # a capture would overwrite what the pending backward reads
            raise CannotBind(Reason.BACKWARD_PENDING, "")
        key = self.key(call)
        try:
            self.pairs[key] = self._new_pair(call, key)
        except CannotBind as error:
            self.record(call).refuse(error.again())
            raise

    def plan(self, call: Call) -> PairPlan:
        """Return the pair that serves such calls; it is kept as their plan if no proof is due."""
        plan = self.pairs[self.key(call)]
        if not plan.unproven:
            call.layout.plans[call.plan_key] = plan
        return plan

    def _new_pair(self, call: Call, key: tuple[Hashable, ...]) -> PairPlan:
        """Capture a call's forward and its backward."""
        device, table = self.manager.device, self.manager.table
        device.release_cached_memory()  # the graphs' pool needs as much memory as the eager calls used
        inputs = InputSet(call.layout.args, call.batch, call.leaves)
        state_key = self.manager.config.state_key
        leaves = Leaves(call.module)  # some may have been replaced since the first call
        invoke = functools.partial(invoke_watched, call, self.reader)
        recording = self._recording = Recording(call, invoke, leaves, inputs, self.notes(call), state_key)
        jobs = recording.jobs(key, held_generators(call))
        self.probes = [_TapeEnd(recording)]
        set_up_backwards(device)
        try:
            failed = self.build(call, inputs, jobs, lazy=True).failed
        finally:
            recording.tape.outputs.clear()
            self._recording, self.probes = None, ()
        if not failed and (cause := self._foreign_output(jobs, inputs)):
            failed = table.refuse(jobs[:1], cause, "Return a clone.")
        if failed:
            table.forget(jobs)
            table.raise_failure(failed)
            raise CannotBind(Reason.CAPTURE_FAILED, where_failed(next(iter(failed.values()))))
        if self.state is None:
            self.state = CapturedState(call.module)
        self.leaves, around = leaves, (table, inputs, self.state, self.seen.guards(call))
        return PairPlan(call, *around, jobs, recording, self._read, self.last)

    def note_seen(self, call: Call, inputs: InputSet, observation: Observation, buffers: Iterable[Tensor] = ()) -> None:
        """Note the memory that observed runs read and wrote, and the tensors that backwards read."""
        if self._recording is not None:
            buffers = [buffer for buffer in self._recording.gradients if buffer is not None]
        super().note_seen(call, inputs, observation, buffers)
        self._read = {key for observer in observation.observers[1:] for key in observer.external}

    def _foreign_output(self, jobs: Sequence[CaptureJob], inputs: InputSet) -> str:
        """Describe an output in memory that the graph does not write: eager returns an alias, a replay only a copy."""
        manager, input_storages = self.manager, inputs.storages
        outputs = manager.table.graphs[jobs[0].key].program.outputs
        foreign = (
            out
            for out in outputs
            if not manager.device.in_pool(manager.pool, out) and storage_key(out) not in input_storages
        )
        output = next(foreign, None)
        if output is None:
            return ""
        return f"an output of shape {tuple(output.shape)} is memory of the module, or a view of it"


@dataclasses.dataclass(eq=False)
class _TapeEnd(Probe):
    """Releases a forward's outputs after the last backward is recorded; until then their memory may not be reused."""

    recording: Recording

    def after_recording(self, recorded: RecordedRun) -> None:
        """Release the outputs after the last backward."""
        if recorded.run.key == self.recording.last:
            self.recording.tape.outputs.clear()
