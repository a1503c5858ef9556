"""The way from a call to its graph: eager runs that teach, warmups, captures one at a time or all at once."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.config import CudaGraphMode
from simplegraph.context import CALLS, bypassed, described_batch
from simplegraph.errors import CaptureSizeError, ReplayError
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.tensors import storage_key
from simplegraph.manager.capture import run_observed
from simplegraph.manager.jobs import CaptureJob, CaptureSummary, Key
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.module.call import Call, CallLayout, invoke
from simplegraph.module.compare import EagerComparison
from simplegraph.module.inputs import InputSet
from simplegraph.module.plan import Plan
from simplegraph.module.signature import CallReader, ConstantArg
from simplegraph.module.snapshot import Snapshot, holds_graph_memory
from simplegraph.module.state import CapturedState
from simplegraph.nested import TreeSpec, flatten
from simplegraph.reasons import CannotBind, Reason

logger = logging.getLogger("simplegraph")


@dataclasses.dataclass(eq=False)
class GraphBuilder:
    """Builds the graphs of one module on one device.

    Args:
        manager: keeps the programs.
        reader: learns from calls that went well.

    Attributes:
        inputs_of: the static inputs that each program reads, by key.
        state: what the programs read of the module; None before the first capture.
    """

    manager: CudaGraphManager
    reader: CallReader
    inputs_of: dict[Hashable, InputSet] = dataclasses.field(default_factory=dict)
    state: CapturedState | None = None
    _external: dict[int, Tensor] = dataclasses.field(default_factory=dict)

    def drop(self) -> None:
        """Drop the programs and what they own."""
        self.inputs_of.clear()
        self._external.clear()
        self.state = None
        self.manager.reset()

    # Eager runs.

    def run_as_called(self, call: Call, reason: Reason) -> Any:
        """Run eagerly on the capture stream, with the caller's own tensors, and learn what calls look like."""
        self.manager.stats.ran_eagerly(reason)
        exact = call.batch == call.padded
        traced = _traced_key(call) if exact else None
        outputs, spec, observer = self._run_on_capture_stream(call.module, call.args, call.kwargs, traced)
        memory = call.memory
        # What eager breaks write, no capture sees: they do not run in one.
        call.binding.note_written(observer, memory)
        self._keep_external(observer, set(memory.values()))
        call.binding.learn_outputs(call.batch, outputs, spec)
        self.reader.learn(call.batch, call.leaves, call.spec)
        call.binding.called = True
        call.binding.warm[call.padded] += exact
        return spec.unflatten(outputs)

    def run_padded(self, call: Call) -> Any:
        """Run eagerly on the padded static inputs, as will be captured; the caller gets its rows."""
        self.manager.stats.ran_eagerly(Reason.WARMUP)
        device, comparison = self.manager.device.torch_device, None
        if self.manager.config.verify:  # what eager gives for the call as it is; padding is compared with that
            comparison = EagerComparison(f"the padded warmup of batch size {call.padded}", device)
            comparison.run_eager(call.module, call.args, call.kwargs)
        inputs, binding = self._inputs(call), call.binding
        inputs.load(call.tensors, call.batch, call.padded)
        args, kwargs = call.spec.unflatten(inputs.leaves(call.layout.args, call.padded))
        outputs, spec, observer = self._run_on_capture_stream(call.module, args, kwargs, _traced_key(call))
        own = inputs.storages
        self._keep_external(observer, own)
        binding.note_written(observer, inputs.memory)
        binding.learn_outputs(call.padded, outputs, spec)
        binding.warm[call.padded] += 1
        if binding.unsliceable is not None and call.padded != call.batch:
            raise binding.unsliceable  # found out too late: this one call runs twice
        outputs = [
            leaf.clone() if isinstance(leaf, Tensor) and storage_key(leaf) in own else leaf
            for leaf in binding.outputs.cut(outputs, call.batch, call.padded)
        ]
        if comparison is not None:
            comparison.compare(outputs)
        for name, leaf in call.tensors:
            if name in binding.written:
                leaf.copy_(inputs.inputs[name].part(call.padded, 0, call.batch))
        return spec.unflatten(outputs)

    def needs_warmup(self, call: Call) -> bool:
        """True if the call's size must run eagerly once more before its capture."""
        untraced = _traced_key(call) is not None and not self.manager.table.has_own_trace(call.key)
        return untraced or call.binding.warm[call.padded] < self.manager.config.num_warmups

    def _run_on_capture_stream(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], traced: Key | None = None
    ) -> tuple[list[Any], TreeSpec, MemoryObserver]:
        """Run eagerly, observed; a warmup of the piecewise graph `traced` also learns what breaks return."""
        with self.manager.device.on_capture_stream(), bypassed(Reason.NESTED):
            result, observer = run_observed(self.manager.table, lambda: invoke(module, args, kwargs), traced)
        outputs, spec = flatten(result)
        for leaf in outputs:
            if isinstance(leaf, Tensor) and leaf.is_cuda and leaf.layout is torch.strided:
                leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return outputs, spec, observer

    def _keep_external(self, observer: MemoryObserver, inputs: set[int]) -> None:
        """Own what a run was seen to read, beside its inputs."""
        for key, tensor in (*observer.external.items(), *observer.passed.items()):
            known = self._external.get(key)
            moved = known is not None and storage_key(known) != key  # then its key means another's memory
            if key not in inputs and (known is None or moved):
                self._external[key] = tensor

    def _inputs(self, call: Call) -> InputSet:
        known = self.inputs_of.get(call.key)
        largest = max((d.num_tokens for _, d in self.manager.descriptors()), default=call.padded)
        return known or call.binding.inputs_for(call.padded, largest, call.layout.args, call.leaves)

    # What graphs there are.

    def plan(self, call: Call) -> Plan:
        """Make the plan by which such calls are replayed from now on."""
        if self.state is None:
            raise ReplayError("a program exists without the state it reads; call reset_graphs().")
        table = self.manager.table
        plan = Plan(call, table, table.graphs[call.key], self.inputs_of[call.key], self.state)
        call.layout.plans[call.batch if CALLS.context is None else (call.batch, described_batch())] = plan
        return plan

    def static_inputs(self, layout: CallLayout, size: int | None) -> dict[str, Tensor]:
        """View a size's static inputs, the largest size's if None."""
        if size is None:
            size = self.manager.descriptors()[0][1].num_tokens
        found = self.manager.dispatch(size, *described_batch())
        inputs = self.inputs_of.get((layout.binding.signature, found.mode, found.descriptor))
        if inputs is None:
            raise CaptureSizeError(f"no graph was captured that holds batch size {size}: {found.reason.text}.")
        inputs.handed_out = True
        return {name: static.part(found.descriptor.num_tokens, 0, size) for name, static in inputs.inputs.items()}

    # Captures.

    def capture(self, call: Call) -> None:
        """Capture the call's size; the static inputs are loaded first, since Python may look at shapes of them."""
        inputs = self._inputs(call)
        inputs.load(call.tensors, call.batch, call.padded)
        jobs = self._jobs(call, inputs, [(call.dispatch.mode, call.dispatch.descriptor)])
        failed = self._capture(call, inputs, jobs, lazy=True).failed
        if failed:
            if self.manager.config.on_capture_failure == "raise":
                del self.manager.failures[call.key]  # the next call tries again
            self.manager.table.raise_failure(failed)
            raise CannotBind(Reason.CAPTURE_FAILED, str(next(iter(failed.values()))).splitlines()[0])
        self._note_captured(call, inputs, jobs)
        if call.binding.unsupported is not None:
            raise call.binding.unsupported

    def capture_sizes(self, call: Call) -> CaptureSummary:
        """Capture every size that is not captured yet, from a call that is an example of the largest."""
        binding, inputs, table = call.binding, self._inputs(call), self.manager.table
        inputs.tile(call.tensors, call.batch, call.padded)
        jobs = self._jobs(call, inputs, self.manager.descriptors())
        jobs = [job for job in jobs if job.key not in table.graphs]
        summary = self._capture(call, inputs, jobs, lazy=False)
        self._note_captured(call, inputs, jobs)
        binding.called = True
        self._learn_second_size(call, inputs)
        self.reader.learn(call.batch, call.leaves, call.spec)
        table.raise_failure(summary.failed)
        return summary

    def _jobs(
        self, call: Call, inputs: InputSet, todo: Sequence[tuple[CudaGraphMode, BatchDescriptor]]
    ) -> list[CaptureJob]:
        generators = _generators(call)
        return [
            CaptureJob((call.binding.signature, *kind), *kind, _forward(call, inputs, kind[1]), generators)
            for kind in todo
        ]

    def _capture(self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob], *, lazy: bool) -> CaptureSummary:
        """Capture; and where the module keeps tensors made during a capture, once more after warming every size.

        A cache filled by size is filled by the warmup then. What is kept even so would be graph memory in
        an attribute, with no meaning outside a replay: those sizes run eagerly.
        """
        warmups = 0 if lazy else self.manager.config.num_warmups
        summary, kept = self._capture_once(call, inputs, jobs, warmups, lazy=lazy)
        if kept and not lazy:
            with self.manager.device.on_capture_stream():
                for job in jobs:
                    job.run()
            summary, kept = self._capture_once(call, inputs, jobs, 0, lazy=lazy)
        if not kept:
            return summary
        cause = f"{', '.join(kept)} would keep a tensor that exists only inside the graph"
        failed = self.manager.table.refuse(jobs, cause, "Return it instead, or copy it into a buffer of the module.")
        return dataclasses.replace(summary, captured=0, failed=failed)

    def _capture_once(
        self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob], num_warmups: int, *, lazy: bool
    ) -> tuple[CaptureSummary, list[str]]:
        """Capture, and put back what Python changed about the module meanwhile, whatever happens.

        Returns:
            What was captured, and the names of what was made to hold graph memory; if there are any, no graph is left.
        """
        manager = self.manager
        capture = manager.new_capture(jobs, lazy=lazy)
        taken: list[Snapshot] = []  # after the warmups: what real runs change stays
        try:
            summary = capture.run(num_warmups, lambda: taken.append(Snapshot(call.module)))
        except BaseException:
            manager.table.forget(jobs)  # what they read was not noted, so they must not be replayed
            raise
        finally:
            changes = [change for before in taken for change in before.changes()]
            kept = [name for name, value in changes if holds_graph_memory(value, manager.device, manager.pool)]
            for before in taken:
                before.put_back()
            for observer in capture.observers:
                call.binding.note_written(observer, inputs.memory)
                self._keep_external(observer, inputs.storages)
        if kept:
            manager.table.forget(jobs)
        return summary, kept

    def _note_captured(self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob]) -> None:
        """Take note of new programs, and of everything they read."""
        for job in jobs:
            graph = self.manager.table.graphs.get(job.key)
            if graph is not None:
                self.inputs_of[job.key] = inputs
                call.binding.learn_outputs(job.descriptor.num_tokens, graph.program.outputs, graph.program.spec)
        self.state = CapturedState(call.module, self._external)

    def _learn_second_size(self, call: Call, inputs: InputSet) -> None:
        """Run another size eagerly if only one is captured: outputs can then be cut to their rows."""
        binding = call.binding
        if binding.outputs.known or binding.unsliceable or binding.unsupported or call.padded == 1:
            return
        other = call.padded // 2
        leaves = [
            arg.leaf if isinstance(arg, ConstantArg) else inputs.inputs[arg.name].part(call.padded, 0, other).clone()
            for arg in call.layout.args
        ]
        args, kwargs = call.spec.unflatten(leaves)
        try:
            outputs, spec, _ = self._run_on_capture_stream(call.module, args, kwargs)
        except Exception as error:  # the forward takes no such batch: smaller ones than captured run eagerly, then
            logger.debug("%s cannot run %d rows: %s", self.manager.stats.name, other, error)
        else:
            binding.learn_outputs(other, outputs, spec)


def _traced_key(call: Call) -> Key | None:
    """Return the key by which a warmup of this call keeps what breaks return; None if its graph has no breaks."""
    return call.key if call.dispatch.mode is CudaGraphMode.PIECEWISE else None


def _forward(call: Call, inputs: InputSet, descriptor: BatchDescriptor) -> Callable[[], Any]:
    """Make the forward on the static inputs of a size."""
    args, kwargs = call.spec.unflatten(inputs.leaves(call.layout.args, descriptor.num_tokens))

    def run() -> Any:
        with bypassed(Reason.NESTED), torch.no_grad():
            return invoke(call.module, args, kwargs)

    return run


def _generators(call: Call) -> tuple[torch.Generator, ...]:
    """Find the random generators that the module holds or is passed: a capture must know them beforehand."""
    module: nn.Module = call.module
    held = [value for child in module.modules() for value in vars(child).values()]
    passed = [arg.leaf for arg in call.layout.args if isinstance(arg, ConstantArg)]
    return tuple({id(value): value for value in (*held, *passed) if isinstance(value, torch.Generator)}.values())
