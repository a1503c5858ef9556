"""The steps from a call to its graph: observed eager runs, warmups, and captures of one size or of all sizes."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.context import bypassed
from simplegraph.base.errors import CaptureError, ReplayError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import storage_key
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.call.call import Binding, Call, is_copied
from simplegraph.call.external_memory import MemoryInUse, Rehearsals, drawn_generators, held_generators, invoke_watched
from simplegraph.call.inputs import HostArg, InputSet, shared_rows
from simplegraph.call.plan import Plan
from simplegraph.call.signature import CallReader, differences
from simplegraph.device.protocol import CAPTURE_LOCK
from simplegraph.device.saved_state import SavedMemory, copy_limit, drew, random_states
from simplegraph.guard.carried import PlacesFoundError
from simplegraph.guard.functions import FunctionModule, computes_gradients
from simplegraph.guard.guards import CapturedState
from simplegraph.guard.python_effects import ModuleState
from simplegraph.guard.scripted import refused_script, settling_runs
from simplegraph.guard.survey import Survey, device_of_state
from simplegraph.manager.lifecycle import ModuleRecord, RowVerdict, SizeRecord, Stage
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.manager.observation import Observation, run_observed
from simplegraph.manager.stats import CaptureSummary, where_failed
from simplegraph.manager.table import CaptureJob
from simplegraph.program.breaks.break_calls import BreakTrace
from simplegraph.program.escapes import kept_by
from simplegraph.program.host_modes import HostArguments
from simplegraph.program.observe import MemoryObserver
from simplegraph.program.probes import Probe, Run
from simplegraph.program.steady_reads import KnownTensors

logger = logging.getLogger("simplegraph")

_COMPARE_REMEDY = (
    "Up to 1 GiB of inputs are compared before and after a run; pass less, or make that part an eager break."
)

_MADE_UNSEEN = "the forward reads memory that no operator of its own thread made, such as what another thread computed"
_SEEN_REMEDY = "Compute it in the thread that calls the module, by torch's operators."


@dataclasses.dataclass(eq=False)
class GraphBuilder:
    """Builds the graphs of one module on one device.

    Args:
        manager: holds the Programs.
        reader: reads calls, and learns from calls that succeeded.
        module_record: the lifecycle of all calls of the module.

    Attributes:
        plan_kind: the class of plans.
        inputs_of: the static inputs that each Program reads, by key.
        state: the module's state that the Programs read; None before the first capture.
        seen: memory that observed runs of the forward used beside the arguments.
        recorded: storage keys of external memory that the latest captures read.
        ran_on: the GPU of the kernels of the latest eager run, if neither an argument nor a weight is on a GPU; else
            None.
        probes: further probes for captures.
    """

    plan_kind: ClassVar[type[Plan]] = Plan

    manager: CudaGraphManager
    reader: CallReader
    module_record: ModuleRecord = dataclasses.field(default_factory=ModuleRecord)
    inputs_of: dict[Hashable, InputSet] = dataclasses.field(default_factory=dict)
    state: CapturedState | None = None
    seen: MemoryInUse = dataclasses.field(default_factory=MemoryInUse)
    recorded: set[int] = dataclasses.field(default_factory=set)
    ran_on: torch.device | None = None
    probes: Sequence[Probe] = ()

    def drop(self) -> None:
        """Drop the Programs and everything that they own."""
        self.inputs_of.clear()
        self.seen = MemoryInUse()
        self.state = None
        self.manager.reset()

    # The lifecycle of a call.

    def record(self, call: Call) -> SizeRecord:
        """Return the record of a call's size."""
        return call.binding.size(call.key)

    def admit(self, call: Call) -> tuple[Call, SizeRecord]:
        """Refuse a call that no graph can serve, and update the record of its size.

        Returns:
            The call, which may have its exact size now instead of a padded one; and the record of this size.

        Raises:
            CannotBind: no graph can serve the call.
        """
        config, binding = self.manager.config, call.binding
        if call.padding and self._has_own_size(call):
            call = call.at_exact_size()
        call.check()
        self.seen.check(call)
        again = call.padding > 0 and (call.spec, call.batch) in binding.ran
        if again and config.capture == "lazy" and not call.confirmed(self.reader):
            # Batch dimensions are still a guess at the second call of this batch size: a graph of this size needs none.
            call = call.at_exact_size()
        record = self.record(call)
        record.check()
        if record.stage is not Stage.CAPTURED:
            if config.capture == "upfront":
                raise CannotBind(Reason.NOT_CAPTURED_UPFRONT, self.missing_upfront(call))
            self.module_record.check_settled()
            record.count_warmups(self.warmups_left(binding, call.batch, *call.dispatch[:2]))
        return call, record

    def _has_own_size(self, call: Call) -> bool:
        """True if a call that must not be padded may have a graph of exactly its size, beside the default sizes.

        No size is added to configured sizes, or with several ranks.
        """
        binding, config = call.binding, self.manager.config
        if not (binding.draws or binding.padding_refusal) or not config.adds_sizes or self.manager.ranks.size > 1:
            return False
        listed = {descriptor for _, descriptor in self.manager.descriptors()}
        own = [key for key in binding.sizes if isinstance(key, tuple) and key[2] not in listed]
        return call.at_exact_size().key in binding.sizes or len(own) < config.max_signatures

    def missing_upfront(self, call: Call) -> str:
        """Describe the graph that should have been captured up front for a call."""
        unlike = "" if call.binding.called else self.difference_to_captured(call)
        method = self.manager.stats.capture_method
        return unlike or f"batch size {call.batch}{f': use {method}' * bool(method)}"

    def lacking(self, call: Call) -> Reason | None:
        """Return the reason why a call cannot be padded yet; None if it can."""
        binding = call.binding
        breaks = not call.breaks or binding.can_cut_breaks(call.padded)
        if not (binding.outputs.can_cut(call.padded) and breaks):
            return Reason.OUTPUT_SHAPE_UNKNOWN
        return None if call.confirmed(self.reader) else Reason.BATCH_DIM_UNCONFIRMED

    # Eager runs.

    def run_first(self, call: Call) -> Any:
        """Run the first call of a signature."""
        unlike = self.difference_to_captured(call)
        if call.padding and not call.confirmed(self.reader):
            call = call.at_exact_size()  # the next call of this size is exact, too, unless another size comes first
        return self.run_as_called(call, Reason.FIRST_CALL, unlike and f"unlike the captured calls: {unlike}")

    def warm_up(self, call: Call) -> Any:
        """Run a call that is a warmup of its size."""
        return self.run_as_called(call, Reason.WARMUP)

    def run_to_learn(self, call: Call, reason: Reason) -> Any:
        """Run eagerly to learn how outputs follow the batch size. Raises CannotBind if this batch size ran before."""
        if (call.spec, call.batch) in call.binding.ran:
            self.record(call).refuse_row_count(call.batch)
            raise CannotBind(reason, f"only batch size {call.batch} has been called")
        return self.run_as_called(call, reason)

    def run_as_called(self, call: Call, reason: Reason, detail: str = "") -> Any:
        """Run eagerly with the caller's own tensors, and learn from the run."""
        self.reader.num_observed += 1
        self.manager.stats.ran_eagerly(reason, detail, size=call.batch)
        memory = call.memory  # before the run, which may give an argument other memory
        # Constants that follow the batch size come from a warmup of the padded size: this run is none.
        key = (call.binding.signature, None) if call.padding else call.key
        arguments = call.host_arguments() if call.layout.hosted else None
        result, observer, trace = self._run_observed(
            call, call.args, call.kwargs, key, rows=call.batch, arguments=arguments
        )
        # If an argument is on a GPU, the call's device is known.
        if not any(issubclass(type(leaf), Tensor) and leaf.is_cuda for leaf in call.leaves):
            module_device = device_of_state(call.module)
            self.ran_on = observer.gpu if module_device is None or module_device.type == "cpu" else None
        if arguments is not None:
            self._learn_hosts(call, arguments)
        self.module_record.settle(call.layout.settings.difference())
        if trace is not None:
            call.binding.note_trace(call.batch, trace)
        # Writes of eager breaks are noted here: no capture runs breaks.
        call.binding.note_written(observer, memory)
        call.binding.host_error = observer.host_error
        self.keep_external(call, [observer], set(memory.values()))
        call.binding.learn_outputs(call.batch, *flatten(result))
        call.binding.learn_numbers(self.manager.table, observer.numbers)
        # A refused run may have changed the shapes of arguments. A call without batch dimensions shows none.
        if call.binding.refusal is None and call.layout.anchor >= 0:
            self.reader.learn(call.batch, call.leaves, call.spec)
        call.binding.note_eager_call(call.spec, call.batch, call.padded)
        return result

    def warmups_left(self, binding: Binding, rows: int, mode: CudaGraphMode, descriptor: BatchDescriptor) -> int:
        """Count the eager calls of `rows` rows that are needed before the graph's capture."""
        padded, table = descriptor.num_tokens, self.manager.table
        breaks = mode is CudaGraphMode.PIECEWISE
        untraced = breaks and rows not in binding.traces and binding.trace_at(padded) is None
        unknown = rows == padded and table.constants.needs_warmup((binding.signature, mode, descriptor))
        counted = binding.counted.get(padded)  # not `[padded]`, which adds an entry: a report may run in another thread
        advanced = counted is not None and bool(counted.advanced)  # the latest run advanced positions
        return max(table.config.num_warmups - binding.warm[padded], int(untraced or unknown or advanced))

    def eager_calls_ahead(self, binding: Binding, rows: int) -> list[str]:
        """List the eager calls ("warmup", "proof") before calls of `rows` rows replay; empty if they never will."""
        table = self.manager.table
        if binding.refusal is not None or any(rows in layout.plans for layout in list(binding.layouts.values())):
            return []
        mode, descriptor, _, padding = self.manager.dispatcher.dispatch(rows)
        if padding and binding.warm[rows] and not binding.outputs.is_learnt:  # while batch dimensions are a guess
            descriptor, padding = dataclasses.replace(descriptor, num_tokens=rows), 0
        key = (binding.signature, mode, descriptor)
        graph, record = table.graphs.get(key), binding.sizes.get(key)
        refused = record is not None and (record.refusal or record.rows.get(rows) is RowVerdict.REFUSED)
        if mode is CudaGraphMode.NONE or refused:
            return []
        if padding and (binding.padding_refusal or binding.draws):
            return []
        if graph is None:
            if table.config.capture == "upfront":
                return []
            warmups = self.warmups_left(binding, rows, mode, descriptor)
            return ["warmup"] * warmups + ["proof"] * bool(table.config.verify)
        return ["proof"] * (graph.verdict(rows) is RowVerdict.DUE)

    def _run_observed(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        key: Hashable | None = None,
        *,
        rows: int,
        arguments: HostArguments | None = None,
        before_write: Callable[[Tensor], object] = id,
    ) -> tuple[Any, MemoryObserver, BreakTrace | None]:
        """Run eagerly with these arguments, and observe the run; trace breaks, and keep constants for `key`."""
        counted = call.binding.counted[call.padded].eager_run(call.module)
        limit = copy_limit(self.manager.device.free_memory())
        generators = drawn_generators(call, self.manager.device.torch_device)
        before = random_states(generators)
        passed, _ = flatten((args, kwargs))
        copied = {storage_key(leaf) for leaf, arg in zip(passed, call.layout.args, strict=True) if is_copied(arg)}
        # The run is on the caller's stream, since work of the forward in other threads waits for no other stream. A
        # forward that runs a backward is on the capture stream: nodes that accumulate gradients may live until the
        # capture, and keep the stream of their first use.
        trains = computes_gradients(call.module)
        stream: contextlib.AbstractContextManager[object]
        stream = self.manager.device.on_capture_stream() if trains else CAPTURE_LOCK
        with stream, bypassed(Reason.NESTED), counted:
            result, observer, trace = run_observed(
                self.manager.table,
                lambda: invoke_watched(call, self.reader, args, kwargs, limit),
                key,
                traced=call.breaks,
                rows=rows,
                inputs=copied,
                arguments=arguments,
                before_write=before_write,
                tensors=_known_tensors(call, copied),
            )
        call.binding.draws |= observer.may_draw and drew(generators, before)
        for leaf in flatten(result)[0] if trains else ():
            if issubclass(type(leaf), Tensor) and leaf.is_cuda and leaf.layout is torch.strided:
                for part in leaf.unbind()[:1] if leaf.is_nested else [leaf]:  # all parts share one memory
                    part.record_stream(torch.cuda.current_stream(leaf.device))
        return result, observer, trace

    def _learn_hosts(self, call: Call, arguments: HostArguments) -> bool:
        """Learn how a run used CPU tensors that it was passed; True if such calls are read differently from now on."""
        call.binding.waited |= arguments.waited
        return self.reader.learn_hosts(arguments)

    def keep_external(self, call: Call, observers: Sequence[MemoryObserver], inputs: set[int]) -> None:
        """Keep alive the memory that observed runs read, except inputs and tensors of the module; note their writes."""
        call.binding.differentiates |= any(observer.differentiates for observer in observers)
        call.binding.only_computes &= not any(
            observer.may_fault or observer.written or observer.launched or observer.unseen for observer in observers
        )
        if call.carried.places:
            call.carried.note_read({key for observer in observers for key in observer.external} - inputs)
        unread = call.module.note_read(observers) if isinstance(call.module, FunctionModule) else set()
        # Reference counts do not show who holds gradients and learning rates of a training step.
        device = None if computes_gradients(call.module) else self.manager.device.torch_device
        self.seen.add(call.survey, observers, inputs | unread, device)
        if self.state is not None:
            self.state.accept(call.survey)

    def _inputs(self, call: Call) -> InputSet:
        """Find or make the static inputs of a call's padded size."""
        sets, args = call.binding.inputs, call.layout.args
        inputs = self.inputs_of.get(call.key) or next(
            (input_set for input_set in sets if input_set.rows >= call.padded), None
        )
        if inputs is None:
            largest = max((d.num_tokens for _, d in self.manager.descriptors()), default=call.padded)
            inputs = InputSet(args, shared_rows(args, largest, call.padded), call.leaves)
            sets.append(inputs)
        return inputs

    # Graphs and plans.

    def difference_to_captured(self, call: Call) -> str:
        """Describe how a call differs from the most similar signature with graphs; empty if no signature has graphs."""
        called = call.binding.signature
        others = {key[0]: None for key in self.inputs_of if isinstance(key, tuple)}
        if called in others or not others:
            return ""
        return "; ".join(sorted((differences(signature, called) for signature in others), key=len)[0])

    def plan(self, call: Call) -> Plan:
        """Make the plan that replays such calls; it is kept if no proof is due."""
        if self.state is None:
            raise ReplayError("a program exists without the state it reads; call reset_graphs().")
        table = self.manager.table
        plan = self.plan_kind(
            call, table, table.graphs[call.key], self.inputs_of[call.key], self.state, self.seen.guards(call)
        )
        if not plan.unproven:
            call.layout.plans[call.plan_key] = plan
        return plan

    # Captures.

    def capture(self, call: Call) -> None:
        """Capture the call's size."""
        if computes_gradients(call.module):  # the graph's pool needs as much memory as the eager steps used
            self.manager.device.release_cached_memory()
        inputs = self._inputs(call)
        trace = call.binding.trace_at(call.padded) if call.breaks else None
        if trace is not None:
            self.manager.table.add_trace(call.key, trace)
        jobs = self._jobs(call, inputs, [call.dispatch[:2]])
        failed = self.build(call, inputs, jobs, lazy=True).failed
        if failed and call.binding.refusal is None:
            if self.manager.config.on_capture_failure == "raise":
                self.record(call).retry()
            self.manager.table.raise_failure(failed)
            raise CannotBind(Reason.CAPTURE_FAILED, where_failed(next(iter(failed.values()))))
        call.check()  # the capture may have refused the signature

    def capture_sizes(self, call: Call, *, following: bool = False) -> CaptureSummary:
        """Capture all sizes without a graph, from an example call of the largest size.

        Args:
            call: the example call.
            following: True to capture only the largest of these sizes that did not fail before, while serving; with a
                warmup if no run was observed yet.
        """
        binding, inputs, table = call.binding, self._inputs(call), self.manager.table
        done = table.graphs.keys() | (table.failures.keys() if following else ())
        jobs = [job for job in self._jobs(call, inputs, self.manager.descriptors()) if job.key not in done]
        if following and not jobs:
            return CaptureSummary(0, {}, 0.0, 0)
        summary = self.build(call, inputs, jobs[: 1 if following else None], lazy=False, following=following)
        binding.note_eager_run()
        self.reader.learn(call.batch, call.leaves, call.spec)
        table.raise_failure(summary.failed)
        return summary

    def build(
        self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob], *, lazy: bool, following: bool = False
    ) -> CaptureSummary:
        """Capture jobs, and note the memory that the Programs read; after an error, drop the Programs.

        The static inputs are loaded first, since Python code may read their values. If the caller wrote the call's
        inputs there in place, they are restored: the call's own eager run reads them.
        """
        self.reader.num_observed += 1
        memory = SavedMemory(
            (), (), [entry for entry in call.tensors if inputs.buffer_spans.contains(entry[1].data_ptr())]
        )
        copies = memory.copy()
        try:
            inputs.load(call.tensors, call.padded)
            summary = self._capture(call, inputs, jobs, lazy=lazy, following=following)
            if len(summary.failed) < len(jobs) or not jobs:
                self._note_captured(call, inputs, jobs)
                # Not for training steps: see `keep_external`.
                if jobs and not jobs[0].trains and self._reads_unseen(call):
                    failed = self.manager.table.refuse(jobs, _MADE_UNSEEN, _SEEN_REMEDY)
                    summary = dataclasses.replace(summary, captured=0, failed=failed)
                if self.manager.device.emulated:
                    _warn_of_emulation()
        except BaseException:
            self.manager.table.forget(jobs)
            raise
        finally:
            memory.put(copies)
        return summary

    def _capture(
        self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob], *, lazy: bool, following: bool
    ) -> CaptureSummary:
        """Capture jobs, and undo all changes of Python state and the effects of all runs except the warmups.

        A size runs eagerly if its recording leaves tensors of the graph in Python objects, where they are undefined.
        All sizes run eagerly if the forward changes Python state at every run.
        """
        manager, counted = self.manager, call.binding.counted[call.padded]
        observation = Observation(manager.table)
        # Earlier calls may have run with fewer rows, or have taken other branches, as probes of extras note.
        own_size = not call.padding and (call.spec, call.batch) in call.binding.ran
        retry = not lazy or not own_size or bool(manager.table.constants.probe_counts)
        passes_carried = call.carried.enabled and not call.breaks and manager.ranks.size == 1
        state = ModuleState(
            call.module,
            manager.device,
            manager.pool,
            counted,
            inputs.storages,
            retry=retry,
            passes_carried=passes_carried,
        )
        rehearsals = Rehearsals(self.seen, manager.table, call, observation.observers)
        watched = following and not manager.ranks.any("that no run was watched", not counted.watched)
        num_warmups = manager.config.num_warmups
        rehearsed = 0 if lazy or num_warmups < 2 else num_warmups
        scripts = call.survey.scripted or call.plain.scripts
        if jobs and scripts and not jobs[0].trains:  # a training step's own calls were warmups of its size
            rehearsed = max(rehearsed, settling_runs())

        last_checks = _LastChecks(self, call, inputs, jobs, rehearsals, observation, state, lazy=lazy)
        probes = [rehearsals, observation, state, last_checks, *self.probes]
        capture = manager.new_capture(jobs, lazy=lazy or following, retry=retry, probes=probes)
        # At the end, Python state is restored, and then the memory that the runs used is noted, even after an error.
        # Under the lock, since no other thread may draw random numbers before that.
        with CAPTURE_LOCK, contextlib.ExitStack() as afterwards:
            afterwards.callback(self.note_seen, call, inputs, observation)
            try:
                summary = capture.run(0 if lazy or watched else 1, rehearsed)
                _check_settings(call)
            except PlacesFoundError as error:
                raise self._pass_carried(call, error, observation) from None
            finally:
                # Another thread may have set a number while the forward was recorded, before or after it was read.
                others = call.plain.set_by_others(call.module)
                kept = state.put_back()
                for attributes, name, value in others:
                    attributes[name] = value
        for _, name, _ in others:
            raise CannotBind(Reason.WARMUP, f"{name}, which other code set during the capture")
        summary = capture.inspect(summary)
        if jobs and jobs[0].arguments is not None:  # all jobs share one `HostArguments`
            self._learn_hosts(call, jobs[0].arguments)
        self._note_made(call, jobs, observation)
        changed = (counted.names or []) if len(summary.failed) < len(jobs) else []
        try:
            why = _why_refused(call, state, observation, kept, changed)
        except PlacesFoundError as error:
            raise self._pass_carried(call, error, observation) from None
        if why is None:
            return summary
        return dataclasses.replace(summary, captured=0, failed=manager.table.refuse(jobs, *why))

    def _pass_carried(self, call: Call, error: PlacesFoundError, observation: Observation) -> CannotBind:
        """Pass the places that a capture found as inputs of later calls; return the refusal of this call."""
        call.carried.adopt(error.places, {key for observer in observation.observers for key in observer.external})
        return CannotBind(Reason.WARMUP, str(error))

    def check_devices(self, call: Call, arguments: HostArguments | None, observers: Sequence[MemoryObserver]) -> None:
        """Refuse captures of a call if a warmup showed that its devices were assumed wrongly.

        Raises:
            CannotBind: its kernels run on a GPU, but its inputs and graphs are on the CPU. Or it uses a small CPU
                tensor on the CPU that was assumed to be moved to the GPU, or the other way round.
        """
        for observer in observers:
            if observer.gpu is not None and self.manager.device.torch_device.type == "cpu":
                self.ran_on = observer.gpu
                raise CannotBind(Reason.WRONG_DEVICE, f"inputs are on the CPU, and kernels run on {observer.gpu}")
        if arguments is not None and self._learn_hosts(call, arguments):
            names = ", ".join(sorted({*arguments.moved, *arguments.read}))
            raise CannotBind(Reason.WRONG_DEVICE, f"{names} on the CPU")

    def _note_made(self, call: Call, jobs: Sequence[CaptureJob], observation: Observation) -> None:
        """Note the outputs whose memory observed runs made: they must be cloned."""
        table = self.manager.table
        programs = [table.graphs[job.key].program for job in jobs if job.key in table.graphs]
        outputs = (
            (at, leaf)
            for program in programs
            for at, leaf in enumerate(program.outputs)
            if issubclass(type(leaf), Tensor)
        )
        call.binding.made |= {
            at for at, leaf in outputs if any(observer.made(leaf) for observer in observation.observers)
        }

    def note_seen(self, call: Call, inputs: InputSet, observation: Observation, buffers: Iterable[Tensor] = ()) -> None:
        """Note the memory that observed runs read and wrote, except `buffers` of the call."""
        for observer in observation.observers:
            call.binding.note_written(observer, inputs.memory)
            call.binding.learn_numbers(self.manager.table, observer.numbers)
        host_copies = (arg.leaf for arg in call.layout.args if isinstance(arg, HostArg))
        storages = inputs.storages.union(map(storage_key, (*buffers, *host_copies)))
        self.keep_external(call, observation.observers, storages)
        self.recorded = {key for observer in observation.observers if observer.captures for key in observer.external}
        self.seen.read.values |= {
            place: tensor for place, tensor in observation.reads.items() if place[0] not in storages
        }
        self.seen.read.versions += observation.versions

    def _reads_unseen(self, call: Call) -> bool:
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

    def refuse(self, call: Call, cause: str, remedy: str) -> None:
        """Drop the graph of the call's size; the size runs eagerly from now on."""
        self.manager.table.refuse(self._jobs(call, self.inputs_of[call.key], [call.dispatch[:2]]), cause, remedy)

    def _note_captured(self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob]) -> None:
        """Note new Programs, and the state that they read."""
        for job in jobs:
            if (graph := self.manager.table.graphs.get(job.key)) is not None:
                self.inputs_of[job.key] = inputs
                if job.key in self.manager.table.traces:
                    call.binding.note_trace(job.rows, self.manager.table.traces[job.key])
                call.binding.learn_outputs(job.descriptor.num_tokens, *self.plan_kind.returned(graph.program))
        if self.state is None:
            self.state = CapturedState(call.module)
        self.state.take(self.seen.read, call.survey, names_gradients=call.plain.reads("grad"))

    def observe_second_size(
        self, call: Call, inputs: InputSet, rehearsals: Rehearsals, state: ModuleState, jobs: Sequence[CaptureJob]
    ) -> None:
        """Run a second batch size eagerly and undo its effects, unless batch dimensions and outputs are known.

        Afterwards outputs can be cut to their rows, and batch dimensions are confirmed.
        """
        binding, confirmed = call.binding, call.confirmed(self.reader)
        sliced = binding.outputs.is_learnt or len({kind.num_tokens for _, kind in self.manager.descriptors()}) > 1
        for job in jobs if call.breaks else ():
            if (seen := self.manager.table.traces.get(job.key)) is not None:
                binding.note_trace(job.rows, seen)
        sliced = sliced and (not call.breaks or binding.break_rows is not None)
        if (sliced and confirmed) or binding.padding_refusal or binding.refusal or call.padded == 1:
            return
        other = next(rows for rows in (call.padded // 2, call.padded // 2 + 1) if rows != call.batch)
        leaves = inputs.passed(call.layout.args, lambda static: static.copied_part(call.padded, other, reference=True))
        args, kwargs = call.spec.unflatten(leaves)
        run = Run(rows=other, rehearsed=True)
        with rehearsals.around(run):
            try:
                result, observer, trace = self._run_observed(
                    call, args, kwargs, rows=other, before_write=run.before_write
                )
            except Exception as error:  # the forward refuses such a batch: sizes without a graph run eagerly
                logger.debug("%s cannot run %d rows: %s", self.manager.stats.name, other, error)
                return
        state.release([observer])
        binding.learn_outputs(other, *flatten(result))
        binding.learn_numbers(self.manager.table, observer.numbers)
        self.reader.learn(other, leaves, call.spec)
        if trace is not None:
            binding.note_trace(other, trace)

    def _jobs(
        self, call: Call, inputs: InputSet, todo: Sequence[tuple[CudaGraphMode, BatchDescriptor]]
    ) -> list[CaptureJob]:
        generators, described = held_generators(call), call.layout.described_inputs()
        emulated, scripts = self.manager.device.emulated, [*call.survey.scripted, *call.plain.scripts]
        refused = refused_script(call.survey.scripted, scripts, emulated=emulated) if scripts else None
        arguments = (
            inputs.host_arguments(call.layout.args, shows_python=call.shows_python) if call.layout.hosted else None
        )
        trains = computes_gradients(call.module)
        tensors = _known_tensors(call, inputs.storages)
        return [
            CaptureJob(
                (call.binding.signature, *kind),
                *kind,
                self._forward(call, inputs, kind[1].num_tokens),
                generators,
                described,
                lambda tensor: Survey(call.module).name_of(tensor),
                tensors=tensors,
                exact=self.manager.config.exact_shapes,
                host_error=call.binding.host_error or refused,
                arguments=arguments,
                record=call.binding.size((call.binding.signature, *kind)),
                trains=trains,
            )
            for kind in todo
        ]

    def _forward(self, call: Call, inputs: InputSet, size: int) -> Callable[[], Any]:
        """Return a function that runs the forward on the static inputs of a size."""
        manager, module, counted = self.manager, call.module, call.binding.counted[call.padded]
        state_key = manager.config.state_key

        def refuse() -> None:
            refusal = call.binding.refusal
            if refusal is not None and refusal.reason in (Reason.CHANGED_ARGUMENTS, Reason.PYTHON_STATE):
                cause = f"{refusal.reason.text} ({refusal.detail})"
                raise CaptureError(f"capturing batch size {size} failed\n  {cause}.", cause=cause)

        leaves = inputs.leaves(call.layout.args, size)  # views made in the capture would count as reads of all inputs

        def run() -> Any:
            refuse()  # an earlier run may have changed the shapes of static inputs
            args, kwargs = call.spec.unflatten(leaves)  # new containers: an earlier run may have changed its containers
            is_captured = manager.device.is_capturing()
            if inputs.hosted and not is_captured:
                inputs.load_hosts(size)
            watched = counted.captured_run(module, state_key) if is_captured else counted.eager_run(module)
            with bypassed(Reason.NESTED), torch.no_grad(), watched:
                limit = 0 if is_captured else copy_limit(manager.device.free_memory())
                result = invoke_watched(call, self.reader, args, kwargs, limit, recorded=is_captured)
            refuse()
            return module.with_effects(result) if is_captured and isinstance(module, FunctionModule) else result

        return run


def _why_refused(
    call: Call, state: ModuleState, observation: Observation, kept: Sequence[str], changed: Sequence[str]
) -> tuple[str, str] | None:
    """Return (cause, remedy) if no graph of a capture may serve; None if the graphs may.

    Args:
        call: the call that was captured.
        state: the probe of Python state.
        observation: the probe of operators.
        kept: names of the places that would keep tensors of the graphs.
        changed: names of the places that the forward changes at every run.

    Raises:
        PlacesFoundError: calls can pass the tensors that the forward leaves in these places.
    """
    if refused := kept or changed:
        state.check_carried(refused)
    if kept:
        return kept_by(kept), state.remedy(kept)
    if any(observer.unseen for observer in observation.observers) and (unknown := call.never_compared()):
        return f"kernels that torch does not dispatch may write to {', '.join(unknown)}", _COMPARE_REMEDY
    return call.binding.counted[call.padded].refusal(call.module) if changed else None


@dataclasses.dataclass(eq=False)
class _LastChecks(Probe):
    """Checks a call once more before its captures, after all runs whose effects stay, and runs a second batch size."""

    builder: GraphBuilder
    call: Call
    inputs: InputSet
    jobs: Sequence[CaptureJob]
    rehearsals: Rehearsals
    observation: Observation
    state: ModuleState
    lazy: bool

    def before_captures(self, *, again: bool = False) -> None:
        """Check the call, except before a second try. Raises CannotBind."""
        call, observers = self.call, self.observation.observers
        if again:
            return
        if call.binding.refusal is None:  # a refused run may have changed the shapes of static inputs
            # Shift the rows: the proof then shows a value that the capture computed once and froze.
            self.inputs.load(call.tensors, call.padded, first=1)
        if self.lazy:
            return
        _check_settings(call)
        if not any(observer.captures for observer in observers):  # in the first pass
            call.plain.check(call.module)
        if torch.cuda.is_initialized() or call.layout.hosted:  # type: ignore[no-untyped-call]
            self.builder.check_devices(call, self.jobs[0].arguments, observers)
        self.builder.observe_second_size(call, self.inputs, self.rehearsals, self.state, self.jobs)


def _known_tensors(call: Call, inputs: Collection[int]) -> KnownTensors:
    """Return the tensors whose values may be constants in a graph; `inputs` has the storage keys of data."""
    if computes_gradients(call.module):  # a training step writes parameters: no value is a constant
        return KnownTensors(lambda tensor: (), inputs)
    survey = functools.cache(lambda: Survey(call.module))
    return KnownTensors(lambda tensor: survey().tensors_at(tensor), inputs)


@functools.cache
def _warn_of_emulation() -> None:
    """Warn once in a process."""
    logger.warning(
        "simplegraph: on the CPU graphs are emulated, which checks CUDA's rules and gives no speed. Move the module "
        "and its inputs to a GPU, or switch graphs off, by mode='NONE' or SIMPLEGRAPH_MODE=off."
    )


def _check_settings(call: Call) -> None:
    """Refuse captures if settings of torch changed since the call was read: no later call could use the graphs.

    Raises:
        CannotBind: the forward, or torch itself, changed a setting.
    """
    changed = call.layout.settings.difference()
    if changed:
        raise CannotBind(Reason.PYTHON_STATE, f"settings of torch: {changed}")
