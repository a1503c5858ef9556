"""The way from a training call to its pair of graphs: eager calls that teach, and the capture of both."""

from __future__ import annotations

import contextlib
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
from simplegraph.call.inputs import InputSet
from simplegraph.call.memory import held_generators, invoke_watched
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

_WRITTEN = "the forward writes to {}; under grad mode pass what it may not change"


@dataclasses.dataclass(eq=False)
class PairBuilder(GraphBuilder):
    """Builds the pairs of one module in one mode, training or not; see `GraphBuilder`.

    Attributes:
        last: the forward that last ran in the pairs' memory.
        pairs: by call and what its backward needs.
        leaves: tensors of the module that may want gradients; None before the first call.
    """

    last: LastForward = dataclasses.field(default_factory=LastForward)
    pairs: dict[Hashable, PairPlan] = dataclasses.field(default_factory=dict)
    leaves: Leaves | None = None
    _notes: weakref.WeakKeyDictionary[Binding, BackwardNotes] = dataclasses.field(
        default_factory=weakref.WeakKeyDictionary
    )
    _read: set[int] = dataclasses.field(default_factory=set)  # storage keys of what the latest backwards read
    _recording: Recording | None = None

    def drop(self) -> None:
        """Drop the graphs; those whose backward may still come go with it, and others get memory of their own."""
        self.pairs.clear()
        if self.last.pending:
            table, known = self.manager.table, self.manager
            table.stats.dropped(table.graphs)
            table.graphs.clear()
            self.manager = CudaGraphManager(known.config, device=known.device, requests=False, stats=known.stats)
            self.last = LastForward()
        super().drop()

    def notes(self, call: Call) -> BackwardNotes:
        """Return what backwards of such calls showed."""
        return self._notes.setdefault(call.binding, BackwardNotes(self.manager.device.torch_device.type))

    def key(self, call: Call) -> tuple[Hashable, ...]:
        """Return what tells a call's pair from others: the signature first."""
        return (*call.key, call.spec, self.notes(call).needs)

    def leaves_of(self, module: nn.Module) -> Leaves:
        """Return the tensors of the module that may want gradients, as the latest capture found them."""
        self.leaves = self.leaves or Leaves(module)
        return self.leaves

    # The lifecycle of a call.

    def record(self, call: Call) -> SizeRecord:
        """Return the lifecycle of a pair: that of its forward."""
        return call.binding.size((*self.key(call), "forward"))

    def admit(self, call: Call) -> tuple[Call, SizeRecord]:
        """Refuse a call that no pair can serve, too; see `GraphBuilder.admit`."""
        admitted = super().admit(call)
        if self.notes(call).twice:
            raise CannotBind(Reason.UNTRAINABLE, "its backward is to be differentiated itself (create_graph=True)")
        return admitted

    def missing_upfront(self, call: Call) -> str:
        """Say that nothing can be captured up front."""
        return "training graphs are captured by the calls that they serve"

    def warmups_left(self, binding: Binding, rows: int, mode: CudaGraphMode, descriptor: BatchDescriptor) -> int:
        """Count the eager calls before the capture; the backward of one must have been seen."""
        notes = self._notes.get(binding)
        unseen = notes is None or notes.seen is None
        return max(super().warmups_left(binding, rows, mode, descriptor), int(unseen))

    # Eager calls.

    def warm_up(self, call: Call) -> Any:
        """Run a call that is a warmup, or whose backward is to be seen."""
        if super().warmups_left(call.binding, call.batch, *call.dispatch[:2]) > 0:
            return super().warm_up(call)
        said = "graphs are captured once a backward of such a call was seen"
        self.manager.stats.ran_eagerly(Reason.GRAD, said, call.batch)
        result = call.run(call.args, call.kwargs)
        self.watch(call, result)
        return result

    def eager_stream(self) -> contextlib.AbstractContextManager[object]:
        """Surround eager runs by nothing: their backwards run on the stream that they ran on."""
        return contextlib.nullcontext()

    def run_as_called(self, call: Call, reason: Reason, detail: str = "") -> Any:
        """Run eagerly, with the caller's own tensors, and learn from the call and its backward."""
        binding, hooks, why = call.binding, HookWatch(), ""
        with replicas_refused(binding), hooks:
            result = super().run_as_called(call, reason, detail)
        if hooks.found is not None:
            why = f"the forward calls {hooks.found}, and a replay runs no hook that it registers"
        elif binding.written:
            why = _WRITTEN.format(", ".join(sorted(binding.written)))
        if why and binding.refusal is None:
            binding.refuse(CannotBind(Reason.UNTRAINABLE, why))
        self.watch(call, result)
        return result

    def watch(self, call: Call, result: Any) -> None:
        """Learn from what an eager call returned, and from its backward."""
        known = [*call.leaves, *self.leaves_of(call.module).tensors]
        self.notes(call).watch(written_outputs(flatten(result)[0], known))

    # Captures.

    def capture(self, call: Call) -> None:
        """Capture the pair that serves such calls.

        Raises:
            CannotBind: it cannot be captured.
            CaptureError: likewise, and ``on_capture_failure`` is "raise".
        """
        if self.last.pending:  # a capture would write over what it needs
            raise CannotBind(Reason.BACKWARD_PENDING, "")
        key = self.key(call)
        try:
            self.pairs[key] = self._new_pair(call, key)
        except CannotBind as error:
            self.record(call).refuse(error.again())
            raise

    def plan(self, call: Call) -> PairPlan:
        """Find the pair that serves such calls, from now on if nothing of it is left to be proven."""
        plan = self.pairs[self.key(call)]
        if not plan.unproven:
            call.layout.plans[call.plan_key] = plan
        return plan

    def _new_pair(self, call: Call, key: tuple[Hashable, ...]) -> PairPlan:
        """Capture a call's forward and its backward."""
        device, table = self.manager.device, self.manager.table
        device.release_cached_memory()  # what eager calls used, the graphs have again in their own pool
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
        """Take note of what runs were seen to read and write, and of what backwards read."""
        if self._recording is not None:
            buffers = [buffer for buffer in self._recording.gradients if buffer is not None]
        super().note_seen(call, inputs, observation, buffers)
        self._read = {key for observer in observation.observers[1:] for key in observer.external}

    def _foreign_output(self, jobs: Sequence[CaptureJob], inputs: InputSet) -> str:
        """Describe an output in memory that the graph does not write: a copy would not be what eager returns."""
        manager, own = self.manager, inputs.storages
        outputs = manager.table.graphs[jobs[0].key].program.outputs
        foreign = (
            out for out in outputs if not manager.device.in_pool(manager.pool, out) and storage_key(out) not in own
        )
        found = next(foreign, None)
        if found is None:
            return ""
        return f"an output of shape {tuple(found.shape)} is memory of the module, or a view of it"


@dataclasses.dataclass(eq=False)
class _TapeEnd(Probe):
    """Lets go of a forward's outputs once the last backward is recorded: no recording may use their memory before."""

    recording: Recording

    def after_recording(self, recorded: RecordedRun) -> None:
        """Let go of them after the last backward."""
        if recorded.run.key == self.recording.last:
            self.recording.tape.outputs.clear()
