"""The replay of calls of one layout and batch size: from arguments to outputs, with as little Python as possible."""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from simplegraph.base.errors import StaleGraphError
from simplegraph.base.nested import TreeSpec, flatten
from simplegraph.base.reasons import CannotBind, Reason
from simplegraph.base.tensors import layout_of
from simplegraph.call.call import Call
from simplegraph.call.inputs import (
    HostInput,
    InputSet,
    Spans,
    StaticInput,
    TensorArg,
    aliasable,
    aliases,
    batch_dim_of,
    overlap,
    overlaps_itself,
    slot,
)
from simplegraph.call.safe_indices import SafeIndices
from simplegraph.call.shared_outputs import SharedOutputs
from simplegraph.device.protocol import EARLY_LAUNCH_BLOCKERS
from simplegraph.guard.guards import CapturedState
from simplegraph.guard.reading import Reading
from simplegraph.guard.torch_state import TorchSettings
from simplegraph.guard.value_check import ValueCheck
from simplegraph.manager.lifecycle import SERVED, CapturedGraph
from simplegraph.manager.table import ProgramTable
from simplegraph.program.program import Program

logger = logging.getLogger("simplegraph")
Copies = tuple[list[Tensor], list[Tensor]]
NOTHING: Copies = ([], [])
LOADED: Copies = ([], [])  # in place of copies that were made already
CHECK_FIRST = object()  # in place of a result: the call must be checked before a launch
_copy_all = torch._foreach_copy_
_MAX_STRIDES = 64  # the most strides that are remembered for a layout with gaps, whose sizes may vary
_MAX_CHECKED_FIRST = 4096  # calls after a discarded launch
_ALIGNMENT = 64  # bytes: the alignment of all allocators, and more than any kernel requires


class Plan:
    """Serves calls of one layout and one batch size by one captured graph.

    Args:
        call: one of these calls.
        table, graph: the table of graphs, and the one to replay.
        inputs: the static inputs that the graph reads.
        state: the module's state that the graph reads.
        forbidden_memory: (index of an argument, memory in which it must not be).

    Attributes:
        slots: the expected leaves, and the views that they are copied to.
        rows, padded: real rows, and rows of the graph.
        outputs: views of the real rows of a replay's outputs, and leaves that are not graph memory.
        compared: the leaves that a proof compares with eager.
        addresses: addresses of the static inputs, by name; set only if `debug`.
        may_refuse: True if `refusal` must be asked for each call: some calls with such arguments must run eagerly.
        debug: True to check addresses before each replay.
        calls_to_check_first: the number of calls that are checked before their launch. If it is 0, the launch is early:
            the host checks while the GPU works; if it is negative, no launch ever is.
        waits: True if a call returns only after its inputs are copied, so that the caller may overwrite them.
        differentiable: True if results of calls under grad mode have a gradient.
        only_replays: True if a call does nothing but one replay, so that an early launch can be discarded.
    """

    differentiable = False
    only_replays = True

    def __init__(
        self,
        call: Call,
        table: ProgramTable,
        graph: CapturedGraph,
        inputs: InputSet,
        state: CapturedState,
        forbidden_memory: Sequence[tuple[int, Spans]],
    ) -> None:
        self.state, self.table = state, table
        self.graph, self.program = graph, graph.program
        self.device, self.pool = table.device, table.pool
        self.is_capturing, self._current_stream = table.device.is_capturing, table.device.current_stream
        self.inputs = inputs
        self._forbidden_memory = forbidden_memory
        self.rows, self.padded, self.padding = call.batch, call.padded, call.padding
        self.debug = table.config.debug
        self._static = table.config.outputs == "static"
        args = call.layout.args
        self.slots = [slot(arg, inputs, self.padded, self.rows) for arg in args]
        self._bindings = [tuple(slot) for slot in self.slots]  # a plain tuple is unpacked faster than a named one
        self._repeated: list[tuple[Tensor, Tensor]] = []
        if self.padding:
            self._prepare_padding()
        written = call.binding.written
        self.written_back = [at for at, arg in enumerate(args) if isinstance(arg, TensorArg) and arg.name in written]
        self._tensors = aliasable(args)
        self._aliases = aliases([call.leaves[at] for at in self._tensors])
        # Otherwise, arguments have such aliases only if two copied tensors begin at one address.
        self._inputs_alias = any(slot.reference for slot in self.slots) or any(
            same != at or start not in (at, -1) for at, (same, start) in enumerate(self._aliases)
        )
        hosted = {arg.name for arg in args if isinstance(arg, HostInput)}
        # If eager's copy from the CPU is complete when the call returns, the replay's copy must be complete, too.
        self.waits = not hosted.isdisjoint(call.binding.waited)
        if self.debug:
            self.addresses = {name: static.view(self.padded).data_ptr() for name, static in inputs.inputs.items()}
        self._prepare_outputs(call, self.program.outputs, self.program.spec)
        self._hosts: list[tuple[int, StaticInput]] = []
        if self.program.breaks:
            self._prepare_breaks(call)
        self._prepare_early_launch(call)

    def _prepare_padding(self) -> None:
        """Prepare the copies that set the padding rows of static inputs."""
        statics = [static for static in self.inputs.inputs.values() if static.batched]
        tails = [(s, s.part(self.padded, self.rows, self.padded)) for s in statics]  # with their padding rows
        numbers = [(s, tail) for s, tail in tails if s.pads_with_number]
        self._pads = _pads(numbers)
        # Views of inputs whose rows are not first overlap between sizes: padding must be set every time.
        self._overlapping = _pads([(s, tail) for s, tail in numbers if not s.rows_first])
        repeated = [(s, tail) for s, tail in tails if s.pad == "repeat-last"]
        self._repeated = [(tail, s.part(self.padded, self.rows - 1, self.rows).expand_as(tail)) for s, tail in repeated]

    def _prepare_breaks(self, call: Call) -> None:
        """Prepare the eager breaks of the graph, which are passed the tensors on the CPU."""
        args = enumerate(call.layout.args)
        self._hosts = [(index, self.inputs.inputs[arg.name]) for index, arg in args if isinstance(arg, HostInput)]
        undo = functools.partial(call.plain.undo_break_changes, weakref.ref(call.module), self.graph.unread_places)
        self.program.look_after_breaks(undo)
        if self.padding:
            call.binding.cut_breaks(self.program, self.padded)

    def _prepare_early_launch(self, call: Call) -> None:
        """Allow launches before the check of a call, if they are safe for a call that is meant for another graph.

        So the graph may write nothing but static inputs and graph memory that no caller holds, and no value may make a
        kernel fault.
        """
        self._indices: SafeIndices | None = None
        self.calls_to_check_first = -1
        self._checked_first = 0  # the calls that were checked first after the latest attempt without a result
        acts = self.program.breaks or self.may_refuse or self.waits or call.carried.places
        if acts or self.debug or self.table.hooks or not (self.only_replays and call.binding.only_computes):
            return
        indices = self.program.indices
        if indices is None or indices.may_fault:
            return
        if indices.ranges or indices.sources:
            safe = SafeIndices(self.slots, self.inputs, self.padded, indices, call.module)
            if not safe.are_known:
                return
            self._indices = safe
        self.calls_to_check_first = 1

    def launch_early(
        self,
        leaves: Sequence[Any],
        copies: Copies,
        attributes: dict[str, Any],
        reading: Reading,
        check: ValueCheck,
        settings: TorchSettings,
    ) -> Any:
        """Launch the graph, and check the call while the GPU works. Call it with the pool's lock held.

        Args:
            leaves: the call's.
            copies: what `bind` returned for them.
            attributes: the module's own.
            reading: checks what the graph reads of the module.
            check: checks the plain values that the call must find.
            settings: those of torch that the call must have.

        Returns:
            The outputs; `CHECK_FIRST` if there was no launch, or a discarded one, which changed nothing that anybody
            sees. Then the next 1 calls are checked before their launch, later 2, 4, 8 and so on.
        """
        replays, is_same, (sources, targets) = self.graph.replays_until_proof, False, copies
        if self._may_launch_early(copies):
            try:
                if self._indices is not None:
                    copies = self._indices.load(sources, targets)
                if (copies is not NOTHING or self.padding) and self._current_stream() == self.pool.stream:
                    self.load(copies)  # while the host looks
                    copies = LOADED
                # The graph's addresses must still be valid: memory of tensors, or kept by torch's allocator.
                read, releases = None, self.device.cache_releases() if reading.shows_releases else None
                is_there = releases is not None and releases == reading.cache_releases
                if not is_there:
                    read = reading.read_if_in_place(attributes)
                    if read is not None:
                        is_there, reading.cache_releases = True, releases
                if is_there:
                    result = self.replay(leaves, copies)
                    is_same = check.holds(attributes) and reading.holds(attributes, check, read)
                    is_same = is_same and settings.hold()
                    if is_same and self._indices is not None:
                        self._indices.check(sources)
            except BaseException as error:
                self.inputs.forget_padding()
                if not isinstance(error, Exception):
                    raise
                # If this graph does serve the call, the second attempt raises it again.
                logger.debug("the early launch of %s failed", self.graph.counters.label, exc_info=True)
                is_same = False
        if is_same:
            return result
        if self.graph.replays_until_proof != replays:
            self.table.discard_launch(self.graph, self.padding)
        self._checked_first = self.calls_to_check_first = min(2 * self._checked_first or 1, _MAX_CHECKED_FIRST)
        return CHECK_FIRST

    def note_checked(self) -> None:
        """Note that a call was checked before its launch, and that it was launched."""
        self.calls_to_check_first -= 1
        if self._indices is not None:
            self._indices.note_checked()

    def _may_launch_early(self, copies: Copies) -> bool:
        """True if a discarded launch would overwrite nothing that eager may read, and nothing forbids one."""
        if self.program.draws or self.pool.shared or EARLY_LAUNCH_BLOCKERS:
            return False
        if self.inputs.handed_out and (copies is not NOTHING or self.padding):
            return False
        if self._indices is not None and not (
            self._indices.can_load(copies[0]) and self._current_stream() == self.pool.stream
        ):
            return False
        lent = self.table.lent
        return lent is None or not lent.are_held()

    @staticmethod
    def returned(program: Program) -> tuple[Sequence[Any], TreeSpec]:
        """Return the leaves that the forward itself returned, and their structure."""
        return program.outputs, program.spec

    def _prepare_outputs(self, call: Call, whole: Sequence[Any], spec: TreeSpec) -> None:
        """Find the returned leaves that must be cloned for the caller; `spec` is their structure."""
        table, self._spec = self.table, spec
        tensors = {index: leaf for index, leaf in enumerate(whole) if issubclass(type(leaf), Tensor)}
        self._graph_outputs = {index for index, leaf in tensors.items() if table.device.in_pool(table.pool, leaf)}
        clone = (call.binding.made & tensors.keys()) - self._graph_outputs  # made from Python data, not by replays
        if not self._static:
            clone |= self._graph_outputs
        self.outputs = self.compared = call.binding.outputs.cut(whole, self.rows, self.padded)
        self._clone = sorted(clone)
        # Returned as aliases, so that a caller's change of an output's shape has no effect on the next call.
        self._lent = sorted(self._graph_outputs) if self._static else []
        if self._lent:
            self.program.lent.add_owner(self, self.outputs)
        passed = self.inputs.leaves(call.layout.args, self.padded)
        self._shared = SharedOutputs(whole, passed, self.outputs, self.slots, clone, self._lent)
        self._outputs_alias = self._shared.shares_memory
        self.may_refuse = bool(self.written_back or self._shared.sources or self._forbidden_memory)
        single = len(self.outputs) == 1 and not self._spec.children and self._spec.type is None
        self._single = single and not self._outputs_alias

    def proving(self) -> contextlib.AbstractContextManager[None]:
        """Surround a proof; overridden by plans whose eager run must read the addresses of the replays."""
        return contextlib.nullcontext()

    @property
    def unproven(self) -> bool:
        """True if the next such call must be compared with eager, or run eagerly."""
        return self.graph.verdict(self.rows) not in SERVED

    def same_layout(self, leaves: Sequence[Any]) -> bool:
        """True if a call's tensors have the static inputs' strides and alignment, so that eager runs equal kernels."""
        pairs = ((leaf, slot) for leaf, slot in zip(leaves, self.slots, strict=True) if slot.shape is not None)
        return all(leaf.stride() == slot.stride and leaf.data_ptr() % _ALIGNMENT == 0 for leaf, slot in pairs)

    def copies(self, leaves: Sequence[Any]) -> Copies:
        """Return the copies that a call of this layout and size needs. Raises CannotBind."""
        copies = self.bind(leaves)
        if copies is None:
            refusal = self.refusal(leaves) if self.may_refuse else None
            raise refusal or CannotBind(
                Reason.OPAQUE_ARGUMENT, "an argument is not equal to itself (NaN?), so it cannot be part of a key"
            )
        return copies

    def bind(self, leaves: Sequence[Any]) -> Copies | None:
        """Return the copies that this call needs; None if an argument differs from the captured one or is refused."""
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        starts: set[int] = set()
        try:
            # Unpacking is cheaper than reading attributes. The layout has checked that both have the same length.
            for leaf, (view, arg, shape, dtype, index, start, stride, reference, kind, strides) in zip(  # noqa: B905
                leaves, self._bindings
            ):
                if leaf is view:
                    continue  # a tensor of static_inputs(), written in place
                if shape is None:
                    if not arg.holds(leaf):
                        return None
                    continue
                if (
                    type(leaf) is not kind
                    or leaf.dtype is not dtype
                    or leaf.shape != shape
                    or leaf.get_device() != index
                    or (index < 0 and not leaf.is_cpu and not view.is_meta)  # a meta tensor has the index of the CPU's
                ):
                    return None
                if leaf.stride() != stride and leaf.stride() not in strides and not _learn_strides(arg, leaf, strides):
                    return None
                address = leaf.data_ptr()
                if address == start and leaf.stride() == stride and not (leaf.is_conj() or leaf.is_neg()):
                    continue  # another view of the same memory
                if reference:
                    return None
                starts.add(address)
                sources.append(leaf)
                targets.append(view)
            if (self._inputs_alias or len(starts) < len(sources)) and not self._has_aliases(leaves):
                return None
        except RuntimeError:  # a layout without an address, such as sparse
            return None
        if self.may_refuse and self.refusal(leaves) is not None:
            return None
        if not sources:
            return NOTHING
        if self.inputs.handed_out:
            return self._detached(leaves, sources, targets)
        return sources, targets

    def _detached(self, leaves: Sequence[Any], sources: list[Tensor], targets: list[Tensor]) -> Copies | None:
        """Clone the sources that are in static inputs; None if their aliases differ from the captured call's."""
        detached = self.inputs.detached(sources)
        if any(map(operator.is_not, detached, sources)) and not self._has_aliases(leaves):
            return None
        return detached, targets

    def _has_aliases(self, leaves: Sequence[Any]) -> bool:
        """True if the arguments of a call have the same aliases as those of the captured call; see `aliases`."""
        return aliases([leaves[at] for at in self._tensors]) == self._aliases

    def load(self, copies: Copies) -> None:
        """Copy the inputs that are not in place, and set the padding rows that hold other values."""
        sources, targets = copies
        if self.padding:
            pads = self._overlapping  # set at every call
            if self.inputs.dirty > self.padded and not self.inputs.handed_out:
                self.inputs.clean(self.rows)  # once after a larger batch, instead of at every call
            if self.inputs.handed_out or self.inputs.dirty > self.rows:
                pads = self._pads
                if self.inputs.dirty <= self.padded:
                    self.inputs.dirty = self.rows
            if pads[0]:
                sources, targets = [*sources, *pads[0]], [*targets, *pads[1]]
        if self.inputs.dirty < self.rows:
            self.inputs.dirty = self.rows
        # A copy from pageable CPU memory returns when everything is read. A copy from pinned memory goes on after the
        # return, as in eager, unless `replay` waits for it.
        if len(sources) == 1:
            targets[0].copy_(sources[0], True)
        elif sources:
            _copy_all(targets, sources, True)
        for tail, last in self._repeated:
            tail.copy_(last)

    def refusal(self, leaves: Sequence[Any]) -> CannotBind | None:
        """Return why no replay can serve these leaves; None if one can. Called only if `may_refuse`."""
        if self.written_back and self._aliased(leaves):
            return CannotBind(Reason.ALIASED, "the forward writes to one of them")
        if self._static and any(self.device.in_pool(self.pool, leaves[index]) for index in self.written_back):
            return CannotBind(Reason.ALIASED, "the forward writes to a static output that it is passed")
        if (
            self.inputs.handed_out
            and (self.written_back or self._shared.sources)
            and any(
                self.inputs.buffer_spans.contains(leaf.data_ptr())
                for leaf, slot in zip(leaves, self.slots, strict=True)
                if slot.shape is not None and not slot.is_filled_by(leaf)
            )
        ):
            return CannotBind(
                Reason.ALIASED, "an argument lies in the static input of another one, which a replay overwrites"
            )
        for index, spans in self._forbidden_memory:
            if spans.contains(leaves[index].data_ptr()):
                return CannotBind(Reason.ALIASED, f"{self.slots[index].arg.name} and memory of the module")
        return self._shared.refusal(leaves)

    def _aliased(self, leaves: Sequence[Any]) -> bool:
        """True if inputs share memory, unlike their static inputs, which matters if the forward writes inputs."""
        slots = zip(leaves, self.slots, strict=True)
        pairs = overlap(leaf for leaf, slot in slots if slot.shape is not None and not slot.reference)
        return pairs or any(overlaps_itself(leaves[at]) for at in self.written_back if not self.slots[at].reference)

    def write_back(self, leaves: Sequence[Any]) -> None:
        """Copy the static inputs that the forward wrote to the caller's tensors."""
        for index in self.written_back:
            slot = self.slots[index]
            if not slot.is_filled_by(leaves[index]):
                leaves[index].copy_(slot.view)
        if self.padding:
            self.inputs.forget_padding()  # the forward may have written padding rows too

    def replay(self, leaves: Sequence[Any], copies: Copies) -> Any:
        """Replay with these inputs. Call it with the pool's lock held.

        Returns:
            The outputs in the forward's structure: clones, or graph memory with static outputs.
        """
        if self.debug:
            self.check_places()
        if self._current_stream() != self.pool.stream:
            self.table.order_streams()
        try:
            if copies is not LOADED and (copies is not NOTHING or self.padding):
                self.load(copies)
            copied = self.device.mark() if self.waits else None
            for index, static in self._hosts:
                static.fill_host(leaves[index], self.padded)
            self.table.replay(self.graph, self.padding)
        except BaseException:
            self.inputs.forget_padding()  # padding rows may have been written, and no write-back followed
            raise
        if copied is not None:  # while the graph runs
            copied.wait()
        if self.written_back:
            self.write_back(leaves)
        if self._lent:
            self.table.lent = self.program.lent
        if self._single:
            output = self.outputs[0]
            if self._clone:
                return output.clone()
            return output.detach() if self._lent else output
        if self._outputs_alias:
            return self._spec.unflatten(self._shared.hand_out(leaves))
        outputs = self.outputs
        if self._clone or self._lent:
            outputs = outputs.copy()
            for index in self._clone:
                outputs[index] = outputs[index].clone()
            for index in self._lent:
                outputs[index] = outputs[index].detach()
        return self._spec.unflatten(outputs)

    def check_places(self) -> None:
        """Refuse a replay if inputs or weights are no longer at the addresses that the graph reads."""
        inputs = self.inputs.inputs.items()
        moved = [name for name, static in inputs if static.view(self.padded).data_ptr() != self.addresses[name]]
        names = [f"argument {name}" for name in moved] + self.state.what_moved()
        if names:
            raise StaleGraphError(
                f"no longer where the graph of {self.graph.counters.label} reads it: {', '.join(names)}. "
                "Something resized or replaced it; call reset_graphs() to capture again."
            )

    def in_static_outputs(self, result: Any) -> Any:
        """Return eager's result in the static outputs, if outputs are static: each call returns the same memory."""
        if not self._static:
            return result
        self.table.lent = self.program.lent
        leaves, _ = flatten(result)
        static = {id(leaves[index]): self.outputs[index].detach() for index in self._graph_outputs}
        for index in self._graph_outputs:
            output = self.outputs[index]
            once = tuple(slice(0, size if output.stride(dim) else 1) for dim, size in enumerate(output.shape))
            output[once].copy_(leaves[index][once])  # elements that `expand` repeats are copied once
        return self._spec.unflatten(static.get(id(leaf), leaf) for leaf in leaves)

    def for_comparison(self, result: Any) -> Any:
        """Return eager's result in the form in which it is compared with a replay's outputs."""
        return result


def _learn_strides(arg: Any, tensor: Tensor, strides: set[tuple[int, ...]]) -> bool:
    """Add a tensor's strides to the strides of an argument's layout; False if the tensor has another layout."""
    if layout_of(tensor, batch_dim_of(arg)) != arg.layout:
        return False
    if len(strides) >= _MAX_STRIDES:
        strides.clear()
    strides.add(tensor.stride())
    return True


def _pads(tails: list[tuple[StaticInput, Tensor]]) -> Copies:
    """Return the copies that set padding rows: padding numbers, and the views of the rows."""
    return [static.pad_value.expand(tail.shape) for static, tail in tails], [tail for _, tail in tails]
