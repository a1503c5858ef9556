"""The way from a call to its graph: runs that teach, warmups, captures one at a time or all at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from simplegraph.batch.descriptor import BatchDescriptor
from simplegraph.batch.reasons import Reason
from simplegraph.config import CudaGraphMode
from simplegraph.context import bypassed
from simplegraph.graph.breaks.operators import recording_breaks
from simplegraph.graph.observe import MemoryObserver
from simplegraph.graph.tensors import storage_key, wait_collectives
from simplegraph.manager.jobs import CaptureJob, CaptureSummary, Key
from simplegraph.manager.manager import CudaGraphManager
from simplegraph.module.binding import Binding
from simplegraph.module.compare import EagerComparison
from simplegraph.module.inputs import InputSet
from simplegraph.module.plan import Call, CallLayout
from simplegraph.module.signature import CallReader, CannotBind, ConstantArg
from simplegraph.module.state import CapturedState, HeldTensor, held_tensors, kept_in_graph, put_back
from simplegraph.nested import TreeSpec, flatten

logger = logging.getLogger("simplegraph")


class Graphed:
    """What `_invoke` recognises a wrapped module by: the class after it in the MRO has the real call."""


def invoke(module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The module's own call, hooks included."""
    return super(Graphed, module).__call__(*args, **kwargs)


class GraphBuilder:
    """Builds the graphs of one module on one device.

    Args:
        manager: keeps the programs.
        reader: learns from calls that went well.

    Attributes:
        inputs_of: the static inputs that each program reads, by key.
        state: what the programs read of the module; None before the first capture.
    """

    def __init__(self, manager: CudaGraphManager, reader: CallReader) -> None:
        self.manager = manager
        self._reader = reader
        self._external: dict[int, Tensor] = {}
        self.inputs_of: dict[Hashable, InputSet] = {}
        self.state: CapturedState | None = None

    def drop(self) -> None:
        """Drop the programs and what they own."""
        self.inputs_of.clear()
        self._external.clear()
        self.state = None
        self.manager.reset()

    # One call at a time.

    def run_as_called(self, call: Call, reason: Reason) -> Any:
        """An eager run on the capture stream, with the caller's own tensors, that teaches what calls look like."""
        self.manager.stats.ran_eagerly(reason)
        trace_for = self._trace_for(call) if call.batch == call.padded else None
        outputs, spec, observer = self._run_on_capture_stream(call.module, call.args, call.kwargs, trace_for)
        binding = call.binding
        inputs = {storage_key(leaf) for leaf, _ in call.tensors}
        binding.writes = binding.writes or not inputs.isdisjoint(observer.written)
        # What eager breaks write, no capture sees: they do not run in one.
        binding.written |= {name for leaf, name in call.tensors if storage_key(leaf) in observer.written}
        self._keep_external(observer, inputs)
        binding.learn_outputs(call.batch, outputs, spec)
        self._reader.learn(call.batch, call.leaves, call.names, call.spec)
        binding.called = True
        if call.batch == call.padded:
            binding.warm[call.padded] += 1
        return spec.unflatten(outputs)

    def run_padded(self, call: Call) -> Any:
        """An eager run on the padded static inputs, exactly what will be captured; the caller gets its rows."""
        self.manager.stats.ran_eagerly(Reason.WARMUP)
        check = self._eager_first(call) if self.manager.config.verify else None
        inputs = self._inputs(call)
        plan_leaves = self._static_leaves(call.layout, inputs, call.padded)
        self._load(call, inputs)
        args, kwargs = call.spec.unflatten(plan_leaves)
        outputs, spec, observer = self._run_on_capture_stream(call.module, args, kwargs, self._trace_for(call))
        binding = call.binding
        self._keep_external(observer, inputs.storages)
        binding.note_written(observer, inputs)
        binding.learn_outputs(call.padded, outputs, spec)
        binding.warm[call.padded] += 1
        if binding.unsliceable is not None and call.padded != call.batch:
            raise binding.unsliceable  # found out too late: this one call runs twice
        own = inputs.storages
        outputs = [
            leaf.clone() if isinstance(leaf, Tensor) and storage_key(leaf) in own else leaf
            for leaf in binding.outputs.cut(outputs, call.batch, call.padded)
        ]
        if check is not None:
            check.compare(outputs)
        for name in binding.written:
            index = call.names.index(name)
            call.leaves[index].copy_(inputs.inputs[name].part(call.padded, 0, call.batch))
        return spec.unflatten(outputs)

    def _eager_first(self, call: Call) -> EagerComparison:
        """With `verify`, what eager gives for the call as it is; padding is compared with that."""
        check = EagerComparison(f"the padded warmup of batch size {call.padded}", self.manager.device.torch_device)
        copies = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in call.leaves]
        args, kwargs = call.spec.unflatten(copies)
        with bypassed(Reason.NESTED):
            check.expect(flatten(invoke(call.module, args, kwargs))[0])
        return check

    def needs_warmup(self, call: Call) -> bool:
        """Whether the call's size must run eagerly once more before its capture."""
        untraced = self._trace_for(call) is not None and call.key not in self.manager.traces
        return untraced or call.binding.warm[call.padded] < self.manager.config.num_warmups

    def _trace_for(self, call: Call) -> Key | None:
        return call.key if call.dispatch.mode is CudaGraphMode.PIECEWISE else None

    def _run_on_capture_stream(
        self, module: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], trace_for: Key | None = None
    ) -> tuple[list[Any], TreeSpec, MemoryObserver]:
        """An eager run, observed; a warmup of the piecewise graph `trace_for` also learns what breaks return."""
        device = self.manager.device
        observer = MemoryObserver()
        trace = None if trace_for is None else self.manager.traces.begin(observer)
        with device.on_capture_stream(), bypassed(Reason.NESTED), observer, recording_breaks(trace):
            outputs, spec = flatten(wait_collectives(invoke(module, args, kwargs)))
        if trace is not None and trace_for is not None:
            self.manager.traces.add(trace_for, trace, outputs)
        for leaf in outputs:
            if isinstance(leaf, Tensor) and leaf.is_cuda and leaf.layout is torch.strided:
                leaf.record_stream(torch.cuda.current_stream(leaf.device))
        return outputs, spec, observer

    def _keep_external(self, observer: MemoryObserver, inputs: set[int]) -> None:
        """Own what a run was seen to read, beside its inputs."""
        for key, tensor in (*observer.external.items(), *observer.passed.items()):
            known = self._external.get(key)
            if key not in inputs and (
                known is None or storage_key(known) != key
            ):  # it moved, and its key means another
                self._external[key] = tensor

    def _inputs(self, call: Call) -> InputSet:
        known = self.inputs_of.get(call.key)
        largest = max((d.num_tokens for _, d in self.descriptors()), default=call.padded)
        return known or call.binding.inputs_for(call.padded, largest, call.layout.args, call.leaves)

    def descriptors(self) -> list[tuple[CudaGraphMode, BatchDescriptor]]:
        return self.manager.dispatcher.descriptors()

    def _static_leaves(self, layout: CallLayout, inputs: InputSet, padded: int) -> list[Any]:
        return [
            arg.leaf if isinstance(arg, ConstantArg) else inputs.inputs[arg.name].view(padded) for arg in layout.args
        ]

    def _load(self, call: Call, inputs: InputSet) -> None:
        leaves, names = zip(*call.tensors, strict=True)
        for leaf, name in zip(inputs.detached(leaves), names, strict=True):
            static = inputs.inputs[name]
            part = static.part(call.padded, 0, call.batch)
            if part.data_ptr() != leaf.data_ptr():  # equal for what is passed by reference
                part.copy_(leaf)
            static.fill(call.padded, call.batch, call.padded)
        inputs.dirty = inputs.rows  # rows above this size were not looked at

    def capture(self, call: Call) -> None:
        """Capture the call's size; the static inputs are loaded first, since Python may look at shapes of them."""
        manager = self.manager
        inputs = self._inputs(call)
        self._load(call, inputs)
        job = self._jobs(call, inputs, [(call.dispatch.mode, call.dispatch.descriptor)])[0]
        summary = self._capture_jobs(call, inputs, [job], lazy=True)
        if summary.failed:
            error = next(iter(summary.failed.values()))
            if self.manager.config.on_capture_failure == "raise":
                del manager.failures[call.key]  # the next call tries again
                raise error
            raise CannotBind(Reason.CAPTURE_FAILED, str(error).splitlines()[0])
        self._captured(call.module, call.binding, [(job, inputs)])
        if call.binding.unsupported is not None:
            raise call.binding.unsupported

    def _capture_jobs(self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob], *, lazy: bool) -> CaptureSummary:
        """Capture; and where the module keeps tensors made during a capture, once more after warming every size.

        A cache filled by size is filled by the warmup then. What is kept even so would be graph memory in
        an attribute, with no meaning outside a replay: those sizes run eagerly.
        """
        before = held_tensors(call.module)
        warmups = 0 if lazy else self.manager.config.num_warmups
        summary = self._observed_capture(call, inputs, jobs, warmups, lazy)
        kept = self._kept(call, jobs, before)
        if kept and not lazy:
            with self.manager.device.on_capture_stream():
                for job in jobs:
                    job.run()
            before = held_tensors(call.module)
            summary = self._observed_capture(call, inputs, jobs, 0, lazy)
            kept = self._kept(call, jobs, before)
        if not kept:
            return summary
        return self.manager.refuse(
            jobs, f"{', '.join(kept)} would keep a tensor that exists only inside the graph", summary
        )

    def _observed_capture(
        self, call: Call, inputs: InputSet, jobs: Sequence[CaptureJob], num_warmups: int, lazy: bool
    ) -> CaptureSummary:
        observers: list[MemoryObserver] = []
        try:
            return self.manager.capture_jobs(jobs, num_warmups=num_warmups, observers=observers, lazy=lazy)
        except BaseException:
            self.manager.forget(jobs)  # nobody noted what they read, so they must not be replayed
            raise
        finally:
            for observer in observers:
                call.binding.note_written(observer, inputs)
                self._keep_external(observer, inputs.storages)

    def _kept(self, call: Call, jobs: Sequence[CaptureJob], before: list[HeldTensor]) -> list[str]:
        """Names of attributes that hold graph memory after a capture; they and the graphs are put back."""
        manager = self.manager
        kept = kept_in_graph(call.module, manager.device, manager.pool)
        if kept:
            put_back(kept, before)
            manager.forget(jobs)
        return [entry.name for entry in kept]

    def _jobs(
        self, call: Call, inputs: InputSet, todo: Sequence[tuple[CudaGraphMode, BatchDescriptor]]
    ) -> list[CaptureJob]:
        generators = _generators(call.module, call.layout)
        return [
            CaptureJob((call.binding.signature, *kind), *kind, self._forward(call, inputs, kind[1]), generators)
            for kind in todo
        ]

    def _forward(self, call: Call, inputs: InputSet, descriptor: BatchDescriptor) -> Callable[[], Any]:
        """The forward on the static inputs of a size."""
        args, kwargs = call.spec.unflatten(self._static_leaves(call.layout, inputs, descriptor.num_tokens))

        def run() -> Any:
            with bypassed(Reason.NESTED), torch.no_grad():
                return invoke(call.module, args, kwargs)

        return run

    def _captured(self, module: Any, binding: Binding, done: Sequence[tuple[CaptureJob, InputSet]]) -> None:
        """Take note of new programs, and of everything they read."""
        manager = self.manager
        for job, inputs in done:
            program = manager.programs.get(job.key)
            if program is not None:
                self.inputs_of[job.key] = inputs
                binding.learn_outputs(job.descriptor.num_tokens, program.outputs, program.spec)
        self.state = CapturedState(module, self._external)

    # All sizes at once.

    def capture_sizes(self, call: Call) -> CaptureSummary:
        manager = self.manager
        binding, inputs = call.binding, self._inputs(call)
        self._tile(call, inputs)
        todo = [kind for kind in self.descriptors() if (binding.signature, *kind) not in manager.programs]
        jobs = self._jobs(call, inputs, todo)
        summary = self._capture_jobs(call, inputs, jobs, lazy=False)
        self._captured(call.module, binding, [(job, inputs) for job in jobs])
        binding.called = True
        self._learn_second_size(call, inputs)
        self._reader.learn(call.batch, call.leaves, call.names, call.spec)
        manager._raise_failures(summary)
        return summary

    def _tile(self, call: Call, inputs: InputSet) -> None:
        """Fill the static inputs with the examples' rows over and over: real values, valid as indices."""
        for leaf, name in call.tensors:
            static = inputs.inputs[name]
            dim = static.arg.batch_dim
            if isinstance(dim, int):
                rows = torch.arange(call.padded, device=leaf.device) % call.batch
                static.view(call.padded).copy_(leaf.index_select(dim, rows))
            elif dim is None:
                static.view(call.padded).copy_(leaf)
        inputs.dirty = inputs.rows

    def _learn_second_size(self, call: Call, inputs: InputSet) -> None:
        """With a single captured size, run another one eagerly once: outputs can then be cut to their rows."""
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


def _generators(module: nn.Module, layout: CallLayout) -> tuple[torch.Generator, ...]:
    """Random generators that the module holds or is passed: a capture must know them beforehand."""
    held = [value for child in module.modules() for value in vars(child).values()]
    passed = [arg.leaf for arg in layout.args if isinstance(arg, ConstantArg)]
    return tuple({id(value): value for value in (*held, *passed) if isinstance(value, torch.Generator)}.values())
