"""The steps from a call to its graph: observed eager runs, warmups, and captures of one size or of all sizes."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from simplegraph.base.config import CudaGraphMode
from simplegraph.base.context import bypassed
from simplegraph.base.errors import CaptureError, ReplayError
from simplegraph.base.nested import flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.batch.sizes import BatchDescriptor
from simplegraph.call.call import Binding, Call
from simplegraph.call.external_memory import MemoryInUse, held_generators
from simplegraph.call.inputs import InputSet, shared_rows
from simplegraph.call.plan import Plan
from simplegraph.call.signature import differences
from simplegraph.call.watched_run import invoke_watched
from simplegraph.device.saved_state import SavedMemory, copy_limit
from simplegraph.guard.functions import FunctionModule
from simplegraph.guard.guards import CapturedState
from simplegraph.guard.scripted import refused_script
from simplegraph.guard.survey import Survey, device_of_state
from simplegraph.manager.lifecycle import ModuleRecord, RowVerdict, SizeRecord, Stage
from simplegraph.manager.stats import CaptureSummary, where_failed
from simplegraph.manager.table import CaptureJob
from simplegraph.serve.call_capture import CallCapture
from simplegraph.serve.observed_runs import ObservedRuns, known_tensors

logger = logging.getLogger("simplegraph")

_MADE_UNSEEN = "the forward reads memory that no operator of its own thread made, such as what another thread computed"
_SEEN_REMEDY = "Compute it in the thread that calls the module, by torch's operators."


@dataclasses.dataclass(eq=False)
class GraphBuilder(ObservedRuns):
    """Builds the graphs of one module on one device.

    Attributes:
        plan_kind: the class of plans.
        module_record: the lifecycle of all calls of the module.
        inputs_of: the static inputs that each Program reads, by key.
    """

    plan_kind: ClassVar[type[Plan]] = Plan

    module_record: ModuleRecord = dataclasses.field(default_factory=ModuleRecord)
    inputs_of: dict[Hashable, InputSet] = dataclasses.field(default_factory=dict)

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
        """True if a padded call may have a graph of exactly its size, beside the default sizes.

        It has one if one was captured while batch dimensions were a guess, or if it must not be padded. No size is
        added to configured sizes, or with several ranks.
        """
        binding, config, table = call.binding, self.manager.config, self.manager.table
        is_described = call.dispatch.descriptor.num_reqs is not None
        if self.manager.ranks.size == 1 and not is_described and call.at_exact_size().key in table.graphs:
            return True
        if not (binding.draws or binding.padding_refusal) or not config.adds_sizes or self.manager.ranks.size > 1:
            return False
        listed = {descriptor for _, descriptor in self.manager.descriptors()}
        own = [key for key in binding.sizes if isinstance(key, tuple) and key[2] not in listed]
        return call.at_exact_size().key in binding.sizes or len(own) < config.max_signatures

    def missing_upfront(self, call: Call) -> str:
        """Describe the graph that should have been captured up front for a call."""
        unlike = "" if call.binding.called else self.difference_to_captured(call)
        remedy = f"; use {method}" if (method := self.manager.stats.capture_method) else ""
        return unlike or f"batch size {call.batch}{remedy}"

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
        return self.run_as_called(call, Reason.FIRST_CALL, unlike and f"compared with captured calls, {unlike}")

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
        stats = self.manager.stats
        memory = call.memory  # before the run, which may give an argument other memory
        # Constants that follow the batch size come from a warmup of the padded size: this run is none.
        key = (call.binding.signature, None) if call.padding else call.key
        arguments = call.host_arguments() if call.layout.hosted else None
        try:
            result, observer, trace = self.run_eagerly(
                call, call.args, call.kwargs, key, rows=call.batch, arguments=arguments
            )
        except Exception as error:
            stats.raised += not isinstance(error, CannotBind)
            raise
        stats.ran_eagerly(reason, detail, size=call.batch)
        # If an argument is on a GPU, the call's device is known.
        if not any(issubclass(type(leaf), Tensor) and leaf.is_cuda for leaf in call.leaves):
            module_device = device_of_state(call.module)
            self.ran_on = observer.gpu if module_device is None or module_device.type == "cpu" else None
        if arguments is not None:
            self.learn_hosts(call, arguments)
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
        repeated = binding.repeated_changes.get(
            padded
        )  # not `[padded]`, which adds an entry: a report may run in another thread
        advanced = repeated is not None and bool(repeated.advanced)  # the latest run advanced positions
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

    def _inputs(self, call: Call) -> InputSet:
        """Find or make the static inputs of a call's padded size."""
        sets, args = call.binding.inputs, call.layout.args
        inputs = self.inputs_of.get(call.key) or next(
            (input_set for input_set in sets if input_set.capacity >= call.padded), None
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
        if call.computes_gradients:  # the graph's pool needs as much memory as the eager steps used
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
            return CaptureSummary()
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
            summary = CallCapture(self, call, inputs, jobs, lazy=lazy, following=following).run()
            if len(summary.failed) < len(jobs) or not jobs:
                self._note_captured(call, inputs, jobs)
                # Not for training steps: see `keep_external`.
                if jobs and not jobs[0].trains and self.reads_unseen(call):
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

    def refuse(self, call: Call, cause: str, remedy: str) -> None:
        """Drop the graph of the call's size; the size runs eagerly from now on."""
        self.manager.table.refuse(self._jobs(call, self.inputs_of[call.key], [call.dispatch[:2]]), cause, remedy)

    def _note_captured(self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob]) -> None:
        """Note new Programs, and the state that they read."""
        for job in jobs:
            if (graph := self.manager.table.graphs.get(job.key)) is not None:
                self.inputs_of[job.key] = inputs
                if job.key in self.manager.table.traces:
                    call.binding.note_trace(job.padded, self.manager.table.traces[job.key])
                call.binding.learn_outputs(job.descriptor.num_tokens, *self.plan_kind.returned(graph.program))
        if self.state is None:
            self.state = CapturedState(call.module)
        self.state.add(self.seen.read, call.survey, names_gradients=call.plain.reads("grad"))

    def _jobs(
        self, call: Call, inputs: InputSet, todo: Sequence[tuple[CudaGraphMode, BatchDescriptor]]
    ) -> list[CaptureJob]:
        generators, described = held_generators(call), call.layout.described_inputs()
        emulated, scripts = self.manager.device.emulated, [*call.survey.scripted, *call.plain.scripts]
        refused = refused_script(call.survey.scripted, scripts, emulated=emulated) if scripts else None
        arguments = (
            inputs.host_arguments(call.layout.args, shows_python=call.shows_python) if call.layout.hosted else None
        )
        tensors = known_tensors(call, inputs.storages)
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
                trains=call.computes_gradients,
                values=call.layout.values,
            )
            for kind in todo
        ]

    def _forward(self, call: Call, inputs: InputSet, size: int) -> Callable[[], Any]:
        """Return a function that runs the forward on the static inputs of a size."""
        manager, module, repeated = self.manager, call.module, call.binding.repeated_changes[call.padded]
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
            watched = repeated.captured_run(module, state_key) if is_captured else repeated.eager_run(module)
            with bypassed(Reason.NESTED), torch.no_grad(), watched:
                limit = 0 if is_captured else copy_limit(manager.device.free_memory())
                result = invoke_watched(call, self.reader, args, kwargs, limit, recorded=is_captured)
            refuse()
            return module.with_effects(result) if is_captured and isinstance(module, FunctionModule) else result

        return run


@functools.cache
def _warn_of_emulation() -> None:
    """Warn once in a process."""
    logger.warning(
        "simplegraph: on the CPU graphs are emulated, which checks CUDA's rules and gives no speed. Move the module "
        "and its inputs to a GPU, or switch graphs off, by mode='NONE' or SIMPLEGRAPH_MODE=off."
    )
